"""Runs on two or four ranks with random layouts, keys and uneven rows: each completes its steps, or is refused before
them.
"""

import random

import pytest

from rltrain.main_ppo import main
from rltrain.run.report.table import read_metrics
from tests.tiny import save_tiny_biased_moe, save_tiny_model, save_tiny_moe, small_run, write_arithmetic

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("joined")]

A, R, C, ALG, D = (
    "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "critic.", "algorithm.", "distillation.",
)  # fmt: skip
REF, MODEL, RANKS = "actor_rollout_ref.ref.", "actor_rollout_ref.model.", "trainer.n_gpus_per_node"
CORRECTION = ALG + "rollout_correction."
EP, AUX, ULYSSES = (
    {A + "fsdp_config.expert_parallel_size": 2}, {A + "router_aux_loss_coef": 0.2},
    {A + "ulysses_sequence_parallel_size": 2},
)  # fmt: skip
ONE = {"data.train_batch_size": 1, A + "ppo_mini_batch_size": 1, R + "n": 1, A + "use_kl_loss": False}
EXACT, FOUR = {A + "kl_loss_type": "full"}, {RANKS: 4}
TENSOR = {A + "fsdp_config.tensor_parallel_size": 2}
LORA = {MODEL + "lora_rank": 4, MODEL + "target_modules": "[q_proj,v_proj]"}
GAE = {ALG + "adv_estimator": "gae"}
MOE, BIASED, DENSE = ({"model": name} for name in ("moe", "biased", "dense"))
IDLE = {"data.train_batch_size": 6, A + "ppo_mini_batch_size": 3, A + "ppo_max_token_len_per_gpu": 24}
PINNED = {
    "experts exchanged, balance, an idle micro-batch": MOE | EP | AUX | IDLE,
    "the same, activations kept": MOE | EP | AUX | IDLE | {MODEL + "enable_gradient_checkpointing": False},
    "one response on four ranks, R3, balance": MOE | EP | AUX | ONE | FOUR | {A + "router_replay.mode": "R3"},
    "one response on four ranks, the bias moves, R2": BIASED | EP | ONE | FOUR
    | {A + "router_bias_update_rate": 0.02, A + "router_replay.mode": "R2"},
    "one response, sequences and copies": MOE | EP | ULYSSES | ONE | FOUR | {A + "fsdp_config.fsdp_size": 2},
    "one response in a ring on four ranks": MOE | EP | AUX | ULYSSES | ONE | FOUR | {A + "ring_attention_size": 2},
    "one response, matrices and experts shared": MOE | EP | AUX | ONE | FOUR | TENSOR,
    "exact kl, adapters, matrices shared": DENSE | EXACT | LORA | ONE | FOUR | TENSOR | {A + "use_kl_loss": True},
    "exact kl next to experts": MOE | EP | EXACT | ONE | {A + "use_kl_loss": True},
    "exact kl, adapters": MOE | EP | EXACT | LORA | ONE | {A + "use_kl_loss": True},
    "an exact teacher with experts": DENSE | ONE | ULYSSES
    | {D + "enabled": True, D + "teacher.model.path": "moe", D + "distillation_loss.loss_mode": "jsd"},
    "a critic with experts": MOE | EP | GAE | ONE | {C + "model.fsdp_config.expert_parallel_size": 2},
    "every response truncated": MOE | EP | AUX | {"data.max_response_length": 1, ALG + "mask_truncated": True},
    "everything rejected, bypass": MOE | EP | AUX | {
        CORRECTION + "bypass_mode": True, CORRECTION + "rollout_rs": "seq_max_k2",
        CORRECTION + "rollout_rs_threshold": "1e-20", A + "ppo_epochs": 2,
    },
    "a selection, uneven": MOE | EP | ONE | {A + "policy_loss.loss_mode": "kl_cov", A + "ppo_epochs": 2},
    "a reference that moves": DENSE | ONE | FOUR
    | {A + "use_kl_loss": True, REF + "update_every_steps": 1, A + "fsdp_config.fsdp_size": 2},
    "carried over, one conversation at a time": DENSE | FOUR
    | {R + "tail": "carry_over", R + "oversample_ratio": 2, R + "max_num_seqs": 1, CORRECTION + "rollout_is": "token"},
    "validation of one row on four ranks": DENSE | FOUR | {"data.val_max_samples": 1, "trainer.test_freq": 1},
}  # fmt: skip
# A key, its share of runs, and its values.
DRAWN = [
    (A + "fsdp_config.fsdp_size", 0.2, [1, 2]), (A + "ulysses_sequence_parallel_size", 0.3, [2]),
    (A + "fsdp_config.reshard_after_forward", 0.15, [False]),
    (A + "fsdp_config.use_no_sync_for_gradient_accumulation", 0.15, [True]),
    (A + "fsdp_config.compute_dtype", 0.2, ["float16", "bfloat16"]),
    (MODEL + "enable_gradient_checkpointing", 0.35, [False, "selective"]), (A + "ring_attention_size", 0.2, [2]),
    (A + "ppo_max_token_len_per_gpu", 0.7, [24, 32, 48, 200]), (R + "log_prob_max_token_len_per_gpu", 0.2, [24, 48]),
    (A + "use_kl_loss", 0.4, [True]), (A + "kl_loss_type", 0.4, ["full", "k1", "k3"]),
    (ALG + "adv_estimator", 0.6, ["gae", "gae", "rloo", "remax", "opo", "reinforce_plus_plus", "grpo_passk"]),
    (C + "ulysses_sequence_parallel_size", 0.1, [2]), (C + "model.fsdp_config.fsdp_size", 0.1, [1]),
    (A + "entropy_coeff", 0.4, [0, 0.01]), (A + "top_entropy_quantile", 0.12, [0.05, 0.5]),
    (A + "policy_loss.loss_mode", 0.3, ["gspo", "kl_cov", "m2po", "cispo", "topr", "future_kl", "vespo"]),
    (A + "loss_agg_mode", 0.15, ["seq-mean-token-mean", "seq-mean-token-sum"]), (A + "ppo_epochs", 0.3, [2]),
    (A + "shuffle", 0.2, [True]), (A + "recompute_old_log_prob", 0.2, ["always"]),
    (A + "off_policy_mask_threshold", 0.15, [0.0001]), (ALG + "mask_truncated", 0.3, [True]),
    (CORRECTION + "bypass_mode", 0.25, [True]), (CORRECTION + "rollout_is", 0.25, ["token", "sequence"]),
    (R + "max_num_seqs", 0.3, [1, 2, 8]), ("trainer.save_freq", 0.15, [1]),
    ("data.max_response_length", 0.4, [1, 2, 24]), (REF + "update_every_steps", 0.1, [1]),
]  # fmt: skip
OF_EXPERTS = [
    (A + "fsdp_config.expert_parallel_size", 0.6, [2]), (A + "router_aux_loss_coef", 0.4, [0.1]),
    (A + "router_replay.mode", 0.4, ["R2", "R3"]),
]  # fmt: skip


