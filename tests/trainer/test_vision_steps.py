"""Complete steps over prompts with images, in this process."""

import importlib.util
import itertools
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

if not importlib.util.find_spec("torchvision"):
    pytest.skip("torchvision is not installed (scripts/test.sh installs it)", allow_module_level=True)

from rltrain.config.load import load_config
from rltrain.models.vision import tower
from rltrain.run.preflight.models import PreflightResult, check_images
from rltrain.run.report.sample_logger import _job
from rltrain.run.report.sample_writer import SampleWriter
from rltrain.trainer.plan import ImageSizes
from tests.distance import distance
from tests.local import local_trainer
from tests.tiny import small_run, write_arithmetic
from tests.tiny_vision import write_pictures
from tests.trainer.steps import ACTOR, GAE, Moved, numbers_of, weights

pytestmark = pytest.mark.usefixtures("process_group")

MODEL, ROLLOUT = "actor_rollout_ref__model__", "actor_rollout_ref__rollout__"
FROZEN = {ACTOR + "freeze_vision_tower": True}
LORA = {MODEL + "lora_rank": 4, MODEL + "lora_alpha": 8, ACTOR + "optim__lr": 0.01}
CARRY = {ROLLOUT + "tail": "carry_over", ROLLOUT + "oversample_ratio": 1.5}
CARRY |= {"algorithm__rollout_correction__rollout_is": "token"}
VARIANTS = {
    "frozen, exact kl": ("qwen2_5_vl", FROZEN | {ACTOR + "kl_loss_type": "full"}),
    "gae": ("qwen3_vl", GAE),
    "adapters, internvl": ("internvl", LORA),
    "carry over": ("qwen2_vl", CARRY),
    "qwen3.5": ("qwen3_5", {}),
    "qwen3.5, adapters": ("qwen3_5", LORA),
    "glm-4.1v": ("glm4v", {}),
    "videos": ("qwen2_5_vl", {"videos": True}),
    "videos, qwen3": ("qwen3_vl", {"videos": True}),
}


@pytest.fixture
def make(vision_models, picture_files, tmp_path):
    def trainer(family, *, videos=False, **changes):
        sizes = {"data__max_prompt_length": 96 if videos else 48, ACTOR + "ppo_max_token_len_per_gpu": 128}
        count = itertools.count()
        twist = lambda row, score: score + (next(count) * 7 % 5) / 5  # noqa: E731
        files = picture_files
        if videos:
            names = {"train": range(24), "test": range(6)}
            files = [write_pictures(tmp_path / f"{name}.parquet", rows, videos=True) for name, rows in names.items()]
        return local_trainer(small_run(vision_models[family], files, tmp_path, **(sizes | changes)), twist)

    return trainer


@pytest.mark.smoke("Steps with images")
@pytest.mark.few(2)
@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_with_pictures_do_not_depend_on_the_cut(make, variant):
    (family, changes), found = VARIANTS[variant], []
    for cut in ({}, {ACTOR + "use_dynamic_bsz": False, ACTOR + "ppo_micro_batch_size_per_gpu": 3}):
        trainer = make(family, **changes, **cut)
        moved = Moved(trainer)
        parts = tower(trainer.worker.actor.policy.model)
        before = torch.cat([weights(part) for part in parts])
        metrics = [numbers_of(trainer.step(step).metrics) for step in (1, 2)]
        saw = (torch.cat([weights(part) for part in parts]) - before).norm()
        assert (saw > 0) == (not {ACTOR + "freeze_vision_tower", MODEL + "lora_rank"} & set(changes))
        found.append((moved.by_role(), metrics))
    for mine, theirs in zip(found[0][0], found[1][0], strict=True):
        assert mine.norm() > 0.02
        assert distance(theirs, mine) < 1e-4
    for mine, theirs in zip(found[0][1], found[1][1], strict=True):
        assert mine["rollout/log_prob_gap/mean"] < 1e-4
        assert mine == pytest.approx(theirs, abs=2e-4, rel=2e-4)


