"""Checkpoints of steps over prompts with pictures, in this process."""

import importlib.util
import itertools

import pytest
import torch

if not importlib.util.find_spec("torchvision"):
    pytest.skip("torchvision is not installed (scripts/test.sh installs it)", allow_module_level=True)

from rltrain.workers.tasks import SaveTask
from tests.local import local_trainer
from tests.tiny import small_run
from tests.tiny_vision import save_tiny_vision_model, write_pictures
from tests.trainer.steps import ACTOR, GAE, numbers_of

pytestmark = pytest.mark.usefixtures("process_group")

FROZEN = {ACTOR + "freeze_vision_tower": True}
RUNS = {
    "trained": ("qwen2_5_vl", {}),
    "frozen, a critic": ("qwen3_vl", FROZEN | GAE),
    "tiles": ("internvl", {}),
}


def whole(trainer) -> dict[str, torch.Tensor]:
    worker = trainer.worker
    models = [worker.actor.policy, *([worker.critic.model] if trainer.critic else [])]
    return {
        f"{number} {name}": each.full_tensor().detach().clone()
        for number, model in enumerate(models)
        for name, each in model.named_parameters()
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(values, other[name]) for name, values in one.items())


@pytest.mark.few(1)
@pytest.mark.parametrize("name", RUNS)
def test_steps_with_pictures_resume_bit_for_bit(name, tmp_path):
    family, changes = RUNS[name]
    model = save_tiny_vision_model(tmp_path / "model", family, tied=False)
    files = write_pictures(tmp_path / "train.parquet", range(24)), write_pictures(tmp_path / "t.parquet", range(6))

    def make():
        count = itertools.count()
        twist = lambda row, score: score + (next(count) % 16 * 7 % 5) / 5  # noqa: E731
        sizes = {"data__max_prompt_length": 48, ACTOR + "ppo_max_token_len_per_gpu": 128}
        return local_trainer(small_run(model, files, tmp_path, **(sizes | changes)), twist)

    straight = make()
    straight.step(1)
    roles = {"actor": straight.actor} | ({"critic": straight.critic} if straight.critic else {})
    for role, each in roles.items():
        each.begin_save(SaveTask(str(tmp_path / role))).finish()
    progress, saved = straight.progress, whole(straight)
    expected = numbers_of(straight.step(2).metrics)
    resumed = make()
    resumed.restore(progress)
    for role in roles:
        getattr(resumed, role).load(str(tmp_path / role), False)
    assert same(whole(resumed), saved)
    assert numbers_of(resumed.step(2).metrics) == expected
    assert same(whole(resumed), whole(straight))
    assert not same(whole(resumed), saved)
