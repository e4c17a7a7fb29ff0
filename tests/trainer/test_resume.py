"""A run that is stopped after every step equals an uninterrupted run, number for number: in this process,
without Ray.
"""

import functools
import importlib.util
import zlib

import numpy as np
import pytest
import torch

from rltrain.common.stop import Stop
from rltrain.models.weights.state import moments
from rltrain.run.checkpoints.folder import RunFolder
from rltrain.run.checkpoints.resume import find_resume_point
from rltrain.run.checkpoints.saver import Saver
from rltrain.runtime.samples import assemble
from tests import local
from tests.tiny import save_tiny_biased_moe, small_run, write_arithmetic
from tests.tiny_vision import save_tiny_vision_model, write_pictures
from tests.trainer.steps import ACTOR, CORRECTION, GAE, numbers_of, save_moe

pytestmark = pytest.mark.usefixtures("process_group")

ROLLOUT, MODEL, FILTER = "actor_rollout_ref__rollout__", "actor_rollout_ref__model__", "algorithm__filter_groups__"
REF = "actor_rollout_ref__ref__"
# Nine rows and four prompts a step: an epoch is two steps, and a row is left out of each.
NUM_ROWS, STEPS = 9, 4
CURRICULUM = {"data__sampler__name": "solve_rate"}
# The engine's own log-probs reach the loss, so that every bit of them counts.
OFF_POLICY = {CORRECTION + "rollout_is": "token"}
TAIL = {ROLLOUT + "oversample_ratio": 1.5, "data__max_response_length": 20, **OFF_POLICY}
CARRY, OVERSAMPLE = ({ROLLOUT + "tail": name, **TAIL} for name in ("carry_over", "oversample"))
PICTURES = {"data__max_prompt_length": 48, ACTOR + "ppo_max_token_len_per_gpu": 160}
# Half of the answers at a time, so that which are begun first decides which end first.
IN_JOBS = {ROLLOUT + "max_num_seqs": 8}
# Changes, and a metric that is not 0 where the run does what its name says.
RUNS = {
    "critic, adaptive kl, filtered groups, curriculum": (
        {**GAE, **CURRICULUM, "algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__type": "adaptive",
         "algorithm__kl_ctrl__horizon": 50, FILTER + "enable": True, FILTER + "metric": "seq_reward",
         "data__gen_batch_size": 2, "trainer__critic_warmup": 1},
        "filter_groups/prompts_thrown_away",
    ),
    "schedule, shuffled epochs, validated": (
        {ACTOR + "optim__lr_warmup_steps": 3, ACTOR + "shuffle": True, ACTOR + "ppo_epochs": 2, **OFF_POLICY},
        "rollout/canary_gap",
    ),
    "carried over, curriculum": ({**CARRY, **IN_JOBS, **CURRICULUM}, "rollout/tail/carried_tokens"),
    "pictures carried over": ({**CARRY, **PICTURES}, "rollout/tail/carried_tokens"),
    "a reference that moves": (
        {REF + "update_every_steps": 2, REF + "update_mix": 0.5, ACTOR + "kl_loss_coef": 0.5}, "actor/ref_moved",
    ),
    "equal rewards": ({}, "reward/equal_steps"),
    "entropy at a target": (
        {ACTOR + "entropy_coeff": 0, ACTOR + "adaptive_entropy__target_entropy": 9.0,
         ACTOR + "adaptive_entropy__delta_ent_coef": 0.1, ACTOR + "adaptive_entropy__max_ent_coef": 0.3},
        "actor/entropy_coeff",
    ),
    "oversampled": ({**OVERSAMPLE, **IN_JOBS}, "rollout/tail/tokens_thrown_away"),
    "carried over, rewards at the end": ({**CARRY, "reward__overlap": False}, "rollout/tail/carried_tokens"),
    "remax": ({"algorithm__adv_estimator": "remax", **IN_JOBS, **OFF_POLICY}, "actor/grad_norm"),
    "adapters, critic": (
        {**GAE, MODEL + "lora_rank": 4, ACTOR + "optim__lr": 0.01, "critic__model__lora_rank": 2}, "critic/vf_loss"
    ),
    "float16, schedule held": (
        {**GAE, ACTOR + "fsdp_config__compute_dtype": "float16", "critic__model__fsdp_config__compute_dtype": "float16",
         ROLLOUT + "dtype": "float16", ACTOR + "optim__lr_warmup_steps": 3}, "actor/steps_held"
    ),
    "experts of the engine": ({ACTOR + "router_replay__mode": "R3", **OFF_POLICY}, "moe/max_vio/mean"),
    "experts of the pass": ({ACTOR + "router_replay__mode": "R2", **OFF_POLICY}, "moe/max_vio/mean"),
    "experts with a bias": (
        {ACTOR + "router_bias_update_rate": 0.02, REF + "update_every_steps": 2, **OFF_POLICY}, "moe/max_vio/mean"
    ),
    "experts with adapters": (
        {MODEL + "lora_rank": 2, MODEL + "target_modules": "[q_proj,experts]", ACTOR + "optim__lr": 0.01, **OFF_POLICY},
        "actor/grad_norm",
    ),
    "pictures, critic": ({**PICTURES, **GAE, **OFF_POLICY}, "critic/vf_loss"),
}  # fmt: skip
ALWAYS = [*(each for each in list(RUNS)[:5] if "pictures" not in each), "adapters, critic", "pictures, critic"]
ALWAYS += ["experts of the engine", "experts with a bias"]