def test_a_step_brings_pixels_of_its_prompts_once(make):
    trainer = make("qwen2_5_vl")
    store, task = trainer.data.prompts["train"], trainer.experience_task()
    samples, metrics = trainer.actor.generate(task)
    (part,) = samples.parts_with("images")
    pixels = [store.encoded(row).images for row in task.rows.tolist()]
    assert [value and len(value) for value in part.ref.dictionary("images").values] == [None, 1, 2, None]
    nbytes = sum(array.nbytes for array in pixels if array)
    assert metrics["perf/image_gb"] == nbytes / 2**30
    assert nbytes < len(pickle.dumps(part.ref)) < 1.2 * nbytes
    assert samples.request(np.arange(16), ["rollout_log_probs"]).parts[0].columns == ("rollout_log_probs",)
    answered, _ = trainer.actor.generate(replace(task, is_learnt_from=False, call=next(trainer.calls)))
    (part,) = answered.parts_with("prompt")
    assert "images" not in part.ref


def test_pictures_in_validation_alone_train_no_tower(make, tmp_path):
    texts = write_arithmetic(tmp_path / "texts.parquet", range(24))
    trainer = make("qwen3_vl", **GAE, data__train_files=texts)
    before = [weights(part) for part in tower(trainer.worker.actor.policy.model)]
    trainer.step(1)
    trained = {id(each) for group in trainer.worker.actor.updater.optimizer.param_groups for each in group["params"]}
    parts = tower(trainer.worker.actor.policy.model)
    assert not trained & {id(parameter) for part in parts for parameter in part.parameters()}
    assert all(torch.equal(weights(part), then) for part, then in zip(parts, before, strict=True))
    assert not trainer.worker.critic.model.sees
    assert trainer.worker.actor.policy.sees


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_the_driver_knows_what_images_cost(make, family):
    trainer = make(family, **{ACTOR + "ppo_max_token_len_per_gpu": 4096}, **FROZEN)
    assert trainer.step(1).metrics["perf/balance/images_share"] == 1 / 4
    store, images = trainer.data.prompts["train"], trainer.data.images
    assert images.share == 2 / 3
    assert [images.most_images, images.most_rows] == [2, store.image_rows.max()]
    pixels = [store.encoded(i).images for i in range(len(store))]
    assert images.mean_bytes == pytest.approx(sum(array.nbytes for array in pixels if array) / len(store))


def test_kept_answers_say_where_the_pictures_are(make, picture_files):
    trainer = make("qwen2_5_vl")
    data, samples = trainer.data, trainer.actor.generate(trainer.experience_task())[0]
    samples.update({name: np.zeros(16) for name in ("score", "reward", "reward_failed")})
    writer = SampleWriter(data.rows, data.prompts, data.encoder.backend, lambda reference: reference)
    table = writer.columns(_job("train", 1, samples, np.arange(3), 4, most=1))
    assert table["num_images"] == [0, 1, 2]
    assert table["images"] == [None, *(f"{str(picture_files[0])!r} row {row}" for row in (1, 2))]


REFUSED = {
    "sglang": ({ROLLOUT + "name": "sglang", MODEL + "path": "qwen2_vl"}, "images of a qwen2_vl were not compared"),
    "a critic of another family": (
        {"algorithm__adv_estimator": "gae", "critic__model__path": "qwen3_vl"},
        "is a qwen3_vl",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_takes_no_pictures_is_refused(vision_models, picture_files, tmp_path, name):
    changes, message = REFUSED[name]
    changes = {key: vision_models.get(value, value) for key, value in changes.items()}
    cfg = load_config(small_run(vision_models["qwen2_5_vl"], picture_files, tmp_path, **changes)).config
    for images in (ImageSizes(), None):
        check_images(cfg, found := PreflightResult(images=images))
        assert [message in problem for problem in found.problems] == [True] * bool(images)
