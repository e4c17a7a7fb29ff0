"""Supervised fine-tuning against TRL's SFTTrainer and a plain loop in float64: losses, gradients and weights.

    python -m bench.sft [--peer-env .bench-env] [--steps 5]

Rows are conversations of two assistant turns, of different lengths. All train the same random model in float32 on the
same batches with AdamW: TRL with the loss on assistant turns only, once padded and once packed (``padding_free``). A
second run of each is one step with lr = eps = 1e4, which moves the weights by their gradient.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bench.table import ROOT, parse, table, write

BATCH, MICRO_BATCH, BETAS, WEIGHT_DECAY, CLIP = 8, 2, (0.9, 0.95), 0.01, 1.0
# make_small_model's template, with marks of the learned tokens.
MARKED = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
GRADIENT_STEP = {"lr": 1e4, "eps": 1e4, "decay": 0.0, "steps": 1}
Weights = Mapping[str, torch.Tensor]


def write_rows(file: Path, number: int) -> None:
    """Write conversations of two assistant turns."""
    rng, rows = random.Random(0), []
    for _ in range(number):
        texts = [str(rng.randrange(10 ** rng.randint(1, 9))) for _ in range(4)]
        roles = ("user", "assistant", "user", "assistant")
        rows.append({"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]})
    file.write_text("\n".join(map(json.dumps, rows)))


def run_ours(folder: Path, task: Mapping[str, Any]) -> tuple[list[float], Weights]:
    """Run `rltrain sft`; return the loss of each step and the exported weights."""
    from rltrain.run.report.table import read_metrics

    run, actor = folder / f"run_{task['lr']}", "actor_rollout_ref.actor."
    words = [
        f"model.path={folder}/model", f"data.train_files={folder}/rows.jsonl", "data.shuffle=False",
        "data.max_length=512", f"data.train_batch_size={BATCH}", f"data.micro_batch_size_per_gpu={MICRO_BATCH}",
        f"optim.lr={task['lr']}", f"optim.eps={task['eps']}", f"optim.weight_decay={task['decay']}",
        f"optim.betas={list(BETAS)}", f"optim.clip_grad={CLIP}", "optim.lr_scheduler=constant",
        "optim.lr_warmup_steps_ratio=0", f"{actor}fsdp_config.compute_dtype=float32", "trainer.device=cpu",
        f"trainer.total_training_steps={task['steps']}", "trainer.logger=[]", "trainer.report=False",
        "trainer.resume_mode=disable", f"trainer.default_local_dir={run}",
    ]  # fmt: skip
    (run / "metrics.jsonl").unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "rltrain.sft", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    losses = [line["train/loss"] for line in read_metrics(run) if "train/loss" in line]
    return losses, load_file(run / f"global_step_{task['steps']}/huggingface/model.safetensors")


def plain_loop(folder: Path, task: Mapping[str, Any], dtype: torch.dtype) -> tuple[list[float], Weights]:
    """Train by transformers and torch's AdamW, one row at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype)
    optimizer = torch.optim.AdamW(
        model.parameters(), task["lr"], betas=BETAS, eps=task["eps"], weight_decay=task["decay"]
    )
    rows, losses = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()], []
    for step in range(task["steps"]):
        total, count = torch.zeros((), dtype=dtype), 0
        for row in rows[step * BATCH : (step + 1) * BATCH]:
            found = tokenizer.apply_chat_template(
                row["messages"], chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
            )
            ids, learned = torch.tensor(found["input_ids"]), torch.tensor(found["assistant_masks"][1:]).bool()
            log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            total, count = total - log_probs[learned].sum(), count + int(learned.sum())
        optimizer.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append((total / count).item())
    return losses, {name: weight.detach() for name, weight in model.named_parameters()}


def run_peer(python: Path, folder: Path, task: Mapping[str, Any]) -> tuple[list[float], Weights]:
    """Run `peer` in TRL's environment."""
    subprocess.run(
        [python, "-m", "bench.sft", "peer", json.dumps({"folder": str(folder), **task})], cwd=ROOT, check=True
    )
    return json.loads((folder / "peer.json").read_text()), load_file(folder / "peer.safetensors")


