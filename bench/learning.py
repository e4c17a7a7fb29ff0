"""Learning curves of every algorithm on the quickstart's task, model and step, three seeds each: a table and a plot.

    python -m bench.learning [--steps 100] [--seeds 3] [--jobs 2] [--only grpo,gae]
    python -m bench.learning --newer --out learning_newer_cpu.md …
    python -m bench.learning --moe --out learning_moe_cpu.md …
    python -m bench.learning --moments --out learning_moments_cpu.md …

Complete runs in the folder `--work` are reused. The plot needs matplotlib (extra `dev`). `--newer`: the methods of 2025
and 2026, and grpo. `--moe`: a model with eight experts per layer. `--moments`: AdamW's moments in two dtypes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from bench.table import ROOT, parse, table, write
from rltrain.run.report.table import read_metrics

A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
# Without the penalty for long responses, if there is one.
KEYS = ("val-aux/rltrain/arithmetic/rule_score/mean@4", "val-core/rltrain/arithmetic/reward/mean@4")
GOAL = 0.7
EVERY = 10
COMMON = [
    "data.train_batch_size=32", "data.max_prompt_length=32", "data.max_response_length=8",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False", f"{A}optim.lr=1e-4", f"{A}optim.lr_warmup_steps=5",
    f"{A}optim.weight_decay=0.0", f"{A}ppo_mini_batch_size=16", f"{R}n=8", f"{R}val_kwargs.do_sample=True",
    f"{R}val_kwargs.temperature=1.0", f"{R}val_kwargs.n=4", "trainer.device=cpu", "trainer.n_gpus_per_node=1",
    f"trainer.test_freq={EVERY}", "trainer.save_at_end=False", "trainer.logger=[]",
]  # fmt: skip
ALGORITHMS = {
    "grpo": ["algorithm.adv_estimator=grpo"],
    "dr-grpo": [
        "algorithm.adv_estimator=grpo",
        "algorithm.norm_adv_by_std_in_grpo=False",
        f"{A}loss_agg_mode=seq-mean-token-sum-norm",
    ],
    "rloo": ["algorithm.adv_estimator=rloo"],
    "reinforce++": ["algorithm.adv_estimator=reinforce_plus_plus"],
    "gae": ["algorithm.adv_estimator=gae", "critic.optim.lr=3e-4", "critic.model.enable_gradient_checkpointing=False"],
    "dapo": [
        "algorithm.adv_estimator=grpo",
        f"{A}clip_ratio_high=0.28",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.max_num_gen_batches=10",
        "algorithm.filter_groups.metric=acc",
        "reward_model.reward_manager=dapo",
        "reward_model.overlong_buffer.enable=True",
        "reward_model.overlong_buffer.len=2",
    ],
    "gspo": [
        "algorithm.adv_estimator=grpo",
        f"{A}policy_loss.loss_mode=gspo",
        f"{A}loss_agg_mode=seq-mean-token-mean",
        f"{A}clip_ratio_low=3e-4",
        f"{A}clip_ratio_high=4e-4",
    ],
}
GRPO = ALGORITHMS["grpo"]
CORRECTION = "algorithm.rollout_correction."
NEWER = {
    "grpo": GRPO,
    **{name: [*GRPO, f"{A}policy_loss.loss_mode={name}"] for name in (
        "real", "m2po", "future_kl", "dro", "vespo", "topr", "luspo",
    )},
    **{name: [f"algorithm.adv_estimator={name}"] for name in ("maxrl", "lite_ppo", "optimal_token_baseline")},
    "top_entropy_quantile": [*GRPO, f"{A}top_entropy_quantile=0.2"],
    # The policy begins at an entropy of about 0.5 nats per token.
    "adaptive_entropy": [
        *GRPO, f"{A}adaptive_entropy.target_entropy=0.3",
        f"{A}adaptive_entropy.delta_ent_coef=0.0005",
    ],
    "V3.2 mask + unbiased KL": [
        *GRPO, f"{A}off_policy_mask_threshold=0.01", f"{A}use_kl_loss=True", f"{A}use_bias_correction_kl=True",
    ],
    "token_binary_kl (KPop)": [
        *GRPO, f"{CORRECTION}rollout_rs=token_binary_kl", f"{CORRECTION}rollout_rs_threshold=0.01",
    ],
    "mask_truncated": [*GRPO, "algorithm.mask_truncated=True"],
}  # fmt: skip

MOE = {
    "experts": GRPO,
    "experts with R3": [*GRPO, f"{A}router_replay.mode=R3"],
    "experts with a moving bias": [*GRPO, f"{A}router_bias_update_rate=0.001"],
}
MOMENTS = {
    name: [*GRPO, f"{A}optim.moments={dtype}", "trainer.save_at_end=True", f"{A}checkpoint.save_contents=[model]"]
    for name, dtype in {"moments in float32": "float32", "moments in bfloat16": "bfloat16"}.items()
}


def prepare(out: Path, experts: int = 0, warm_up: int = 400) -> list[str]:
    """Create data and model of the quickstart, optionally with ``experts``; return the keys that name them."""
    data, model = out / "data", out / ("model_experts" if experts else "model")
    if not (model / "config.json").exists():
        arguments = ["--output", data, "--num-train", 2048, "--num-test", 128, "--max-operand", 49, "--seed", 0]
        call("-m", "rltrain.data_preprocess.arithmetic", *arguments)
        sizes = ["--steps", warm_up, "--seed", 1, "--experts", experts]
        call("scripts/make_small_model.py", "--train", data / "train.parquet", "--output", model, *sizes)
    files = [f"data.train_files={data}/train.parquet", f"data.val_files={data}/test.parquet"]
    return [*files, f"actor_rollout_ref.model.path={model}"]


def call(*arguments: object, command: Sequence[str] = (sys.executable,), **environment: str) -> None:
    """Run a command of this repository, with one thread. Raises CalledProcessError if it fails."""
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RLTRAIN_PYTHON": sys.executable}
    words = [*command, *map(str, arguments)]
    subprocess.run(words, cwd=ROOT, env=variables | environment, check=True, stdout=subprocess.DEVNULL)


def train(run: Path, *arguments: object, command: Sequence[str] = (sys.executable,), **environment: str) -> None:
    """Make the run in the folder ``run`` by a command, unless it is complete."""
    if not (run / "done").exists():
        call(*arguments, f"trainer.default_local_dir={run}", command=command, **environment)
        (run / "done").touch()


def at_once(jobs: int, actions: Iterable[Callable[[], None]]) -> None:
    """Run all actions, ``jobs`` at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        for job in [pool.submit(action) for action in actions]:
            job.result()


