"""Rollout engines with the same model, prompts and response lengths, in one process and thread: one row per engine.

    python -m bench.rollout [--dtype bfloat16] [--repeats 3]      prints the tables, writes bench/results/rollout_cpu.md

The model is random and its end token is never sampled; the workload sets every response's length. The floor is the same
decoder in bare torch (`bench.floor`) for responses of one length: keys and values in place, prompts shared, no
scheduling. vLLM runs in the same process through rollout.name=vllm. Seconds are processor time of the process, the
minimum of all runs, with the engines taking turns: other work on the machine disturbs it less than wall-clock time. The
ratios are the result.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from bench.floor import Floor
from bench.table import parse, table, write
from rltrain.common.device import get_device
from rltrain.common.seeds import sample_seeds
from rltrain.config.schema.rollout import RolloutConfig
from rltrain.models.weights.names import Weight
from rltrain.models.weights.spec import ModelSpec
from rltrain.workers.rollout.contract import Job, RolloutEngine, Sampling, Turn
from rltrain.workers.rollout.embedded import engine as hf
from rltrain.workers.rollout.embedded.running import RunningTurns
from rltrain.workers.rollout.queue import Replica
from rltrain.workers.rollout.settings import EngineSettings
from rltrain.workers.rollout.vllm.engine import VLLMRollout

PROMPT_TOKENS = 57


@dataclass(frozen=True)
class Workload:
    """lengths [prompts, responses]: tokens of each response."""

    name: str
    prompts: Tensor
    lengths: Tensor

    @property
    def longest(self) -> int:
        return int(self.lengths.max())


def workloads(count: int = 32, length: int = 128) -> list[Workload]:
    """Return ``count`` prompts with responses of one length, and half as many with responses of up to 4 times that."""
    rng = np.random.default_rng(0)
    prompts, half, most = torch.from_numpy(rng.integers(2, 1000, (count, PROMPT_TOKENS))), count // 2, 4 * length
    skewed = rng.lognormal(3.6, 1.0, (half, 8)).clip(4, most).astype(np.int64)
    skewed[half // 5, 5] = most
    name = f"{half} x 8 answers of 4 to {most} tokens, mean {skewed.mean():.0f}"
    return [
        Workload(f"{count} x 8 answers of {length} tokens", prompts, torch.full((count, 8), length)),
        Workload(name, prompts[:half], torch.from_numpy(skewed)),
    ]


def transformers_generate(model: PreTrainedModel, work: Workload, rows: int) -> None:
    """Run `generate` with ``rows`` responses at once. It computes every row of a batch up to its longest."""
    prompts = work.prompts.repeat_interleave(work.lengths.shape[1], 0)
    for ids, lengths in zip(prompts.split(rows), work.lengths.flatten().split(rows), strict=True):
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=int(lengths.max()), do_sample=True, top_k=0,
            pad_token_id=0, output_logits=False,
        )  # fmt: skip


class AllAtOnce:
    """A source of jobs without replicas."""

    may_stop = False

    def __init__(self, jobs: list[Job]) -> None:
        self.turns: list[Turn] = []
        self._jobs = jobs

    def next_jobs(self, most: int) -> list[Job]:
        jobs: list[Job] = []
        while self._jobs and len(self._jobs[0].samples) <= most:
            jobs.append(self._jobs.pop(0))
            most -= len(jobs[-1].samples)
        return jobs

    def on_turn_end(self, turn: Turn) -> None:
        self.turns.append(turn)

    def is_pending(self, prompt_index: int, sample: int) -> bool:
        return False

    def wait(self) -> bool:
        return False

    def stopped(self) -> bool:
        return False


def embedded(engine: hf.HFRollout, work: Workload) -> None:
    """Run rollout.name=hf, with the lengths instead of the limits."""

    class Forced(RunningTurns):
        def add(self, jobs, reused=None):
            numbers = super().add(jobs, reused)
            self._limits[numbers] = np.concatenate([work.lengths[job.prompt_index].numpy() for job in jobs])
            return numbers

    hf.RunningTurns = Forced
    serve(engine, work)
    hf.RunningTurns = RunningTurns


def through_vllm(engine: VLLMRollout, work: Workload) -> None:
    """Run rollout.name=vllm, with the lengths instead of the limits."""
    params_of = engine._params_of

    def forced(job, stream, sampling, **how):
        (number,) = np.flatnonzero(job.seeds == stream.seed)
        return params_of(job, stream, replace(sampling, max_tokens=int(work.lengths[job.prompt_index, number])), **how)

    engine._params_of = forced
    serve(engine, work)
    engine._params_of = params_of


def serve(engine: RolloutEngine, work: Workload) -> None:
    num_prompts, num_samples = work.lengths.shape
    seeds = sample_seeds(0, 0, range(num_prompts), num_samples).reshape(num_prompts, num_samples)
    jobs = [
        Job(prompt_index, np.arange(num_samples), prompt.numpy().astype(np.int32), seeds[prompt_index])
        for prompt_index, prompt in enumerate(work.prompts)
    ]
    source = AllAtOnce(jobs)
    engine.generate(source, Sampling(work.longest, ignore_eos=True))
    assert all(len(turn.tokens) == int(work.lengths[turn.prompt_index, turn.sample]) for turn in source.turns)


def make_model(dtype: torch.dtype) -> PreTrainedModel:
    """Return a model of three million parameters without an end token."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=True, eos_token_id=None,
        bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def make_engine(model: PreTrainedModel, dtype: torch.dtype) -> hf.HFRollout:
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        engine = hf.HFRollout(engine_settings(folder, dtype))
    return with_weights(engine, model)