def peer(task: Mapping[str, Any]) -> None:
    """Train with TRL, and write the loss of each step and the weights."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    folder = Path(task["folder"])
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = MARKED
    config = SFTConfig(
        output_dir=str(folder / "peer"), use_cpu=True, bf16=False, seed=0, report_to=[], save_strategy="no",
        logging_steps=1, disable_tqdm=True, learning_rate=task["lr"], adam_beta1=BETAS[0], adam_beta2=BETAS[1],
        adam_epsilon=task["eps"], weight_decay=task["decay"], max_grad_norm=CLIP, lr_scheduler_type="constant",
        per_device_train_batch_size=MICRO_BATCH, gradient_accumulation_steps=BATCH // MICRO_BATCH,
        max_steps=task["steps"], max_length=None, assistant_only_loss=True, padding_free=task["padding_free"],
        gradient_checkpointing=False, train_sampling_strategy="sequential", optim="adamw_torch",
    )  # fmt: skip
    losses = []

    class Recorded(SFTTrainer):
        """`SFTTrainer` that keeps the sum of the micro-batches' losses, which the log rounds to four digits."""

        def training_step(self, *arguments, **named):
            loss = super().training_step(*arguments, **named)
            losses.append(loss.item())
            return loss

    trainer = Recorded(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32), args=config,
        train_dataset=Dataset.from_json(str(folder / "rows.jsonl")), processing_class=tokenizer,
    )  # fmt: skip
    # Decay applies to all weights here, as in the others; transformers leaves out norms.
    trainer.get_decay_parameter_names = lambda model: [name for name, _ in model.named_parameters()]
    trainer.train()
    parts = BATCH // MICRO_BATCH
    steps = [sum(losses[start : start + parts]) for start in range(0, len(losses), parts)]
    (folder / "peer.json").write_text(json.dumps(steps))
    save_file(
        {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()},
        folder / "peer.safetensors",
    )


def distance(found: Weights, expected: Weights, start: Weights | None = None) -> float:
    """Return ||found - expected|| / ||expected - start|| over all weights."""
    assert found.keys() == expected.keys()
    flat = [torch.cat([part[name].double().flatten() for name in expected]) for part in (found, expected)]
    before = torch.cat([start[name].double().flatten() for name in expected]) if start else 0.0
    return float((flat[0] - flat[1]).norm() / (flat[1] - before).norm())


def main() -> None:
    if sys.argv[1:2] == ["peer"]:
        return peer(json.loads(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer-env", type=Path, default=ROOT / ".bench-env", help="TRL's environment")
    parser.add_argument("--steps", type=int, default=5)
    parser.set_defaults(peers=True)
    options = parse(parser, out="sft_cpu.md", work="outputs/bench_sft", peers=False, steps=1)
    from bench.step import peer_python

    python = peer_python(options.peer_env, False, False) if options.peers else None
    read = "from importlib.metadata import version; print(version('trl'))"
    version = (
        subprocess.run([python, "-c", read], check=True, capture_output=True, text=True).stdout.strip()
        if python
        else ""
    )
    options.work.mkdir(parents=True, exist_ok=True)
    model = [sys.executable, "scripts/make_small_model.py", "--output", options.work / "model"]
    subprocess.run(model, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    write_rows(options.work / "rows.jsonl", BATCH * options.steps)
    start = load_file(options.work / "model" / "model.safetensors")
    steps = {"lr": 1e-3, "eps": 1e-8, "decay": WEIGHT_DECAY, "steps": options.steps}
    runs: dict[str, list[tuple[list[float], Weights]]] = {}
    for task in (steps, GRADIENT_STEP):
        runs.setdefault("plain loop, float64", []).append(plain_loop(options.work, task, torch.float64))
        runs.setdefault("plain loop, float32", []).append(plain_loop(options.work, task, torch.float32))
        if python:
            for kind, free in (("padded", False), ("padding-free", True)):
                found = run_peer(python, options.work, task | {"padding_free": free})
                runs.setdefault(f"TRL {version}, {kind}", []).append(found)
        runs.setdefault("rltrain", []).append(run_ours(options.work, task))
    pairs = [("rltrain", other) for other in runs if other != "rltrain"]
    pairs += [(other, "plain loop, float64") for other in runs if other not in ("rltrain", "plain loop, float64")]
    lines = []
    for one, other in pairs:
        (found, moved), (expected, expected_moved) = runs[one][0], runs[other][0]
        losses = distance({"": torch.tensor(found)}, {"": torch.tensor(expected)})
        gradient = distance(runs[one][1][1], runs[other][1][1], start)
        parts = (losses, gradient, distance(moved, expected_moved), distance(moved, expected_moved, start))
        lines.append(f"| {one} | {other} | {' | '.join(f'{part:.1e}' for part in parts)} |")
    titles = ["system", "against", "losses", "gradient", "weights", "change of the weights"]
    write(options, TEXT.format(steps=options.steps), table(titles, lines))


TEXT = """\
Distances ||a - b|| / ||b|| after {steps} steps of 8 conversations of two assistant turns, in micro-batches of 2. AdamW
in float32, lr 1e-3, betas 0.9 and 0.95, decay 0.01, gradients clipped at 1. Losses: of all steps. Gradient: of the
first step, clipped. The last column divides by the norm of the change. AdamW's first steps depend on the sign of a
gradient, so rounding of one next to 0 moves a weight by up to 2 lr. The last rows: float32 against float64."""


if __name__ == "__main__":
    main()
