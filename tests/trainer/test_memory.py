"""Memory estimated from a config.json only: sums by hand, and the effect of the suggested settings."""

import json

import pytest
import torch

from rltrain.common.device import get_device
from rltrain.config.budgets import PassBudget
from rltrain.config.load import load_config
from rltrain.config.memory_keys import memory_keys
from rltrain.config.schema.model import FSDPConfig, OptimConfig
from rltrain.models.forward import PolicyModel
from rltrain.models.weights.spec import ModelSpec
from rltrain.run.preflight.memory import forecast, fullest
from rltrain.run.preflight.memory_room import check_host, check_memory, host_forecast, no_cache, too_large
from rltrain.run.preflight.meta_run import fake_model, forward_only, peak_of, update
from rltrain.trainer.plan import make_plan
from tests.tiny import small_run

# Qwen2.5-7B with fewer layers: what a layer holds is the same.
SHAPE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 8, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "tie_word_embeddings": False, "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
}  # fmt: skip
LAYER = 3584 * (2 * 3584 + 2 * 512 + 3 * 18944 + 2) + 3584 + 2 * 512
PARAMETERS = 8 * LAYER + 2 * 152064 * 3584 + 3584
A, R = "actor_rollout_ref__actor__", "actor_rollout_ref__rollout__"
SHARE, FREES = f"{R}gpu_memory_utilization", f"{R}free_cache_engine"


