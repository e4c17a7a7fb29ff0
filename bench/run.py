"""Embedded rollout and packed passes against plain transformers: same model, same work, same process, one thread.

    python -m bench.run            prints the table and writes it to bench/results/

Ratios are what counts; seconds depend on the machine. The model is random and its end token is never reached, so both sides do
exactly the work that the given lengths ask for. Peers with a training loop of their own are not measured here yet.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import itertools
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

from rltrain.batch import Batch
from rltrain.device import get_device
from rltrain.models.forward import PolicyModel, pack
from rltrain.models.load import load_config
from rltrain.models.shard import make_mesh, sharded_model
from rltrain.ragged import Ragged
from rltrain.workers.rollout.base import Job, Sampling, sample_seeds
from rltrain.workers.rollout.hf import HFRollout
from rltrain.workers.rollout.queue import JobQueue, Replica
from rltrain.workers.weight_sync import pieces

PROMPTS, ANSWERS, PROMPT_TOKENS, REPEATS = 16, 8, 48, 3
CPU = torch.device("cpu")


def lengths(kind: str) -> list[int]:
    """Answer lengths of the batch: all 64, or lognormal with mean of about 64 and a tail to 256."""
    if kind == "equal":
        return [64] * (PROMPTS * ANSWERS)
    return np.random.default_rng(0).lognormal(3.7, 0.9, PROMPTS * ANSWERS).clip(1, 256).astype(int).tolist()


def seconds(action: Callable[[], object]) -> float:
    """Median wall clock of three runs after a warm one."""
    action()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def training_rows(policy, plain, answer_lengths: list[int]) -> list[tuple[str, float, float]]:
    """Forward and forward + backward over prompt and answer: packed, and padded to the longest."""
    rows = [torch.randint(2, 1000, (PROMPT_TOKENS + length,), dtype=torch.int32) for length in answer_lengths]
    batch = Batch(
        {
            "tokens": Ragged.from_rows(rows),
            "prompt_length": torch.full((len(rows),), PROMPT_TOKENS),
            "response_length": torch.tensor(answer_lengths),
        }
    )
    micros = batch.split([16] * (len(rows) // 16))

    def packed(backward: bool) -> None:
        with torch.set_grad_enabled(backward):
            for micro in micros:
                log_probs, *_ = policy(pack(micro, CPU), 1.0, False)
                if backward:
                    log_probs.sum().backward()
        policy.zero_grad()

    def padded(backward: bool) -> None:
        with torch.set_grad_enabled(backward):
            for micro in micros:
                ids = torch.nn.utils.rnn.pad_sequence(
                    [row.long() for row in micro.ragged("tokens").rows()], batch_first=True
                )
                mask = torch.arange(ids.shape[1]) < micro.ragged("tokens").lengths[:, None]
                logits = plain(ids, attention_mask=mask.long(), use_cache=False).logits[:, PROMPT_TOKENS - 1 : -1]
                log_probs = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, PROMPT_TOKENS:, None])
                if backward:
                    log_probs.sum().backward()
        plain.zero_grad()

    return [
        ("log-prob pass", seconds(lambda: padded(False)), seconds(lambda: packed(False))),
        ("update (forward + backward)", seconds(lambda: padded(True)), seconds(lambda: packed(True))),
    ]


def rollout_row(policy, plain, config) -> tuple[str, float, float]:
    """PROMPTS x ANSWERS answers of 64 tokens each."""
    engine = HFRollout(
        config, dtype=torch.float32, device=get_device("cpu"), eos_token_ids=[1], max_num_seqs=PROMPTS * ANSWERS
    )
    engine.load_weights(pieces(policy, 2**28, torch.float32))
    prompts = [np.random.default_rng(i).integers(2, 1000, PROMPT_TOKENS).astype(np.int32) for i in range(PROMPTS)]
    ids = torch.from_numpy(np.stack(prompts).astype(np.int64))
    settings = {
        "max_new_tokens": 64,
        "min_new_tokens": 64,
        "do_sample": True,
        "top_k": 0,
        "num_return_sequences": ANSWERS,
        "pad_token_id": 0,
    }
    seeds = sample_seeds(0, 0, range(PROMPTS), ANSWERS).reshape(PROMPTS, ANSWERS)
    jobs = [Job(i, np.arange(ANSWERS), prompt, seeds[i]) for i, prompt in enumerate(prompts)]
    store, alone = dist.HashStore(), Replica(0, 1, 0, 1)
    calls = itertools.count()
    return (
        "generate",
        seconds(lambda: plain.generate(ids, attention_mask=torch.ones_like(ids), **settings)),
        seconds(
            lambda: engine.generate(JobQueue(jobs, 0, alone, store, str(next(calls))), Sampling(64, ignore_eos=True))
        ),
    )


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = Path("outputs/bench_model")
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(
        Qwen3Config(
            vocab_size=1024, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=64, max_position_embeddings=1024, tie_word_embeddings=True, eos_token_id=1, bos_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip
    plain.save_pretrained(folder)
    config = load_config(str(folder))
    device = get_device("cpu")
    policy = sharded_model(
        PolicyModel,
        str(folder),
        config,
        make_mesh(device),
        device,
        master_dtype=torch.float32,
        compute_dtype=torch.float32,
        gradient_checkpointing=False,
    )
    found = [("-", *rollout_row(policy, plain, config))]
    for kind in ("equal", "long tail"):
        found += [(kind, *row) for row in training_rows(policy, plain, lengths(kind))]
    lines = [
        f"`python -m bench.run`, {date.today()}, {platform.processor() or platform.machine()}, one thread, torch {torch.__version__}",
        "",
        f"{PROMPTS} prompts of {PROMPT_TOKENS} tokens x {ANSWERS} answers, Qwen3 of 3 million parameters, fp32; median of {REPEATS}.",
        "",
        "| answer lengths | work | transformers, s | rltrain, s | times as fast |",
        "|---|---|---|---|---|",
        *(f"| {kind} | {name} | {peer:.2f} | {ours:.2f} | {peer / ours:.2f} |" for kind, name, peer, ours in found),
    ]
    text = "\n".join(lines) + "\n"
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / "phases_cpu.md").write_text(text)
    sys.stdout.write(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