def draw(rng: random.Random) -> dict[str, object]:
    model, batch = rng.choice(["dense", "moe", "moe", "biased"]), rng.choice([1, 2, 3, 5, 6, 7])
    keys = {"model": model, RANKS: rng.choice([2, 2, 2, 4]), "data.train_batch_size": batch}
    keys |= {A + "ppo_mini_batch_size": rng.choice([each for each in range(1, batch + 1) if batch % each == 0])}
    keys |= {R + "n": rng.choice([1, 2, 3, 4]), A + "use_kl_loss": False}
    table = DRAWN + (OF_EXPERTS if model != "dense" else [])
    keys |= {key: rng.choice(values) for key, share, values in table if rng.random() < share}
    if rng.random() < 0.15:
        keys |= LORA
    if rng.random() < 0.3:
        keys |= TENSOR
    return keys


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    models = {"dense": save_tiny_model, "moe": save_tiny_moe, "biased": save_tiny_biased_moe}
    files = write_arithmetic(folder / "train.parquet", range(40)), write_arithmetic(folder / "val.parquet", range(4))
    return {name: make(folder / name) for name, make in models.items()}, files


def run(keys: dict[str, object], inputs, folder) -> int:
    models, files = inputs
    keys = {RANKS: 2, "trainer.hang_timeout_s": 600} | keys
    model = models[keys.pop("model")]
    teacher = D + "teacher.model.path"
    keys |= {teacher: models[keys[teacher]]} if teacher in keys else {}
    return main(small_run(model, files, folder, **{key.replace(".", "__"): value for key, value in keys.items()}))


@pytest.mark.parametrize("name", PINNED)
def test_an_extreme_layout_makes_its_steps(inputs, tmp_path, name):
    assert run(PINNED[name], inputs, tmp_path / "run") == 0
    assert read_metrics(tmp_path / "run")[-1]["step"] == 2


@pytest.mark.parametrize("number", range(40))
def test_a_random_layout_makes_its_steps_or_is_refused(inputs, tmp_path, number):
    rng = random.Random(f"layouts {number}")
    for attempt in range(60):
        code = run(draw(rng), inputs, folder := tmp_path / f"{attempt}")
        if code != 2:
            break
        assert not (folder / "metrics.jsonl").exists(), "a refusal comes before the first step"
    assert code == 0
    assert read_metrics(folder)[-1]["step"] == 2
