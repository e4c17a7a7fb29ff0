"""Cost of multi-turn generation with the embedded engine and a tiny model: one table row per question.

    python -m bench.agents [NAME...] [--out FILE]      prints the table and writes it to bench/results/

Each question has a function here, whose docstring describes the measurement. The model is tiny, so that relative costs
are larger than with any real model; the model of `follow_ups` is larger.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import gc
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

from bench.table import finished_row, parse, table, write
from rltrain.common.columns import names as c
from rltrain.models.weights.names import Weight
from rltrain.runtime.slots.limits import descendants
from rltrain.trainer.ppo import PPOTrainer
from rltrain.workers.interface.tasks import GenerateTask
from rltrain.workers.rollout.contract import Job, Key, Sampling
from rltrain.workers.rollout.conversations import Conversation, Conversations
from tests.local import local_trainer
from tests.tiny import small_run, write_arithmetic
from tests.tiny_tools import CALL_ID, TOOLS, VOCABULARY, save_calling_model, tool_run
from tests.workers.engines import Talk, engine_of, jobs_of, rollout_of

R = "actor_rollout_ref__rollout__"
ENVIRONMENT = """
class Adds:
    def __init__(self):
        self.sum = 0

    def add(self, a: int, b: int) -> str:
        \"\"\"Add two numbers.

        Args:
            a: One of them.
            b: The other.
        \"\"\"
        self.sum += a + b
        return str(self.sum)

    def score(self):
        return self.sum