def seconds_a_step(runs: Iterable[Path]) -> float:
    """Return the mean seconds over all steps of the runs."""
    seconds = [line["timing_s/step"] for run in runs for line in read_metrics(run) if "timing_s/step" in line]
    return sum(seconds) / len(seconds)


def folder_of(out: Path, name: str, seed: int) -> Path:
    return out / f"{re.sub(r'[^a-z0-9_+-]+', '_', name.lower())}_{seed}"


def curve(run: Path) -> dict[int, float]:
    """Return the held-out accuracy by step."""
    lines = [line for line in read_metrics(run) if KEYS[1] in line]
    return {line["step"]: line.get(KEYS[0], line[KEYS[1]]) for line in lines}


def sizes(runs: dict[str, list[Path]]) -> str:
    """Return the sizes of the saved training states: weights and two moments."""
    bytes_of = {
        name: sum(file.stat().st_size for file in first.glob("global_step_*/actor/*.distcp"))
        for name, (first, *_) in runs.items()
    }
    texts = ", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in bytes_of.items() if size)
    return f"Weights in float32 and two moments, as saved: {texts}." if texts else ""


def row(name: str, curves: list[dict[int, float]], seconds: float) -> str:
    reached = [next((step for step, value in curve.items() if value >= GOAL), None) for curve in curves]
    last = [list(curve.values())[-1] for curve in curves]
    steps = ", ".join("never" if step is None else str(step) for step in reached)
    finals = ", ".join(f"{value:.2f}" for value in last)
    return f"| {name} | {curves[0][0]:.2f} | {finals} | {steps} | {seconds:.2f} |"


def plot(curves: dict[str, list[dict[int, float]]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, of_seeds in curves.items():
        steps = list(of_seeds[0])
        values = [[curve[step] for curve in of_seeds] for step in steps]
        (line,) = axes.plot(steps, [sum(each) / len(each) for each in values], label=name)
        axes.fill_between(
            steps, [min(each) for each in values], [max(each) for each in values], color=line.get_color(), alpha=0.12
        )
    axes.axhline(GOAL, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlabel("step (32 prompts x 8 answers)")
    axes.set_ylabel("held-out accuracy (mean of seeds; band: all seeds)")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--newer", action="store_true", help="methods of 2025 and 2026, and grpo")
    parser.add_argument("--moe", action="store_true", help="a model with experts")
    parser.add_argument("--moments", action="store_true", help="AdamW's moments in two dtypes")
    parser.add_argument("--only", help="comma-separated names")
    parser.set_defaults(warm_up=400)
    options = parse(parser, out="learning_cpu.md", work="outputs/learning", steps=1, seeds=1, warm_up=1)
    known = NEWER if options.newer else MOE if options.moe else MOMENTS if options.moments else ALGORITHMS
    names = [name for name in known if not options.only or name in options.only.split(",")]
    names = names[-1:] if options.smoke else names
    keys = [*COMMON, *prepare(options.work, 8 * options.moe, options.warm_up)]
    keys.append(f"trainer.total_training_steps={options.steps}")
    seeds = range(1, options.seeds + 1)
    runs = {name: [folder_of(options.work, name, seed) for seed in seeds] for name in names}
    at_once(
        options.jobs,
        [
            partial(train, runs[name][seed - 1], "-m", "rltrain.main_ppo", *keys, *known[name], f"data.seed={seed}")
            for seed in seeds
            for name in names
        ],
    )
    curves = {name: [curve(run) for run in of_seeds] for name, of_seeds in runs.items()}
    titles = [
        "algorithm", "before", f"after {options.steps} steps (each seed)",
        f"first step at {GOAL} or more (each seed)", "s/step",
    ]  # fmt: skip
    plot(curves, options.out.with_suffix(".png"))
    write(
        options,
        f"Task, model and step of scripts/quickstart.sh; held-out accuracy (128 prompts, 4 sampled answers each) every "
        f"{EVERY} steps. Seconds a step with other jobs on the same cores: an upper bound.",
        sizes(runs),
        table(titles, [row(name, curves[name], seconds_a_step(runs[name])) for name in names]),
        f"![held-out accuracy]({options.out.stem}.png)",
    )


if __name__ == "__main__":
    main()