@pytest.fixture
def planned(tmp_path):
    """Make (config, plan) for 64 devices from a config.json only."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))

    def make(**changes):
        keys = {
            "data__train_batch_size": 128, "data__max_prompt_length": 1024, "data__max_response_length": 3072,
            A + "ppo_mini_batch_size": 128, A + "ppo_max_token_len_per_gpu": 8192, A + "use_kl_loss": True,
            R + "name": "vllm", "trainer__device": "npu", "trainer__n_gpus_per_node": 8, "trainer__nnodes": 8,
            "trainer__device_memory_gb": 60.9,
        } | changes  # fmt: skip
        cfg = load_config(small_run(tmp_path, (tmp_path, tmp_path), tmp_path, **keys)).config
        return cfg, make_plan(cfg, 1000)

    return make


def test_what_rests_is_the_sum_by_hand(planned):
    cfg, plan = planned(actor_rollout_ref__ref__fsdp_config__param_offload=True)
    found = forecast(cfg, plan, None, ("sync", "gen"))
    # Rows of vectors do not divide evenly, hence a little more.
    assert found["gen"] == {
        "weights": pytest.approx(PARAMETERS * 4 / 64, rel=1e-3),
        "optimizer": pytest.approx(PARAMETERS * 8 / 64, rel=1e-3),
        "activations": 2048**2,
        "engine weights": pytest.approx(PARAMETERS * 2, rel=1e-6),
        "cache": 0,
    }
    # Embedding and head exceed half a bucket, and are gathered alone; a bucket may follow before one is freed.
    alone = 152064 * 3584 * 2 * (1 + 1 / 64)
    assert alone <= found["sync"]["gathered"] <= alone + (512 << 20)


def test_a_sync_that_merges_adapters_is_estimated(planned):
    cfg, plan = planned(actor_rollout_ref__model__lora_rank=8)
    alone = 152064 * 3584 * 2
    assert alone <= forecast(cfg, plan, None, ("sync",))["sync"]["gathered"] <= 2 * alone + (512 << 20)


DENSE_FIRST = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 11,
    "intermediate_size": 64, "moe_intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16,
    "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "vocab_size": 64,
}  # fmt: skip


WINDOWS = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 14, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64,
    "sliding_window": 32,
}  # fmt: skip
DELTA_NETS = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 64, "num_hidden_layers": 16,
    "intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 8,
    "num_experts_per_tok": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
TENSOR = {"fsdp": FSDPConfig(expert_parallel_size=4), "tensor_size": 2}


@pytest.mark.parametrize(
    ("shape", "updates", "more"),
    [
        (DENSE_FIRST | {"first_k_dense_replace": 1}, False, {}),
        (DENSE_FIRST | {"first_k_dense_replace": 4}, False, {}),
        (DENSE_FIRST | {"num_hidden_layers": 7, "first_k_dense_replace": 3}, True, {}),
        (DENSE_FIRST | {"num_hidden_layers": 7, "first_k_dense_replace": 3}, True, TENSOR),
        (WINDOWS, True, {"gradient_checkpointing": False}),
        (DELTA_NETS, False, {}),
    ],
    ids=["one dense", "four dense", "three of seven", "tensor and expert parallel", "windows", "delta nets"],
)
def test_layers_of_several_kinds_are_estimated_as_if_all_layers_were_run(tmp_path, shape, updates, more):
    (tmp_path / "config.json").write_text(json.dumps(shape))
    lengths = {"data__max_prompt_length": 256, "data__max_response_length": 256}
    cfg = load_config(small_run(tmp_path, (tmp_path, tmp_path), tmp_path, **lengths)).config
    spec = ModelSpec(str(tmp_path), compute_dtype=torch.bfloat16, **more)
    device, work = get_device("npu"), update(OptimConfig(), 2, False, False) if updates else forward_only(False)
    batch = fullest(cfg, PassBudget(None, 4), 4)
    with fake_model(PolicyModel, spec, device, 8, None, batch) as (packed, ledger, inputs):
        whole = max(work(packed, ledger, inputs), key=lambda owners: owners.total())
    estimated = peak_of(PolicyModel, spec, device, 8, batch, work)
    assert {owner: estimated[owner] for owner in whole} == pytest.approx(dict(whole), rel=5e-3)


SMALL = SHAPE | {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 10, "num_attention_heads": 4, "vocab_size": 256,
}  # fmt: skip


def test_recomputed_layers_are_estimated_as_if_all_layers_were_run(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    cfg = load_config(small_run(tmp_path, (tmp_path, tmp_path), tmp_path)).config
    batch, work = fullest(cfg, PassBudget(None, 4), 4), update(OptimConfig(), 1, False, False)
    totals = []
    for way in (False, True, 3, "selective"):
        spec = ModelSpec(str(tmp_path), compute_dtype=torch.bfloat16, gradient_checkpointing=way)
        with fake_model(PolicyModel, spec, get_device("npu"), 8, None, batch) as (packed, ledger, inputs):
            whole = max(work(packed, ledger, inputs), key=lambda owners: owners.total())
        estimated = peak_of(PolicyModel, spec, get_device("npu"), 8, batch, work)
        assert estimated["activations"] == pytest.approx(whole["activations"], rel=0.05), way
        totals.append(estimated["activations"])
    assert totals[0] > totals[2] > totals[3] > totals[1]


def test_the_keys_that_are_named_reduce_the_owner_in_the_phase(planned):
    one = {"trainer__n_gpus_per_node": 1, "trainer__nnodes": 1}
    size = 33 * PARAMETERS  # weights and optimizer fit beside the engine's share, and the reference does not
    cfg, plan = planned(**one, trainer__device_memory_gb=size / 2**30)
    before = forecast(cfg, plan, size, ("gen",))
    assert too_large(before, size) == ["gen"]
    changes = list(memory_keys(cfg, "gen"))
    assert ("weights", "actor_rollout_ref.ref.fsdp_config.param_offload=True") in changes
    assert ("cache", "actor_rollout_ref.rollout.gpu_memory_utilization less than 0.5") in changes
    for owner, change in changes:
        if (setting := change.replace(" less than 0.5", "=0.4")).endswith(("=True", "=0.4")):
            key, _, value = setting.partition("=")
            after = forecast(*planned(**one, **{key.replace(".", "__"): value}), size, ("gen",))
            assert after["gen"][owner] < before["gen"][owner], change


@pytest.mark.long
def test_a_step_that_does_not_fit_names_the_tokens_that_would(planned):
    cfg, plan = planned(trainer__device_memory_gb=14, actor_rollout_ref__actor__ppo_max_token_len_per_gpu=40960)
    told, problem = check_memory(cfg, plan)
    assert "update_actor needs" in problem, told
    assert "Make room with one of: " in problem
    assert "actor_rollout_ref.actor.ppo_max_token_len_per_gpu less than 40960; " in problem
    assert problem.endswith("more devices.")


# Weights of 5.5 GiB; an answer of the longest takes 64 MiB.
@pytest.mark.parametrize("free_mib", [-1300, 32])
def test_an_engine_without_room_for_its_cache_is_seen(planned, free_mib):
    size = 60 << 30
    share = round((2 * PARAMETERS + (free_mib << 20)) / size, 5)
    cfg, plan = planned(**{SHARE: share})
    problem = no_cache(cfg, forecast(cfg, plan, size, ("gen",))["gen"], size)
    assert f"gpu_memory_utilization={share:g} is" in problem
    assert f"the engine's weights take {2 * PARAMETERS / 2**30:.1f} of it" in problem
    assert "Set actor_rollout_ref.rollout.gpu_memory_utilization=0.15, or" in problem


def test_an_offloaded_optimizer_leaves_the_update(planned):
    peaks = {}
    for name, changes in {
        "here": {},
        "offloaded": {A + "fsdp_config__optimizer_offload": True},
        "half": {A + "optim__moments": "bfloat16"},
    }.items():
        peaks[name] = forecast(*planned(**changes), None, ("update_actor",))["update_actor"]
    moments = pytest.approx(PARAMETERS * 8 / 64, rel=1e-3)
    assert peaks["here"]["optimizer"] == moments
    assert peaks["offloaded"]["optimizer"] == 0
    assert peaks["half"]["optimizer"] * 2 == moments
    # Two buffers of the largest weight come only when the activations are gone.
    assert peaks["here"].total() - peaks["offloaded"].total() == moments


def test_a_node_without_room_for_pinned_copies_is_warned_of(planned):
    offload = {f"actor_rollout_ref__actor__fsdp_config__{name}_offload": True for name in ("param", "optimizer")}
    cfg, plan = planned(**offload, trainer__host_memory_gb=20)
    host = host_forecast(cfg, plan)
    assert host["offloaded"] == pytest.approx(12 * PARAMETERS / 8, rel=1e-3)
    # Weights and two moments of every rank, and on the first the export in bfloat16.
    assert host["checkpoint copies"] == pytest.approx(12 * PARAMETERS / 8 + 2 * PARAMETERS, rel=1e-3)
    (line,), (warning,) = check_host(cfg, plan)
    assert line.startswith(f"host memory of a node in GiB: {host.total() / 2**30:.1f} of 20.0 (")
    assert warning.startswith("trainer.host_memory_gb=20.0: a node needs about")
    assert "Make room with one of: " in warning
    for key in ("actor.fsdp_config.optimizer_offload=False", "trainer.async_save=False", "more nodes"):
        assert key in warning
    cfg, plan = planned(**offload, trainer__host_memory_gb=300)
    assert check_host(cfg, plan)[1] == []


def test_a_validation_counts_what_it_loads_alone(planned):
    cfg, plan = planned(trainer__val_only=True)
    found = forecast(cfg, plan, 60 << 30, ("gen", "update_actor"))
    assert list(found) == ["gen"]
    assert found["gen"]["optimizer"] == found["gen"]["weights"] == 0
    cfg, plan = planned()
    assert forecast(cfg, plan, 60 << 30, ("gen",))["gen"]["optimizer"] > 0, "a step counts more"