def engine_settings(folder: str, dtype: torch.dtype) -> EngineSettings:
    rollout = RolloutConfig()
    rollout.max_num_seqs = 256
    longest = PROMPT_TOKENS + 512
    return EngineSettings(rollout, ModelSpec(folder), dtype, get_device("cpu"), Replica(0, 1, 0, 1), [], longest)


def make_vllm(model: PreTrainedModel, dtype: torch.dtype, folder: str) -> VLLMRollout:
    model.save_pretrained(folder)
    return with_weights(VLLMRollout(engine_settings(folder, dtype)), model)


def with_weights(engine, model: PreTrainedModel):
    engine.wake_weights()
    engine.load_weights(
        Weight(name, tensor.detach(), in_checkpoint)
        for in_checkpoint, tensors in ((True, model.named_parameters()), (False, model.named_buffers()))
        for name, tensor in tensors
    )
    engine.wake_cache()
    return engine


def seconds(actions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the minimum processor time of each, in turns, after a short warm-up by the first repeat."""
    times_of: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats):
        for name, action in actions.items():
            started = time.process_time()
            action()
            times_of[name].append(time.process_time() - started)
            sys.stderr.write(f"{name}: {times_of[name][-1]:.2f} s\n")
    return {name: min(times) for name, times in times_of.items()}


def measure(name: str, options: argparse.Namespace) -> str:
    """Return the table of one dtype."""
    dtype = getattr(torch, name)
    model = make_model(dtype)
    engine, floor = make_engine(model, dtype), Floor(model, dtype)
    with tempfile.TemporaryDirectory() as folder:
        vllm = make_vllm(model, dtype, folder) if options.vllm else None
    columns = []
    for work in options.workloads:
        equal = int(work.lengths.min()) == work.longest
        actions: dict[str, Callable[[], object]] = {
            "transformers generate, all at once": lambda work=work: transformers_generate(model, work, 256),
            "transformers generate, 32 at once": lambda work=work: transformers_generate(model, work, 32),
            "rltrain, rollout.name=hf": lambda work=work: embedded(engine, work),
            "rltrain, rollout.name=vllm": lambda work=work: through_vllm(vllm, work),
            "floor": lambda work=work: floor.generate(work.prompts, work.lengths.shape[1], work.longest),
        }
        del actions["transformers generate, 32 at once" if equal else "floor"]
        if not vllm:
            del actions["rltrain, rollout.name=vllm"]
        columns.append((work, seconds(actions, options.repeats)))
    if vllm:
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
    rows = []
    for way in dict.fromkeys(way for _, least in columns for way in least):
        cells = []
        for work, least in columns:
            first = next(iter(least.values()))
            cells += (
                [f"{least[way]:.2f}", f"{work.lengths.sum() / least[way]:.0f}", f"{first / least[way]:.2f}"]
                if way in least
                else ["-"] * 3
            )
        rows.append(f"| {way} | {' | '.join(cells)} |")
    titles = [title for work, _ in columns for title in (f"{work.name}, s", "tokens/s", "times as fast")]
    return f"{name}:\n\n{table(['engine', *titles], rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.set_defaults(vllm=True, workloads=workloads())
    smoke = {"dtype": ["float32"], "repeats": 1, "vllm": False, "workloads": workloads(2, 8)}
    options = parse(parser, out="rollout_cpu.md", **smoke)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tables = [measure(name, options) for name in options.dtype]
    write(
        options,
        f"Qwen3 of 3 million parameters, prompts of {PROMPT_TOKENS} tokens, sampling at temperature 1, one thread; "
        f"processor time, least of {options.repeats} runs in turns. tokens/s counts the tokens that were asked for.",
        *tables,
    )


if __name__ == "__main__":
    main()
