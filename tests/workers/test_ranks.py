"""Losses, metrics and gradients are the same on 1, 2 and 4 processes, which get different samples and idle now and
then.

Or they share sequences, in groups of 2 and 4. The model has 4 heads, which share 2 of keys and values.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rltrain.algorithms.aggregation import Denominators
from rltrain.algorithms.policy_losses import POLICY_LOSSES
from rltrain.common.columns.batch import Batch
from rltrain.common.columns.ragged import Ragged
from rltrain.config.load import load_config
from rltrain.config.step_passes import make_step_passes
from rltrain.trainer.batching.balance import Workload, lay_out
from rltrain.trainer.metrics import step as m
from rltrain.trainer.plan import PassBudget
from rltrain.workers.hybrid import HybridWorker
from rltrain.workers.interface.tasks import MiniBatch, UpdateTask
from tests.batches import batch_of_rows
from tests.distance import distance
from tests.ranks import run_on_ranks
from tests.tiny import save_tiny_model, save_tiny_moe, small_run

A = "actor_rollout_ref.actor."
COV = {A + "policy_loss.clip_cov_lb": -100, A + "policy_loss.clip_cov_ub": 100, A + "policy_loss.clip_cov_ratio": 0.1,
       A + "policy_loss.kl_cov_ratio": 0.1, A + "policy_loss.m2_threshold": 0.5}  # fmt: skip
LORA = {"actor_rollout_ref.model.lora_rank": 3, "actor_rollout_ref.model.target_modules": "[q_proj,v_proj,down_proj]"}
TEACHER = "distillation."
EXACT_TEACHER = {TEACHER + "distillation_loss.loss_mode": "jsd", A + "kl_loss_type": "k3"}
VARIANTS = {
    **{f"loss {name}": {A + "policy_loss.loss_mode": name, **COV} for name in POLICY_LOSSES},
    **{
        f"agg {name}": {A + "loss_agg_mode": name}
        for name in ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    },
    "high entropy": {A + "top_entropy_quantile": 0.3},
    "exact kl": {A + "kl_loss_type": "full"},
    "one reduction": {
        f"{role}.fsdp_config.use_no_sync_for_gradient_accumulation": True for role in (A[:-1], "critic.model")
    },
    "two copies": {f"{role}.fsdp_config.fsdp_size": 2 for role in (A[:-1], "critic.model")},
    "experts": {},
    "experts, loss on their balance": {A + "router_aux_loss_coef": 0.3},
    "experts, two copies": {f"{role}.fsdp_config.fsdp_size": 2 for role in (A[:-1], "critic.model")},
    "lora": {**LORA, "critic.model.lora_rank": 3},
    "lora, exact kl": {**LORA, A + "kl_loss_type": "full"},
    "teacher, exact": EXACT_TEACHER,
    "teacher, cost of a token": {
        TEACHER + "distillation_loss.loss_mode": "k1", TEACHER + "distillation_loss.use_policy_gradient": True,
    },
    "teacher, alone": {**LORA, **EXACT_TEACHER, TEACHER + "distillation_loss.use_task_rewards": False},
}  # fmt: skip
# (processes, those of them that share sequences): the variants that are run so.
SOME = ["loss clip_cov", "exact kl", "lora", "teacher, exact"]
CUTS = {
    # First, as a few cases always have the first: it hung where an idle loss lacked the balance.
    (2, 1): sorted(VARIANTS, key="experts, loss on their balance".__ne__),
    (4, 1): ["loss vanilla", "loss kl_cov", "agg seq-mean-token-mean", *SOME, "two copies", "experts, two copies"],
    **dict.fromkeys([(2, 2), (4, 4)], SOME),
    (4, 2): [*SOME, "two copies", "experts"],
}
# A loss of the actor's is nothing to the critic, so those variants have none.
ACTOR_ALONE = {f"loss {name}" for name in POLICY_LOSSES if name != "vanilla"} | {"teacher, alone", "high entropy"}
CASES = [(*sizes, name) for sizes, names in CUTS.items() for name in names]
# Three prompts with two, three and two answers, which share them where they meet in a micro-batch.
GROUPS = [0, 0, 1, 1, 1, 2, 2]
PROMPTS = [4, 4, 5, 5, 5, 3, 3]
# An answer without tokens, and one that is masked out whole.
ANSWERS = [4, 0, 7, 1, 3, 8, 5]
MASKED_OUT = 3
# Three optimizer steps; the second has fewer samples than four ranks.
MINI_BATCHES = [np.arange(7), np.array([2, 5]), np.array([6, 0, 4, 1])]


def sample_batch() -> Batch:
    torch.manual_seed(3)
    lengths = torch.tensor(ANSWERS)
    heads = [torch.randint(5, 20, (5,), dtype=torch.int32) for _ in range(3)]
    answers = [torch.randint(5, 20, (length,), dtype=torch.int32) for length in ANSWERS]
    rows = zip(GROUPS, PROMPTS, answers, strict=True)
    tokens = [torch.cat([heads[group][:prompt], answer]) for group, prompt, answer in rows]
    old = Ragged(torch.randn(int(lengths.sum())) - 3, lengths)
    mask = torch.ones(len(old.values))
    mask[::5] = 0
    mask[old.row_ids == MASKED_OUT] = 0
    columns = {name: old.like(torch.randn(len(old.values))) for name in ("values", "returns")}
    batch = batch_of_rows(tokens, PROMPTS)
    batch.update({
        "old_log_probs": old,
        "ref_log_probs": old.like(old.values + 0.1 * torch.randn(len(old.values))), "loss_mask": old.like(mask.bool()),
        "is_weights": old.like(torch.rand(len(old.values)) + 0.5), "advantage": torch.randn(7),
        "teacher_log_probs": old.like(old.values + 0.3 * torch.randn(len(old.values))),
        "entropy": old.like(torch.rand(len(old.values))), "sample_id": torch.arange(7), "group": torch.tensor(GROUPS),
        **columns,
    })  # fmt: skip
    return batch


def run_variant(folder: Path, name: str, group: int) -> tuple[dict, list[torch.Tensor]]:
    """Return (metrics, gradients of every optimizer step) of actor and critic. group: ranks that share sequences."""
    estimator, changes = "grpo" if name in ACTOR_ALONE else "gae", VARIANTS[name]
    changes = {A + "ulysses_sequence_parallel_size": group, "critic.ulysses_sequence_parallel_size": group} | changes
    if any(key.startswith(TEACHER) for key in changes):
        changes |= {TEACHER + "enabled": True, TEACHER + "teacher.model.path": folder / "teacher"}
    model = "moe" if "experts" in name else "model"
    if model == "moe":
        shared = min(2, dist.get_world_size())
        changes |= {f"{role}.fsdp_config.expert_parallel_size": shared for role in (A[:-1], "critic.model")}
    keys = {name.replace(".", "__"): value for name, value in changes.items()}
    files = (folder / "none", folder / "none")
    cfg = load_config(small_run(folder / model, files, folder, algorithm__adv_estimator=estimator, **keys)).config
    worker = HybridWorker(cfg, {})
    worker.init_models(make_step_passes(cfg))
    batch = sample_batch()
    work = Workload.of_groups(np.array(PROMPTS), np.array(ANSWERS), np.array(GROUPS))
    layout = lay_out(MINI_BATCHES, work, dist.get_world_size() // group, PassBudget(20, None))
    counted = batch.ragged("loss_mask").sum().long().numpy()
    counts = [Denominators(int(counted[ids].sum()), int((counted[ids] > 0).sum()), 8) for ids in MINI_BATCHES]
    rank = dist.get_rank() // group
    ids, sizes = layout.ids[rank], layout.micro_sizes[rank]
    mini_batches = tuple(MiniBatch(*each) for each in zip(sizes, counts, strict=True))
    mine = batch.select(ids) if len(ids) else Batch()
    gradients: list[torch.Tensor] = []
    found = {}
    worker.actor._log_probs_at = -1  # the old log-probs are made up, so selections must look at the current ones
    for name, role, arguments in (
        (
            "actor",
            worker.actor,
            [UpdateTask(mini_batches, 0.01, entropy_coeff=cfg.actor_rollout_ref.actor.entropy_coeff)],
        ),
        *([("critic", worker.critic, [mini_batches, 0.01])] if estimator == "gae" else []),
    ):
        record_gradients(role.updater, role.policy if name == "actor" else role.model, gradients)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, role.update(mine, *arguments))
        tokens = np.array([count.tokens for count in counts])
        found |= m.update_metrics(everyone[::group], tokens, tokens, name)
    return {name: value for name, value in found.items() if "perf/" not in name}, gradients


def record_gradients(updater, model, gradients: list[torch.Tensor]) -> None:
    """Record the gradient and move along it, instead of a step of AdamW, which would amplify rounding."""

    def step():
        trained = [p for p in model.parameters() if p.requires_grad]
        gradients.append(torch.cat([p.grad.full_tensor().flatten() for p in trained]))
        for parameter in trained:
            parameter.data.add_(parameter.grad, alpha=-0.05)

    updater.optimizer.step = step


def rank_main(rank: int, world: int, folder: Path, cases: list[tuple[int, int, str]]) -> None:
    found = {case: run_variant(folder, case[2], case[1]) for case in cases if case[0] == world}
    if rank == 0:
        torch.save(found, folder / f"world_{world}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory, request):
    """Results by number of processes, number of ranks that share sequences, and variant, for the collected tests."""
    # Other files have a fixture of this name too.
    own = [item for item in request.session.items if item.path == request.path and "found" in item.fixturenames]
    asked = [item.callspec.params["case"] for item in own]
    cases = [*asked, *((1, 1, name) for name in VARIANTS if name in {case[2] for case in asked})]
    folder = tmp_path_factory.mktemp("ranks")
    save_tiny_model(folder / "model", heads=4, kv_heads=2)
    save_tiny_moe(folder / "moe", heads=4, kv_heads=2)
    save_tiny_model(folder / "teacher", heads=4, kv_heads=2, seed=7, width=64)
    worlds = sorted({case[0] for case in cases})
    for world in worlds:
        run_on_ranks(rank_main, world, folder, cases)
    files = [torch.load(folder / f"world_{world}.pt", weights_only=False) for world in worlds]
    return {case: each for file in files for case, each in file.items()}


@pytest.mark.few(14)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "{}-{}-{}".format(*case))
def test_the_number_of_processes_changes_no_loss_or_gradient(found, case):
    (metrics, gradients), (other_metrics, other_gradients) = found[1, 1, case[-1]], found[case]
    assert len(gradients) == (3 if case[-1] in ACTOR_ALONE else 6)
    assert all(float(gradient.abs().max()) > 1e-4 for gradient in gradients)
    assert metrics == pytest.approx(other_metrics, abs=1e-5, rel=1e-4)
    for one, other in zip(gradients, other_gradients, strict=True):
        assert distance(other, one) < 2e-5
