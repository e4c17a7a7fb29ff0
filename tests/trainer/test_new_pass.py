"""A new pass with its own model needs only a row in each of two tables; all code for passes and models uses them."""

import numpy as np
import pytest

from rltrain.common.columns import names as c
from rltrain.common.device import get_device
from rltrain.config.load import load_config
from rltrain.config.passes import PASSES, ROLES, ModelRole, Pass, device_phases, step_phases
from rltrain.config.step_passes import make_step_passes
from rltrain.models.forward import PolicyModel
from rltrain.models.weights.spec import specs_of
from rltrain.run.preflight.memory import forecast
from rltrain.run.report.plan import describe
from rltrain.trainer.batching.balance import Layout, LayoutCost
from rltrain.trainer.metrics.timing import flops_metrics
from rltrain.trainer.plan import make_plan
from tests.tiny import save_tiny_model, small_run
from tests.trainer.steps import NO_KL

# The fake role's settings are those of the reference, which these runs do not have.
SECTION = "actor_rollout_ref.ref"
PATH, SIZE = f"{SECTION}.model.path", f"{SECTION}.log_prob_max_token_len_per_gpu"
OFFLOAD = f"{SECTION}.fsdp_config.param_offload"


@pytest.fixture
def tutor():
    """The rows of a frozen policy that scores every response, after the reference's pass."""
    passes, roles = dict(PASSES), dict(ROLES)
    ROLES["tutor"] = ModelRole(SECTION, f"{SECTION}.fsdp_config", lambda config: True)
    PASSES.clear()
    for name, row in passes.items():
        PASSES[name] = row
        if name == "ref":
            PASSES["tutor"] = Pass("tutor", row.keys, "tutor")
    yield
    for table, before in ((PASSES, passes), (ROLES, roles)):
        table.clear()
        table.update(before)


@pytest.fixture(scope="module")
def another(tmp_path_factory):
    """A model with the same tokens and twice the width."""
    return save_tiny_model(tmp_path_factory.mktemp("another") / "model", seed=7, width=64)


@pytest.fixture
def changes(another):
    return NO_KL | {PATH.replace(".", "__"): another, SIZE.replace(".", "__"): 99}


@pytest.fixture
def cfg(tutor, tiny_model, arithmetic_files, tmp_path, changes):
    return load_config(small_run(tiny_model, arithmetic_files, tmp_path / "run", **changes)).config


def test_a_step_has_it_in_its_place(cfg):
    passes = make_step_passes(cfg)
    assert passes.describe(1) == "gen, reward, tutor, adv, update_actor"
    assert passes.needs("tutor") == ("tutor",)
    assert step_phases()[3:7] == ("old_log_prob", "ref", "tutor", "teacher")
    assert "tutor" in device_phases()
    cfg.trainer.val_only = True
    assert "tutor" not in make_step_passes(cfg).roles, "an evaluation loads it where its row says so"


def test_its_rates_are_of_its_model(tutor):
    cost = LayoutCost(**dict.fromkeys(LayoutCost.__dataclass_fields__, 50))
    sizes, seconds = {"matmul_parameters": 1e12, "tutor_matmul_parameters": 2e12}, {"timing_s/tutor": 2.0}
    assert flops_metrics({"tutor": cost}, seconds, sizes, 1)["perf/tflops/tutor"] == 2 * 2 * 50 / 2


def test_the_plan_has_its_ranks_and_its_budget(cfg, another):
    cfg.trainer.n_gpus_per_node = cfg.actor_rollout_ref.ref.ulysses_sequence_parallel_size = 2
    plan = make_plan(cfg, 100)
    assert plan.ranks["tutor"] == 1
    assert plan.budgets["tutor"].max_tokens == 2 * 99
    text = describe(plan, cfg)
    assert "at most 198 tokens per data-parallel rank, of which there are 1: tutor" in text
    assert f"tutor {another}" in " ".join(text.split())


def test_its_memory_is_foretold_and_may_rest_on_the_host(cfg):
    plan = make_plan(cfg, 100)
    spec = specs_of(cfg, get_device("cpu"), plan.passes)["tutor"]
    assert spec[0] is PolicyModel
    here = forecast(cfg, plan, None, ("tutor", "update_actor"))
    cfg.actor_rollout_ref.ref.fsdp_config.param_offload = True
    away = forecast(cfg, plan, None, ("tutor", "update_actor"))
    assert here["tutor"] == away["tutor"]
    assert here["tutor"]["activations"] > 0
    assert here["update_actor"]["weights"] > away["update_actor"]["weights"]


def test_workers_load_it_and_measure_with_it(process_group, tutor, tiny_trainer, changes):
    trainer = tiny_trainer(**changes)
    samples = trainer.step(1).samples
    worker = trainer.worker
    assert worker.offloader.models["tutor"] is worker.actor.inference_models.models["tutor"]
    assert not any(weight.requires_grad for weight in worker.offloader.models["tutor"].parameters())
    assert trainer.model_sizes["tutor_matmul_parameters"] > trainer.model_sizes["matmul_parameters"]
    moments = trainer.inference_models.log_probs("tutor", c.REF_LOG_PROBS, samples, Layout([np.arange(16)], [[(16,)]]))
    assert worker.offloader.phase == "tutor"
    assert moments["tutor"].count == samples[c.POLICY_TOKENS].sum()
    assert moments["tutor"].mean < 0
    samples.request(np.arange(len(samples)), [c.REF_LOG_PROBS])  # raises KeyError if a sample lacks the column