"""
# As the template of `tests.tiny_tools` shows the tool, so that prompts have the same tokens with it and without.
SHOWN = {"role": "system", "content": "add\n"}
NEVER = "\N{SECTION SIGN}"


def trainer_of(folder: Path, model: Path, code: str = TOOLS, rows: int = 24, **keys: Any) -> PPOTrainer:
    """Return a trainer in this process whose responses may have 400 tokens."""
    files = write_arithmetic(folder / "train.parquet", range(rows)), write_arithmetic(folder / "test.parquet", range(6))
    keys = tool_run(model, folder, code) | keys
    return local_trainer(small_run(model, files, folder / "run", **{k: v for k, v in keys.items() if v is not None}))


def generated(trainer: PPOTrainer, prompts: int, samples: int, step: int, tokens: int | None = None) -> Any:
    """Return payload, texts and numbers of a rollout. tokens: of every response; None: until the policy ends."""
    places, sampling = np.arange(prompts, dtype=np.int32), Sampling(tokens or 400, 1.0, ignore_eos=tokens is not None)
    task = GenerateTask("train", places, samples, sampling, seed=1, step=step, call=next(trainer.calls))
    return trainer.worker.rollout.generate(task)


def never_called(folder: Path, smoke: bool) -> str:
    """Measure processor time of paired rollouts: 128 responses with an unused tool, against the path without tools."""
    model = save_calling_model(folder / "model", call=NEVER)
    plain = folder / "plain"
    plain.mkdir()
    with_tool = trainer_of(folder, model)
    made = write_arithmetic(plain / "made.parquet", range(24))
    rows = pq.read_table(made).to_pylist()
    pq.write_table(pa.Table.from_pylist([row | {"prompt": [SHOWN, *row["prompt"]]} for row in rows]), made)
    without = local_trainer(
        small_run(
            model, (made, made), plain / "run",
            **tool_run(model, plain) | {R + "multi_turn__function_tool_path": "null"},
        )
    )  # fmt: skip
    assert without.worker.rollout._answering is None
    pairs, lengths = (3, (8,)) if smoke else (10, (32, 128))
    return "; ".join(f"{tokens} tokens each {_pairs(with_tool, without, tokens, pairs)}" for tokens in lengths)


def _pairs(with_tool: PPOTrainer, without: PPOTrainer, tokens: int, pairs: int) -> str:
    ratios, more_ms = [], []
    for pair in range(pairs):
        found, seconds = {}, {}
        for trainer in (with_tool, without) if pair % 2 else (without, with_tool):
            gc.collect()
            started = time.process_time()
            found[trainer] = generated(trainer, 16, 8, pair + 1, tokens)
            seconds[trainer] = time.process_time() - started
        ours, theirs = found[with_tool], found[without]
        assert torch.equal(*(each[0].ragged(c.RESPONSE).values for each in (ours, theirs)))
        assert not ours[2].per_sample[c.TOOL_CALLS].any()
        if pair > 1:  # the first two pairs warm up
            ratios.append(seconds[with_tool] / seconds[without])
            more_ms.append(1e3 * (seconds[with_tool] - seconds[without]) / (16 * 8))
    low, high = np.quantile(ratios, [0.25, 0.75])
    return f"{median(ratios) - 1:+.1%} (quartiles {low - 1:+.1%}, {high - 1:+.1%}), {median(more_ms):+.2f} ms an answer"


def per_turn(folder: Path, smoke: bool) -> str:
    """Measure the milliseconds from the end of a turn to its tokenised context: decode, parse, call and render."""
    trainer = trainer_of(folder, save_calling_model(folder / "model"))
    answering = trainer.worker.rollout._answering
    rows = trainer.worker.rollout._rows["train"]
    answering.begin(lambda place: rows[place], np.zeros(1, dtype=np.uint64))
    text = [VOCABULARY.index(character) for character in "I add these two numbers, as I was asked to. " * 3]
    times: list[float] = []
    tokens = np.array([*text, CALL_ID], dtype=np.int32)
    for number in range(104 if smoke else 1100):
        if number % 8 == 0:
            trajectory = Conversation(0, 0, np.zeros(1, dtype=np.int32))
        trajectory.num_turns += 1
        trajectory.add_sampled(tokens, np.zeros(len(tokens), dtype=np.float32))
        started = time.perf_counter()
        assert answering.request_reply((0, 0), trajectory, "stop")
        while not (replies := answering.arrived(0.05)):
            pass
        if number >= 100:
            times.append(1e3 * (time.perf_counter() - started))
        assert replies[0][1].messages[0]["content"] == "5"
        if number % 8 == 7:
            answering.reset()
    answering._executors.shutdown()
    middle, late = np.quantile(times, [0.5, 0.99])
    return f"median {middle:.2f} ms, p99 {late:.2f} ms"


def _memory_mb(pids: Sequence[int]) -> float:
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * os.sysconf("SC_PAGESIZE") / 1e6


def _files(pids: Sequence[int]) -> int:
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)


def long_run(folder: Path, smoke: bool) -> str:
    """Measure memory and open files of 4,000 trajectories with an instance each, 80 at a time, after 2,000 and at the
    end.

    Until 2,000, threads are still started on demand, up to the maximum of concurrent calls.
    """
    (folder / "own.py").write_text(ENVIRONMENT)
    keys = {R + "multi_turn__environment": folder / "own.py:Adds", R + "multi_turn__function_tool_path": None}
    trainer = trainer_of(folder, save_calling_model(folder / "model"), **keys)
    executors, seen, calls = trainer.worker.rollout._answering._executors, {}, 0
    steps = 2 if smoke else 50
    for step in range(1, steps + 1):
        calls += int(generated(trainer, 20, 4, step)[2].per_sample[c.TOOL_CALLS].sum())
        if step in (steps // 2, steps):
            gc.collect()
            below = [child for executor in executors._executors for child in descendants(executor._process.pid)]
            seen[step] = [_memory_mb(below), _files(below), _memory_mb([os.getpid()]), _files([os.getpid()])]
    executors.shutdown()
    (host, host_files, own, own_files), (last_host, last_host_files, last, last_files) = seen.values()
    tools = (
        f"processes of tools {last_host:.1f} MB ({last_host / host - 1:+.2%}), {host_files} -> {last_host_files} files"
    )
    worker = f"worker {last:.0f} MB ({last / own - 1:+.2%}), {own_files} -> {last_files} files"
    return f"{tools}; {worker}; {calls:,} calls"


def places(folder: Path, smoke: bool) -> str:
    """Measure the share of 8 decode slots in use.

    32 responses, whose tool takes 1 s and whose turns take 0.5 s on average, until fewer than 24 are left; and 96
    responses, until the last one starts.
    """
    numbers = (32,) if smoke else (32, 96)
    return "; ".join(f"{answers} answers {_in_use(folder / str(answers), answers, smoke):.0%}" for answers in numbers)


def _in_use(folder: Path, answers: int, smoke: bool) -> float:
    folder.mkdir()
    code = TOOLS.replace("    return", f"    import time\n    time.sleep({0.01 if smoke else 1})\n    return")
    trainer = trainer_of(folder, save_calling_model(folder / "model"), code, 96, **{R + "max_num_seqs": 8})
    worker, marks = trainer.worker.rollout, []
    sample, forward = worker.engine._sample, worker.engine._forward

    def sampled(hidden, rows, turns, *rest):
        marks.append((time.perf_counter(), turns.num_running))
        return sample(hidden, rows, turns, *rest)

    def slowly(*arguments, **named):
        time.sleep(0.001 if smoke else 0.01)
        return forward(*arguments, **named)

    worker.engine._sample, worker.engine._forward = sampled, slowly
    over, begun, wait, take = [], [], Conversations.wait, Conversations._take_new
    is_over = Conversations._over

    def waits(self):
        marks.append((time.perf_counter(), 0))
        return wait(self)

    def ends(self, started):
        over.append(time.perf_counter())
        return is_over(self, started)

    def takes(self, most):
        if jobs := take(self, most):
            begun.append(time.perf_counter())
        return jobs

    Conversations.wait, Conversations._over, Conversations._take_new = waits, ends, takes
    try:
        generated(trainer, answers, 1, 1)
    finally:
        Conversations.wait, Conversations._over, Conversations._take_new = wait, is_over, take
    end = sorted(over)[8] if answers == 32 else begun[-1]
    times, running = np.array([mark for mark in marks if mark[0] <= end]).T
    return float((running[:-1] * np.diff(times)).sum() / (8 * (times[-1] - times[0])))


class LongTalk(Talk):
    """Conversations with 20 tokens of tool output after each turn."""

    def said(self, key: Key) -> list[int]:
        return [2 + (7 * key[0] + number) % 90 for number in range(20)]


def follow_ups(folder: Path, smoke: bool) -> str:
    """Measure 8 conversations of up to 4 turns of 20 tokens on average, with prompts of 1,000 tokens.

    Rollouts run in pairs in one process: as usual, and with an engine that recomputes every turn because it is not
    informed of further turns. The model is a random six-layer Qwen3 of width 256.
    """
    config = Qwen3Config(
        vocab_size=1000, hidden_size=256, intermediate_size=768, num_hidden_layers=1 if smoke else 6,
        num_attention_heads=8, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, eos_token_id=1,
        initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    engine: Any = engine_of("hf", config, rollout_of(max_num_batched_tokens=8192), max_model_len=1600)
    named = (*model.named_parameters(), *model.named_buffers())
    engine.load_weights(Weight(name, value.detach()) for name, value in named)
    engine.wake_cache()
    engine._is_end[::20] = True
    long = 50 if smoke else 1000
    prompts = [np.random.default_rng(number).integers(2, 1000, long).astype(np.int32) for number in range(8)]
    prefill, spent = engine._prefill, [0.0]

    def timed(jobs: Sequence[Job], *rest: Any) -> torch.Tensor:
        started = time.perf_counter()
        hidden = prefill(jobs, *rest)
        spent[0] += time.perf_counter() - started if any(job.given for job in jobs) else 0
        return hidden

    engine._prefill = timed
    found: dict[bool, list[tuple[float, float, LongTalk]]] = {True: [], False: []}
    for pair in range(2 if smoke else 6):
        for keeps in (True, False) if pair % 2 else (False, True):
            talk, spent[0], started = LongTalk(jobs_of(prompts, 1), 500, keeps=keeps), 0.0, time.perf_counter()
            engine.generate(talk, Sampling(500, 1.0))
            found[keeps].append((spent[0], time.perf_counter() - started, talk))
    kept, anew = found[True][0][2], found[False][0][2]
    assert kept.tokens == anew.tokens
    turns = [turn for each in kept.turns.values() for turn in each[1:]]
    begun = sum(
        long + sum(len(turn.tokens) + 20 for turn in each[:number])
        for each in kept.turns.values() for number in range(1, len(each))
    )  # fmt: skip
    share = sum(turn.num_reused for turn in turns) / begun
    # The first pair warms up.
    ms = {keeps: 1e3 * median(each[0] for each in rounds[1:]) / len(turns) for keeps, rounds in found.items()}
    whole = {keeps: median(each[1] for each in rounds[1:]) for keeps, rounds in found.items()}
    return (
        f"{ms[True]:.1f} ms a follow-up, {ms[False]:.1f} ms computed anew ({ms[False] / ms[True]:.1f} x); rollout "
        f"{whole[True]:.2f} s and {whole[False]:.2f} s; {share:.1%} of the tokens of {len(turns)} follow-ups reused"
    )


QUESTIONS: dict[str, tuple[str, Callable[[Path, bool], str]]] = {
    "never_called": ("generation with a tool that is never called, against the plain path", never_called),
    "per_turn": ("a turn's end to its context in tokens, one trajectory at a time", per_turn),
    "long_run": ("2,000 trajectories after the first 2,000: growth", long_run),
    "follow_ups": ("prefill of a next turn behind a prompt of 1,000 tokens, and the whole rollout", follow_ups),
    "places": ("share of 8 decode places in use while tools take 1 s", places),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*QUESTIONS, []])
    given = parse(parser, argv, out="agents_cpu.md")
    names = given.names or list(QUESTIONS)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows: list[str] = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            finished_row(rows, f"| {QUESTIONS[name][0]} | {QUESTIONS[name][1](Path(folder), given.smoke)} |")
    dist.destroy_process_group()
    what = "A random two-layer Qwen3 of width 32 with a token that is a whole call"
    if names == ["follow_ups"]:
        what = "A random six-layer Qwen3 of width 256; medians of five rollouts, token for token the same"
    write(given, f"{what}; embedded engine, one thread.", table(["question", "measured"], rows))


if __name__ == "__main__":
    main()
