"""Device memory of every phase of a step by owner: estimated, and counted by an allocator.

    python -m bench.device_memory                 prints the table; writes it and a chart to bench/results/

Two processes with real workers make two steps without Ray, with the longest prompts and responses that the budgets
allow. Without a device, they use the stand-in of the tests, whose allocator counts every byte. The second step counts,
because the optimizer state exists only then.
"""

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3Config

from bench.table import finished_row, parse, table, write
from rltrain.algorithms.aggregation import Denominators
from rltrain.common.columns.batch import Batch
from rltrain.common.device import Device, get_device
from rltrain.config.load import load_config
from rltrain.data.chat import chat_encoder
from rltrain.data.prompts import encode_prompts
from rltrain.data.rows import read_rows
from rltrain.run.preflight.memory import OWNERS, forecast
from rltrain.run.preflight.meta_run import Ledger
from rltrain.trainer.plan import make_plan
from rltrain.workers.hybrid import HybridWorker
from rltrain.workers.interface.tasks import GenerateTask, MiniBatch, SaveTask, UpdateTask
from rltrain.workers.rollout.contract import Sampling
from rltrain.workers.rollout.embedded import kv
from rltrain.workers.rollout.embedded.engine import HFRollout
from rltrain.workers.state.offload_manager import OffloadManager
from tests.tiny import save_tiny_tokenizer, small_run, write_arithmetic

RANKS, PROMPT, ANSWER, ANSWERS, PROMPTS = 2, 32, 64, 8, 8
_A, _R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_FSDP = "actor_rollout_ref.actor.fsdp_config."
OFFLOAD = {f"{_FSDP}param_offload": True, f"{_FSDP}optimizer_offload": True,
           "actor_rollout_ref.ref.fsdp_config.param_offload": True}  # fmt: skip
CRITIC = {"algorithm.adv_estimator": "gae", "critic.model.fsdp_config.param_offload": True,
          "critic.model.fsdp_config.optimizer_offload": True}  # fmt: skip
