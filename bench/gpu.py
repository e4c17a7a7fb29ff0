"""First test of a machine with accelerators: working features, performance relative to the devices' peaks, failures.

    python -m bench.gpu [--shape 0.5b]                  every stage, on all devices of this machine
    python -m bench.gpu --stages kernels step           some of them
    python -m bench.gpu --shape tiny --device cpu       a trial run of a minute

Stages: `kernels` (attention and head, forward and backward), `step` (whole steps on one device with the embedded
engine), `eager` and `graphs` (whole steps with vLLM, which sleeps and wakes in each), `devices` (all devices: vLLM over
two, Ulysses over two, parameters and optimizer offloaded), `reshard` (weights of the shape of a 7B model to vLLM). Each
is a separate process with a timeout, so that a crash does not affect the others; its error becomes the reason in the
table. Models are Qwen2.5 of the given shape with random weights, responses have a fixed length. Goals are next to the
figures. Writes bench/results/gpu.md after every stage.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config

from bench.scale import FreeScores
from bench.table import parse, table, write
from bench.workload import write_prompts
from bench.zeros import write_zeros
from rltrain.common.device import Device, get_device
from rltrain.common.env import devices_here, installed
from rltrain.models.attention.packed import attend
from rltrain.models.attention.packing import pack
from rltrain.models.head import Scaling, token_log_probs
from rltrain.run.report.table import read_metrics
from scripts.make_small_model import build_tokenizer
from tests.batches import batch_of_rows
from tests.local import local_trainer

# hidden, layers, heads, key heads, intermediate, vocabulary, tied
SHAPES = {
    "0.5b": (896, 24, 14, 2, 4864, 151_936, True),
    "1.5b": (1536, 28, 12, 2, 8960, 151_936, True),
    "7b": (3584, 28, 28, 4, 18_944, 152_064, False),
    "tiny": (64, 2, 2, 1, 128, 1024, True),
}
REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) % 2\n"
)
PASSES = {"old_log_prob": "actor_infer", "ref": "ref", "update_actor": "actor"}
_TOKENS = 4096  # of the kernels' micro-batch
Metrics = dict[str, float]


class Row(NamedTuple):
    """goal: target of the figure, "" without one."""

    what: str
    value: str
    goal: str = ""


class CannotRun(Exception):
    """The reason why a stage does not run on this machine."""


def make_model(folder: Path, shape: str, dtype: torch.dtype) -> Path:
    """Create a Hugging Face folder with a byte tokenizer; 7B with zeros, the others with random weights."""
    if (folder / "config.json").exists():
        return folder
    hidden, layers, heads, key_heads, intermediate, vocabulary, tied = SHAPES[shape]
    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads, intermediate_size=intermediate, max_position_embeddings=32_768,
        tie_word_embeddings=tied, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    if shape == "7b":
        write_zeros(config, folder)
    else:
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def settings(options: argparse.Namespace, shape: str, steps: int) -> list[str]:
    """Return the arguments of a GRPO run of ``steps`` steps."""
    folder = options.work / shape
    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder, shape, torch.float32 if shape == "tiny" else torch.bfloat16)
    write_prompts(folder / "train.parquet", options.prompts * steps, max((options.prompt_tokens - 25) // 7, 1))
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        "algorithm.adv_estimator=grpo", f"data.train_files={folder}/train.parquet",
        f"data.train_batch_size={options.prompts}", f"data.max_prompt_length={options.prompt_tokens + 32}",
        f"data.max_response_length={options.response_tokens}", f"actor_rollout_ref.model.path={folder}",
        f"{actor}.ppo_mini_batch_size={options.prompts}", f"{actor}.use_kl_loss=True",
        f"{actor}.recompute_old_log_prob=always", f"{actor}.optim.lr=1e-6", f"{rollout}.n={options.answers}",
        f"{rollout}.ignore_eos=True", f"{rollout}.max_num_seqs={options.prompts * options.answers}",
        f"trainer.device={options.device}", f"trainer.total_training_steps={steps}", *options.set,
    ]  # fmt: skip


def run(options: argparse.Namespace, name: str, shape: str, steps: int, keys: Sequence[str]) -> list[Metrics]:
    """Return the metrics of a whole run through Ray, step by step. Raises CannotRun with the end of its output."""
    folder = options.work / f"run_{name}_{time.time_ns()}"
    folder.mkdir(parents=True)
    (folder / "reward.py").write_text(REWARD)
    keys = [*settings(options, shape, steps), f"custom_reward_function.path={folder}/reward.py",
            "custom_reward_function.name=compute_score", f"trainer.default_local_dir={folder}",
            "trainer.logger=console", "trainer.val_before_train=False", *keys]  # fmt: skip
    process = subprocess.run([sys.executable, "-m", "rltrain.main_ppo", *keys], capture_output=True, text=True)
    if process.returncode:
        raise CannotRun(_last_words(process.stderr or process.stdout))
    return [line for line in read_metrics(folder) if "timing_s/step" in line]


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error")]
    return " ".join((errors or lines)[-2:]).replace("|", "/")[-600:] or "it said nothing"


# -- stages ------------------------------------------------------------------------------------------------------------


def kernels(options: argparse.Namespace) -> list[Row]:
    """Measure attention and head alone, over a packed micro-batch whose responses share their prompts."""
    device = get_device(options.device)
    hidden, _, heads, key_heads, _, vocabulary, _ = SHAPES[options.shape]
    prompt, answer = options.prompt_tokens, options.response_tokens
    groups = max(1, _TOKENS // (prompt + options.answers * answer)) if options.shape != "tiny" else 1
    lengths = [prompt] * groups * options.answers
    rows = [
        torch.cat([torch.full((prompt,), number // options.answers), torch.zeros(answer)]).int()
        for number in range(len(lengths))
    ]
    inputs = pack(batch_of_rows(rows, lengths), device.torch_device)
    where = {"device": device.torch_device, "dtype": device.compute_dtype}
    size, tokens = hidden // heads, len(inputs.tokens)
    query = torch.randn(1, heads, tokens, size, **where).requires_grad_()
    key, value = (torch.randn(1, key_heads, tokens, size, **where).requires_grad_() for _ in range(2))
    pairs = groups * (prompt**2 / 2 + options.answers * answer * (prompt + answer / 2))

    def attention() -> None:
        attend(query, key, value, inputs.plan).sum().backward()

    layer = torch.nn.Linear(hidden, vocabulary, bias=False, **where)
    states = torch.randn(len(inputs.labels), hidden, **where).requires_grad_()

    def head() -> None:
        token_log_probs(layer, states, inputs.labels, Scaling(), True).log_probs.sum().backward()

    lines = [Row("tokens of the micro-batch", f"{tokens:,} ({len(inputs.labels):,} of answers)")]
    # A forward takes 4 FLOPs per pair, head and channel; gradients of queries, keys and values 2.5 times as much.
    for name, action, flops in (
        ("attention, one layer", attention, 3.5 * 4 * pairs * heads * size),
        ("head with log-probs", head, 3 * 2.0 * len(inputs.labels) * hidden * vocabulary),
    ):
        seconds = _seconds(device, action)
        peak = device.chip()
        share = f", {flops / seconds / peak.peak_flops:.1%} of peak" if peak else ""
        lines.append(Row(f"{name}: forward and backward", f"{1e3 * seconds:.2f} ms, {_tera(flops / seconds)}{share}"))
    return lines


def _seconds(device: Device, action: Callable[[], None], repeats: int = 5) -> float:
    seconds = []
    for _ in range(repeats + 1):
        device.synchronize()
        started = time.perf_counter()
        action()
        device.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _tera(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:.3g} TFLOP/s"


def step(options: argparse.Namespace) -> list[Row]:
    """Measure whole steps of the real trainer in this process: one device, no Ray, the embedded engine."""
    if not dist.is_initialized():
        dist.init_process_group(get_device(options.device).backend, store=dist.HashStore(), rank=0, world_size=1)
    keys = settings(options, options.shape, options.steps + 1)
    trainer: Any = local_trainer([*keys, "actor_rollout_ref.rollout.name=hf", "trainer.n_gpus_per_node=1"])
    trainer.rewards._pool = FreeScores()
    return figures([trainer.step(number).metrics for number in range(1, options.steps + 2)])


def eager(options: argparse.Namespace) -> list[Row]:
    """Measure vLLM on one device without graphs."""
    return _with_vllm(options, eager=True)


def graphs(options: argparse.Namespace) -> list[Row]:
    """Measure vLLM on one device with graphs, the default."""
    if get_device(options.device).is_cpu:
        raise CannotRun("a CPU captures no graphs")
    return _with_vllm(options, eager=False)


def _with_vllm(options: argparse.Namespace, *, eager: bool) -> list[Row]:
    _need_vllm()
    keys = ["actor_rollout_ref.rollout.name=vllm", f"actor_rollout_ref.rollout.enforce_eager={eager}"]
    steps = run(options, "eager" if eager else "graphs", options.shape, 4, [*keys, "trainer.n_gpus_per_node=1"])
    reserved = [f"{line['perf/max_memory_reserved_gb']:.2f}" for line in steps if "perf/max_memory_reserved_gb" in line]
    row = Row("GiB reserved at most, after each sleep and wake", ", ".join(reserved) or "not on a CPU", "level")
    return [*figures(steps), row]


def devices(options: argparse.Namespace) -> list[Row]:
    """Measure all devices together."""
    _need_vllm()
    count = _count(options) // 2 * 2
    if count < 2:
        raise CannotRun("it needs two devices")
    actor = "actor_rollout_ref.actor"
    keys = [
        f"trainer.n_gpus_per_node={count}", "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2", f"{actor}.ulysses_sequence_parallel_size=2",
        f"{actor}.fsdp_config.param_offload=True", f"{actor}.fsdp_config.optimizer_offload=True",
        "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    ]  # fmt: skip
    return [Row("devices", str(count)), *figures(run(options, "devices", options.shape, options.steps + 1, keys))]


def reshard(options: argparse.Namespace) -> list[Row]:
    """Measure the transfer of a 7B model's weights (of ``tiny``: tiny ones) from all devices' shards to vLLM."""
    _need_vllm()
    device, count = get_device(options.device), _count(options)
    shape = "tiny" if options.shape == "tiny" else "7b"
    hidden, layers, _, _, intermediate, vocabulary, _ = SHAPES[shape]
    parameters = layers * hidden * (3 * intermediate + 3 * hidden) + 2 * vocabulary * hidden
    # The device holds weights and gradients in fp32, and the engine's copy with a small cache. The optimizer is
    # offloaded to the host.
    needs, has = parameters * (8 / count + 2 + 1), device.total_memory_bytes()
    if needs > has:
        raise CannotRun(f"{count} devices of {has / 2**30:.0f} GiB are too few: each would need {needs / 2**30:.0f}")
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    keys = [
        f"trainer.n_gpus_per_node={count}", "actor_rollout_ref.rollout.name=vllm",
        f"{fsdp}.param_offload=True", f"{fsdp}.optimizer_offload=True", "data.max_response_length=16",
        "actor_rollout_ref.actor.use_kl_loss=False",
    ]  # fmt: skip
    steps = run(options, "reshard", shape, 3, keys)
    took, gib, rate = (
        statistics.median(metrics[name] for metrics in steps[1:])
        for name in ("timing_s/reshard", "perf/weight_sync_gb", "perf/weight_sync_gb_per_s")
    )
    return [Row("devices", str(count)), Row(f"reshard, {gib:.2f} GiB", f"{took:.2f} s, {rate:.1f} GiB/s", "1 s (of 8)")]


STAGES: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    each.__name__: each for each in (kernels, step, eager, graphs, devices, reshard)
}


def figures(steps: Sequence[Metrics]) -> list[Row]:
    """Return the medians of the steps after the first."""
    counted = steps[1:] or steps

    def median(name: str) -> float:
        return statistics.median(metrics.get(name, math.nan) for metrics in counted)

    def percent(name: str) -> str:
        return "unknown" if math.isnan(share := median(name)) else f"{share:.1%}"

    rows = [
        Row(
            "generate_sequences",
            f"{median('timing_s/generate_sequences'):.3f} s, {median('perf/gen_throughput'):,.0f} tokens/s a device, "
            f"{percent('perf/mbu/rollout')} of bandwidth",
            "65 % of bandwidth (vLLM)",
        )
    ]
    for phase, name in PASSES.items():
        rows.append(
            Row(
                phase,
                f"{median(f'timing_s/{phase}'):.3f} s, {_tera(1e12 * median(f'perf/tflops/{name}'))}, MFU "
                f"{percent(f'perf/mfu/{name}')}, prompts repeated {percent(f'perf/mfu/{name}_prompts_repeated')}",
                "MFU 45 % at 1.5b" if phase == "update_actor" else "",
            )
        )
    rows += [Row(name, f"{median(f'timing_s/{name}'):.3f} s") for name in ("reshard", "step")]
    for name in ("rollout/log_prob_gap/mean", "rollout/canary_gap"):
        rows.append(Row(name, f"{median(name):.2g}", "below 0.03 in bf16"))
    memory = [name for name in counted[-1] if name.startswith("perf/") and "memory" in name]
    return rows + [Row(name, f"{counted[-1][name]:.2f} GiB") for name in memory]


def _need_vllm() -> None:
    if not installed("vllm"):
        raise CannotRun("vLLM is not installed here")


def _count(options: argparse.Namespace) -> int:
    kind = get_device(options.device).kind
    return 2 if kind == "cpu" else devices_here(kind, none=0)


# -- all of them -------------------------------------------------------------------------------------------------------


def attempt(name: str, options: argparse.Namespace, argv: Sequence[str]) -> tuple[list[Row], str]:
    """Run a stage in this process (``here``) or a separate one. Return its figures, or none and the reason."""
    if options.here:
        try:
            return STAGES[name](options), ""
        except CannotRun as reason:
            return [], str(reason)
    out = options.work / f"{name}.json"
    out.unlink(missing_ok=True)
    # The last --stages counts.
    command = [sys.executable, "-m", "bench.gpu", *argv, "--here", "--stages", name, "--json", str(out)]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=60 * options.minutes)
    except subprocess.TimeoutExpired:
        return [], f"not done after {options.minutes:g} minutes (--minutes)"
    if not out.exists():
        return [], _last_words(process.stderr or process.stdout)
    rows, reason = json.loads(out.read_text())[name]
    return [Row(*row) for row in rows], reason


def report(options: argparse.Namespace, found: dict[str, tuple[list[Row], str]]) -> None:
    device = get_device(options.device)
    rows = []
    for name in STAGES:
        later = "not run yet" if name in options.stages else "not requested (--stages)"
        stage_rows, reason = found.get(name, ([], later))
        rows += [f"| {name} | {row.what} | {row.value} | {row.goal} |" for row in stage_rows]
        rows += [] if stage_rows else [f"| {name} | **not run** | {reason} | |"]
    write(
        options,
        f"{_count(options)} x {device.name}, {os.cpu_count()} host cores. Qwen2.5 of shape {options.shape}, random "
        f"weights; {options.prompts} prompts of about {options.prompt_tokens} tokens x {options.answers} answers of "
        f"{options.response_tokens}. MFU counts a shared prompt once, and where it says so for every answer; shares "
        "are of the peaks in rltrain/common/chips.py.",
        table(["stage", "what", "value", "goal"], rows),
    )


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5b", choices=SHAPES)
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES, metavar="STAGE")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--response-tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2, help="number of measured steps, after a warm-up step")
    parser.add_argument("--minutes", type=float, default=15, help="time limit of a stage")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of the runs")
    parser.add_argument("--here", action="store_true", help="stages in this process")
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    smoke = {"shape": "tiny", "stages": ["kernels", "step"], "device": "cpu", "here": True, "steps": 1, "prompts": 2}
    smoke |= {"answers": 2, "prompt_tokens": 40, "response_tokens": 4}
    options = parse(parser, argv, out="gpu.md", work="outputs/bench_gpu", **smoke)
    options.work.mkdir(parents=True, exist_ok=True)
    stages: dict[str, tuple[list[Row], str]] = {}
    for name in options.stages:
        stages[name] = attempt(name, options, argv)
        if options.json:
            options.json.write_text(json.dumps(stages))
        else:
            report(options, stages)


if __name__ == "__main__":
    main()