def state_of(trainer) -> dict[str, torch.Tensor]:
    """Return weights and optimizer of every role."""
    worker, found = trainer.worker, {}
    roles = {"actor": (worker.actor.policy, worker.actor.updater)}
    roles |= {"critic": (worker.critic.model, worker.critic.updater)} if trainer.critic else {}
    for role, (model, updater) in roles.items():
        found |= {f"{role} {name}": each.clone() for name, each in model.named_buffers()}
        for name, each in model.named_parameters():
            found[f"{role} {name}"] = each.full_tensor().detach().clone()
            for kind, values in moments(updater.optimizer, each).items() if each.requires_grad else ():
                found[f"{role} {name} {kind}"] = getattr(values, "full_tensor", lambda v=values: v)().clone()
    return found


def answers_of(samples) -> dict[str, list]:
    """Return texts, tokens, and all numbers."""
    request = samples.request(np.arange(len(samples)), ["text", "response", "rollout_log_probs"])
    found = assemble(request, [part.ref for part in request.parts])
    columns = {name: found.ragged(name).values.tolist() for name in ("response", "rollout_log_probs")}
    columns |= {name: values.tolist() for name, values in samples.numbers.items() if name != "ended_s"}
    return columns | {"text": found["text"]}


def step_of(trainer, step: int, validates: bool) -> dict[str, dict]:
    """Return everything visible of a step: metrics, samples, and the resulting weights."""
    made = trainer.step(step)
    metrics, answers = numbers_of(made.metrics), answers_of(made.samples)
    metrics |= numbers_of(trainer.validation.run(step, Stop()).metrics) if validates else {}
    return {"metrics": metrics, "samples": answers, "state": state_of(trainer)}


def differences(one: dict[str, dict], other: dict[str, dict]) -> dict[str, list[str]]:
    """Return the names of the differences, by kind."""

    def differ(kind: str) -> list[str]:
        mine, theirs = one[kind], other[kind]
        same = torch.equal if kind == "state" else lambda *both: repr(both[0]) == repr(both[1])
        return [
            name for name in mine.keys() | theirs
            if name not in mine or name not in theirs or not same(mine[name], theirs[name])
        ]  # fmt: skip

    return {kind: found for kind in one if (found := differ(kind))}


@pytest.fixture
def arguments(tiny_model, tmp_path, monkeypatch):
    """arguments(name): return the arguments of a run of `RUNS`, whose scores depend on the text of a response."""

    def make(name: str) -> list[str]:
        score = lambda text, *rest: 0.5 if "equal" in name else zlib.crc32(text.encode()) % 5 / 5  # noqa: E731
        monkeypatch.setattr(local, "find_scorer", lambda source: score)
        model, write = tiny_model, write_arithmetic
        if "experts" in name:
            model = (save_tiny_biased_moe if "bias" in name else save_moe)(tmp_path / "model")
        if "pictures" in name:
            if not importlib.util.find_spec("torchvision"):
                pytest.skip("torchvision is not installed (scripts/test.sh installs it)")
            model, write = save_tiny_vision_model(tmp_path / "model", "qwen2_5_vl", tied=False), write_pictures
        files = [write(tmp_path / f"{split}.parquet", range(NUM_ROWS)) for split in ("train", "test")]
        keys = {"trainer__total_training_steps": STEPS, ACTOR + "checkpoint__save_contents": "[model]"}
        return small_run(model, files, tmp_path / "run", **keys, **RUNS[name][0])

    return make


def stopped_run(make, cuts, validates: bool):
    """Return the steps of a run that is stopped after each of ``cuts``."""
    step = 0
    for cut in cuts:
        trainer = make()
        cfg = trainer.cfg
        folder = RunFolder(cfg.trainer.default_local_dir)
        saver = Saver(cfg, folder, trainer.actor, trainer.critic, "data", 16, reference=trainer.reference)
        start = find_resume_point(cfg, folder, "data")
        assert start.step == step
        saver.load(start)
        trainer.restore(start.progress, start.folder)
        for step in range(start.step + 1, cut + 1):
            yield step_of(trainer, step, validates)
        assert ("moe/max_vio/mean" in trainer.progress.metrics) == bool(trainer.progress.expert_load)
        saver.save(step, trainer.progress)
        saver.finish()
        folder.release()


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in ALWAYS else pytest.mark.long) for each in RUNS]
)
def test_a_run_stopped_after_every_step_is_the_unbroken_one(arguments, name):
    make = functools.partial(local.local_trainer, arguments(name))
    validates, whole = "validated" in name, make()
    straight = [step_of(whole, step, validates) for step in range(1, STEPS + 1)]
    assert any(seen["metrics"][RUNS[name][1]] for seen in straight)
    assert not all(map(torch.equal, *(straight[number]["state"].values() for number in (0, -1))))
    for step, found in enumerate(stopped_run(make, range(1, STEPS + 1), validates), 1):
        assert differences(straight[step - 1], found) == {}, f"step {step}"