CASES: dict[str, dict[str, object]] = {
    "grpo, all offloaded": OFFLOAD,
    "grpo, nothing offloaded": {},
    "gae, all offloaded": OFFLOAD | CRITIC,
    "grpo, Ulysses 2": OFFLOAD
    | {f"{_A}ulysses_sequence_parallel_size": 2, f"{_A}ppo_max_token_len_per_gpu": (PROMPT + ANSWERS * ANSWER) // 2},
    "grpo, LoRA": OFFLOAD | {"actor_rollout_ref.model.lora_rank": 8},
    "grpo, moments in bfloat16": {f"{_A}optim.moments": "bfloat16"},
    "grpo, no recomputation": OFFLOAD | {"actor_rollout_ref.model.enable_gradient_checkpointing": False},
}

SMOKE: dict[str, dict[str, object]] = {
    "smoke": {
        "data.train_batch_size": 4, "data.max_response_length": 2, f"{_R}n": 2, f"{_A}ppo_mini_batch_size": 2,
        f"{_A}ppo_max_token_len_per_gpu": PROMPT + 2 * 2,
    }
}  # fmt: skip


def arguments(folder: Path, case: str) -> list[str]:
    """Return the run's settings."""
    file = folder / "train.parquet"
    keys = {
        "data.train_batch_size": PROMPTS, "data.max_prompt_length": PROMPT, "data.max_response_length": ANSWER,
        f"{_A}ppo_mini_batch_size": PROMPTS // 2, f"{_A}ppo_max_token_len_per_gpu": PROMPT + ANSWERS * ANSWER,
        f"{_A}entropy_coeff": 0, f"{_R}update_weights_bucket_megabytes": 4, "trainer.device": "npu",
        "trainer.n_gpus_per_node": RANKS, f"{_R}name": "hf", f"{_R}n": ANSWERS, "trainer.device_memory_gb": 4,
        f"{_A}checkpoint.save_contents": "[model,optimizer,extra]",
    } | (CASES | SMOKE)[case]  # fmt: skip
    return small_run(folder / "model", (file, file), folder, **{key.replace(".", "__"): v for key, v in keys.items()})


def prepare(folder: Path) -> None:
    """Create a model of 7 layers, and prompts of exactly the maximum length."""
    save_tiny_tokenizer(folder / "model")
    config = Qwen3Config(
        vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=7, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=False, eos_token_id=1,
        pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    rows = write_arithmetic(folder / "train.parquet", range(PROMPTS))
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = pq.read_table(rows).to_pylist()
    for number, record in enumerate(records):  # one token per character, and two of the template
        record["prompt"][0]["content"] = str(number) * (PROMPT - 2)
    pq.write_table(pa.Table.from_pylist(records), rows, write_page_checksum=True)


# -- a rank ------------------------------------------------------------------------------------------------------------


class _Kernel(torch.autograd.Function):
    """The stand-in's attention with the memory use of the real one: its workspace and the outputs that `meta_run`
    states."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, others: Any, more: Any) -> Tensor:
        ctx.others, ctx.more = others, more
        output = _compute((query, key, value), others, more).to(query.device)
        ctx.save_for_backward(query, key, value, output, query.new_empty(2, *query.shape[:-1], 8, dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        inputs = [each.cpu().requires_grad_() for each in ctx.saved_tensors[:3]]
        with torch.enable_grad():
            found = torch.autograd.grad(_compute(inputs, ctx.others, ctx.more), inputs, gradients[0].cpu())
        return (*(each.to(gradients[0].device) for each in found), None, None)


def _compute(inputs: Any, others: Any, more: Any) -> Tensor:
    from torch_npu.kernels import npu_fusion_attention

    more = more | {"atten_mask": more["atten_mask"].cpu()}
    return npu_fusion_attention(*(each.cpu() for each in inputs), *others, **more)[0]


class Pinned(TorchDispatchMode):
    """Bytes of page-locked host memory that this process has allocated, by owner. None of it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.owner, self.held = "offloaded", Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if (kwargs or {}).get("pin_memory"):
            self.held[self.owner] += made.untyped_storage().nbytes()
        return made


def rank_main(rank: int, folder: Path, case: str, steps: int) -> None:
    """Run steps on one rank; write the peaks of the last."""
    import torch_npu

    torch_npu.npu_fusion_attention = lambda q, k, v, *others, **more: (_Kernel.apply(q, k, v, others, more),)
    torch.set_num_threads(1)
    cfg = load_config(arguments(folder, case)).config
    device = get_device(cfg.trainer.device)
    dist.init_process_group(
        device.backend, store=dist.FileStore(f"{folder}/{case}", RANKS), rank=rank, world_size=RANKS
    )
    prompts = encode_prompts(read_rows(str(folder / "train.parquet")), chat_encoder(cfg), PROMPT, True)
    worker = HybridWorker(cfg, {"train": prompts})
    module, ledger = device._module(), Ledger(device.kind)
    found: dict[str, tuple[int, Counter[str]]] = {}
    phases = ["start"]
    enter = OffloadManager.enter_phase

    def entered(self: OffloadManager, phase: str, *, whole: bool = False) -> None:
        found[phases[-1]] = (module.max_memory_allocated(), ledger.cut())
        module.reset_peak_memory_stats()
        phases.append(phase)
        before = module.memory_allocated()
        enter(self, phase, whole=whole)
        claim(worker, ledger)
        # Offloading ends before onloading begins.
        most = max(before, module.memory_allocated())
        found["moving"] = max(found.get("moving", (0, Counter())), (module.max_memory_allocated() - most, Counter()))
        module.reset_peak_memory_stats()
        ledger.cut()

    OffloadManager.enter_phase = entered
    # `take_peaks` is replaced, because it would restart the count within a phase.
    Device.take_peaks = lambda self: (0, 0)  # type: ignore[method-assign]
    decode = kv.KeyValues.decode

    def decoded(self: Any, layer: int, *rest: Any) -> Tensor:
        output = decode(self, layer, *rest)
        held = self._layers[layer]
        ledger.claim("cache", [each for pair in (held.prompts, held.blocks[-1]) for each in pair])
        return output

    kv.KeyValues.decode = decoded
    load = HFRollout.load_weights

    def loaded(self: HFRollout, weights: Any) -> None:
        def each() -> Any:
            for weight in weights:
                yield weight
                ledger.claim("engine weights", [weight.values], but="weights")

        with ledger.owner("gathered"):
            load(self, each())

    HFRollout.load_weights = loaded
    with Pinned() as pinned, ledger:
        worker.init_models(make_plan(cfg, len(prompts)).passes)
        for step in range(steps):
            try:
                make_step(worker, cfg, step)
            except RuntimeError as error:
                raise worker.explain(error) from None
            # Save within the update phase, to show that a save does not raise its peak.
            pinned.owner = "checkpoint copies"
            for role in ("actor", "critic"):
                if target := getattr(worker, role, None):
                    target.stage(SaveTask(str(folder / f"{case} {step} {role}"), copies=True))
                    target.write()
            pinned.owner = "offloaded"
        entered(worker.rollout.offloader, "sync")
    found["host"] = (pinned.held.total(), pinned.held)
    (folder / f"{case}.{rank}.pickle").write_bytes(pickle.dumps(found))
    dist.barrier()


def claim(worker: HybridWorker, ledger: Ledger) -> None:
    """Assign owners to the tensors that stay."""
    for role in (getattr(worker, "actor", None), getattr(worker, "critic", None)):
        for model in ("policy", "reference", "model"):
            if role is not None and hasattr(role, model):
                ledger.claim("weights", getattr(role, model).parameters())
        for state in role.updater.optimizer.state.values() if role is not None else ():
            ledger.claim("optimizer", [each for each in state.values() if isinstance(each, Tensor) and each.dim()])
    if hasattr(worker, "rollout"):
        own = worker.rollout.engine.model.parameters()
        ledger.claim("engine weights", [each for each in own if not each.is_meta], but="weights")


def make_step(worker: HybridWorker, cfg: Any, step: int) -> None:
    """Run every phase once, as the driver does."""
    import numpy as np

    length, answers, prompts = cfg.data.max_response_length, cfg.actor_rollout_ref.rollout.n, cfg.data.train_batch_size
    sampling, rows = Sampling(length, 1.0, ignore_eos=True), np.arange(prompts, dtype=np.int32)
    task = GenerateTask("train", rows, answers, sampling, seed=1, step=step, call=step + 1)
    batch, _, _ = worker.rollout.generate(task)
    if cfg.actor_rollout_ref.actor.ulysses_sequence_parallel_size > 1:
        everyone: list[Any] = [None] * RANKS
        dist.all_gather_object(everyone, batch)
        batch = Batch.concat(everyone)
    micros = [answers] * (len(batch) // answers)
    batch.update(worker.actor.log_probs(batch, micros)[0])
    batch.update(worker.actor.ref_log_probs(batch, micros)[0])
    batch.update({"advantage": torch.randn(len(batch))})
    half = len(micros) // 2
    counts = Denominators(prompts * answers * length // 2, prompts * answers // 2, length)
    minis = (MiniBatch((answers,) * half, counts, False), MiniBatch((answers,) * half, counts))
    if hasattr(worker, "critic"):
        batch.update(worker.critic.values(batch, micros)[0])
        values = batch.ragged("values")
        batch.update({"returns": values.like(torch.randn(len(values.values))),
                      "advantages": values.like(torch.randn(len(values.values)))})  # fmt: skip
        worker.critic.update(batch, minis, 1e-5)
    worker.actor.update(batch, UpdateTask(minis, 1e-5))


# -- the table ---------------------------------------------------------------------------------------------------------


def measured(folder: Path, case: str, cap: int | None = None, steps: int = 2) -> dict[str, tuple[int, Counter[str]]]:
    """Return the peak of every phase on rank 0: by the allocator, and by owner. cap: bytes of a device."""
    from tests.npu.standin import environment

    (folder / case).unlink(missing_ok=True)  # the rendezvous file of an earlier run
    command = [sys.executable, "-m", "bench.device_memory"]
    ranks = [
        subprocess.Popen(
            [*command, "--rank", str(rank), str(folder), case, str(steps)],
            env=environment(RANKS, cap),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    said = [rank.communicate()[1] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("\n".join(said))
    found: dict[str, tuple[int, Counter[str]]] = pickle.loads((folder / f"{case}.0.pickle").read_bytes())
    return found


Row = tuple[str, Counter[str], Counter[str], int]


def estimated(folder: Path, case: str, room: float = 1.1) -> tuple[dict[str, Counter[str]], int]:
    """Return the estimate of every phase by owner, and the bytes of a device: ``room`` times the largest phase, or more
    if the engine needs it.
    """
    cfg = load_config(arguments(folder, case)).config
    plan = make_plan(cfg, PROMPTS)
    cap = round(room * max(row.total() for phase, row in forecast(cfg, plan, None).items() if phase != "gen"))
    while not forecast(cfg, plan, cap, ("gen",))["gen"]["cache"]:  # resident tensors may leave no memory for the engine
        cap = round(1.1 * cap)
    return forecast(cfg, plan, cap), cap


def pinned_bytes(folder: Path, case: str) -> Counter[str]:
    """Return the page-locked host memory of all ranks by owner, of the last `measured`."""
    files = (folder / f"{case}.{rank}.pickle" for rank in range(RANKS))
    return sum((pickle.loads(file.read_bytes())["host"][1] for file in files), Counter())


def compare(folder: Path, case: str, steps: int = 2, room: float = 1.1) -> list[Row]:
    """Return phase, estimate by owner, count by owner, and the allocator's peak, on the device of `estimated`."""
    told, cap = estimated(folder, case, room)
    found = measured(folder, case, cap, steps)
    assert found["moving"][0] == 0, "what leaves is gone before anything comes"
    return [(phase, told[phase], found[phase][1], found[phase][0]) for phase in told]


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw two bars for each phase: the estimate and the count."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    for number, (_, told, found, peak) in enumerate(rows):
        for at, owners in ((number - 0.2, told), (number + 0.2, found)):
            below = 0.0
            for owner, colour in zip(OWNERS, pyplot.cm.tab10.colors, strict=False):
                label = owner if at < 0 else None
                axes.bar(at, owners[owner] / 1e6, 0.36, below, color=colour, label=label)
                below += owners[owner] / 1e6
        axes.plot([number, number + 0.4], [peak / 1e6] * 2, color="black")
    axes.set_xticks(range(len(rows)), [row[0] for row in rows])
    axes.set_ylabel("MB on a device, at the peak")
    axes.set_title("left: estimated; right: counted by owner; line: the allocator's own peak")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    parser.set_defaults(cases=list(CASES), steps=2)
    options = parse(parser, out="device_memory_standin.md", cases=list(SMOKE), steps=1)
    if options.rank:
        rank, folder, case, steps = options.rank
        rank_main(int(rank), Path(folder), case, int(steps))
        sys.stdout.flush()
        os._exit(0)
    rows: list[str] = []
    with tempfile.TemporaryDirectory() as made:
        prepare(Path(made))
        for case in options.cases:
            compared = compare(Path(made), case, options.steps)
            if case == options.cases[0]:
                draw(compared, options.out.with_suffix(".png"))
            for phase, told, found, peak in compared:
                cells = [f"{told[owner] / 1e6:.1f} / {found[owner] / 1e6:.1f}" for owner in OWNERS]
                total = f"{told.total() / 1e6:.1f} / {peak / 1e6:.1f} | {told.total() / peak - 1:+.1%}"
                finished_row(rows, f"| {case} | {phase} | {' | '.join(cells)} | {total} |")
    write(
        options,
        "MB on a device at the peak of each phase: estimated / counted by owner, and the allocator's own count. Two "
        "ranks, a Qwen3 of 7 layers of 256 (7.7 M weights), 544 tokens a micro-batch, compute in bf16, weights in "
        "fp32, the second of two steps.",
        table(["run", "phase", *OWNERS, "all", "off by"], rows),
    )


if __name__ == "__main__":
    main()
