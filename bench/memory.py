"""Peak memory of log-prob pass and update by vocabulary and tokens: rltrain's, and with all logits at once.

    python -m bench.memory                   prints the table and writes it to bench/results/

Every figure is from a separate child process: its peak resident memory (VmHWM) minus its memory before the pass. The
model is one layer of 128, so that the vocabulary dominates.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import multiprocessing
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

from bench.table import finished_row, parse, table, write
from rltrain.common.columns.batch import Batch, DictionaryColumn
from rltrain.common.columns.ragged import Ragged
from rltrain.common.device import get_device
from rltrain.models import forward
from rltrain.models.attention import packing
from rltrain.models.head import ReferenceStates, Scaling, TokenLogProbs
from rltrain.models.weights.shard import sharded_model
from rltrain.models.weights.spec import ModelSpec

VOCABULARIES = (32_768, 151_936)
TOKENS = (512, 2048, 8192)
TITLES = (
    "vocabulary", "answer tokens", "all logits once", "log-prob, all at once", "log-prob, ours", "update, all at once",
    "update, ours",
)  # fmt: skip
PROMPT, SAMPLE = 64, 576
# Computing all logits at once takes about four tensors of this size.
PLAIN_LIMIT = 2048 * 151_936


def peak_mib() -> float:
    """Return the peak resident memory of this process, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


def plain_log_probs(
    head: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    scaling: Scaling,
    with_entropy: bool,
    reference: ReferenceStates | None = None,
    in_fp32: bool = False,
    with_squares: bool = False,
) -> TokenLogProbs:
    """Compute `head.token_log_probs` by automatic differentiation of the definition, with all logits at once.

    Does not support its last two options.
    """
    assert not in_fp32
    assert not with_squares
    log_pi = torch.log_softmax(scaling.apply(head(hidden)), -1)
    log_probs = log_pi.gather(-1, labels[:, None]).sum(-1)
    entropy = -(log_pi.exp() * log_pi).sum(-1) if with_entropy else None
    if reference is None:
        return TokenLogProbs(log_probs, entropy, None)
    with torch.no_grad():
        log_ref = torch.log_softmax(reference.logits(reference.hidden, scaling.temperature), -1)
    return TokenLogProbs(log_probs, entropy, (log_pi.exp() * (log_pi - log_ref)).sum(-1))


def measure(folder: Path, way: str, work: str, vocabulary: int, tokens: int) -> float:
    """Return the MiB that one pass adds to this process. tokens: response tokens per micro-batch. folder: of the
    models."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = folder / str(vocabulary)
    if not (folder / "config.json").exists():
        config = Qwen3Config(
            vocab_size=vocabulary, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=64, tie_word_embeddings=True, eos_token_id=1, bos_token_id=0,
            pad_token_id=0,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    device = get_device("cpu")
    policy = sharded_model(forward.PolicyModel, ModelSpec(str(folder)), device)
    if way == "plain":
        forward.token_log_probs = plain_log_probs
    rows = [torch.randint(2, vocabulary, (SAMPLE,), dtype=torch.int32) for _ in range(tokens // (SAMPLE - PROMPT))]
    prompts = DictionaryColumn(Ragged.from_rows([row[:PROMPT] for row in rows]), torch.arange(len(rows)))
    answers = Ragged.from_rows([row[PROMPT:] for row in rows])
    mask = answers.like(torch.ones(len(answers.values), dtype=torch.bool))
    batch = Batch({"prompt": prompts, "response": answers, "response_mask": mask})
    before = peak_mib()
    with torch.set_grad_enabled(work == "update"):
        log_probs, entropy, *_ = policy(packing.pack(batch, device.torch_device), 1.0, True)
        if work == "update":
            (log_probs.sum() + 0.01 * entropy.sum()).backward()
    return peak_mib() - before


def in_a_child(*arguments: object) -> float:
    """Run `measure` in a fork of this process."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(measure, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.set_defaults(vocabularies=VOCABULARIES, tokens=TOKENS)
    options = parse(parser, out="memory_cpu.md", work="outputs/bench_memory", vocabularies=(1024,), tokens=(512,))
    rows: list[str] = []
    for vocabulary in options.vocabularies:
        for tokens in options.tokens:
            cells = [f"{vocabulary:,}", f"{tokens:,}", f"{tokens * vocabulary * 4 / 2**20:,.0f}"]
            for work in ("log-prob", "update"):
                for way in ("plain", "ours"):
                    fits = way == "ours" or tokens * vocabulary <= PLAIN_LIMIT
                    cells += [f"{in_a_child(options.work, way, work, vocabulary, tokens):,.0f}" if fits else "-"]
            finished_row(rows, f"| {' | '.join(cells)} |")
    write(
        options,
        "MiB that a pass adds to the process (peak), fp32, one thread, with entropy; `-`: not run, all logits would not"
        " fit. One layer of 128; the update holds the gradient of the embedding (vocabulary x 128 x 4 bytes) as well.",
        table(TITLES, rows),
    )


if __name__ == "__main__":
    main()
