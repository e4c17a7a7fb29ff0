"""Learning from tools and environments: examples/agent_cpu.sh with their real output and with noise instead.

    python -m bench.learning_agents [--seeds 3] [--jobs 1] [--only calculator,guess]
    python -m bench.learning_agents --stages [--seeds 3]

With --stages both arms have the calculator, and one starts after supervised fine-tuning on correct calls of it. A seed
determines the model, the order of the data and the sampled responses; both arms of a seed share them. Complete runs in
the folder `--work` are reused. The plot needs matplotlib (extra `dev`).
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench import learning
from bench.table import parse, table, write
from rltrain.run.report.table import read_metrics
from scripts.make_small_agent import TOOLS, asked_for_a_sum

SFT = "SFT, then GRPO"
SFT_STEPS, SFT_BATCH = 8, 32
TURNS = "actor_rollout_ref.rollout.multi_turn."
EVERY = 5


@dataclass(frozen=True)
class Task:
    """A task of examples/agent_cpu.sh and its control."""

    score: str
    """Key of the held-out score: the share of right responses."""
    aside: str
    """The second metric."""
    shown: tuple[int, ...]
    """Steps of the table's columns; the last is the run's last step."""
    arms: dict[str, str]
    """Kind of tool output -> its setting."""


TASKS = {
    "calculator": Task(
        "val-core/rltrain/arithmetic/reward/mean@4",
        "calls an answer",
        (0, 5, 10, 20, 30, 40),
        {"calculator": "", "noise": f"{TURNS}function_tool_path=bench/noise.py"},
    ),
    "guess": Task(
        "val-core/rltrain/guess_number/reward/mean@32",
        "guesses a game",
        (0, 10, 20, 30, 45, 60),
        {"higher, lower": "", "noise": f"{TURNS}environment=bench/noise.py:DeafGuess"},
    ),
}


def folder(out: Path, task: str, arm: str, seed: int) -> Path:
    kind = "after_sft" if arm == SFT else "noise" if TASKS[task].arms[arm] else "honest"
    return out / f"{task}_{kind}_{seed}"


def fine_tune(made: Path, seed: int) -> Path:
    """Run `rltrain sft` on conversations in which the calculator is called and its result repeated."""
    rng, rows, run = random.Random(seed), made / "calls.jsonl", made / "sft"
    messages = [asked_for_a_sum(rng, 0.0) for _ in range(SFT_STEPS * SFT_BATCH)]
    rows.write_text("\n".join(json.dumps({"messages": each, "tools": TOOLS}) for each in messages))
    keys = [f"model.path={made}/calculator_model_{seed}", f"data.train_files={rows}", "data.max_length=128"]
    keys += [f"data.train_batch_size={SFT_BATCH}", "trainer.total_epochs=1", "optim.lr=1e-4", "trainer.device=cpu"]
    learning.train(run, "-m", "rltrain.sft", *keys, "trainer.logger=[]")
    return run


def train(out: Path, task: str, seed: int, warm_up: int) -> None:
    """Train both arms, one after the other, because the second reuses the model of the first."""
    for arm, setting in TASKS[task].arms.items():
        run = folder(out, task, arm, seed)
        settings = [f"data.seed={seed}", f"trainer.total_training_steps={TASKS[task].shown[-1]}"]
        settings += [f"trainer.test_freq={EVERY}", "trainer.save_at_end=False", "trainer.logger=[]"]
        # Seeds that run concurrently must not write the same file.
        made = out / f"made_{task}_{seed}"
        environment = {"TASK": task, "SEED": str(seed), "RUN": str(run), "OUT": str(made), "WARM_UP": str(warm_up)}
        if arm == SFT:
            setting = f"actor_rollout_ref.model.path={fine_tune(made, seed)}"
        words = ["examples/agent_cpu.sh", *settings, *([setting] if setting else [])]
        learning.train(run, *words, command=["bash"], **environment)


def points(run: Path, task: str) -> dict[int, tuple[float, float]]:
    """Return the held-out score and the second metric by step."""
    lines = [line for line in read_metrics(run) if TASKS[task].score in line]
    return {line["step"]: (line[TASKS[task].score], _aside(line, task)) for line in lines}


def _aside(line: dict[str, Any], task: str) -> float:
    # num_turns also counts replies to turns, and the prompt. A call gets a reply, and then another turn follows.
    turns = line["val-aux/num_turns/mean"] / 2
    return turns - 1 if task == "calculator" else turns


def rows(out: Path, task: str, seeds: int) -> list[str]:
    shown, lines = TASKS[task].shown, []
    for arm in TASKS[task].arms:
        runs = [folder(out, task, arm, seed) for seed in range(1, seeds + 1)]
        curves = [points(run, task) for run in runs]
        for place, name in enumerate(("right" if task == "calculator" else "found", TASKS[task].aside)):
            cells = [" ".join(f"{curve[step][place]:.2f}" for curve in curves) for step in shown]
            seconds = "" if place else f"{learning.seconds_a_step(runs):.2f}"
            lines.append(f"| {arm} | {name} | {' | '.join(cells)} | {seconds} |")
    return table(["arm", "", *(f"step {step}" for step in shown), "s/step"], lines).splitlines()


def plot(out: Path, tasks: list[str], seeds: int, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(2, len(tasks), figsize=(4.5 * len(tasks), 6), sharex="col", squeeze=False)
    for column, task in enumerate(tasks):
        for arm in TASKS[task].arms:
            curves = [points(folder(out, task, arm, seed), task) for seed in range(1, seeds + 1)]
            steps = list(curves[0])
            for place in (0, 1):
                values = [[curve[step][place] for curve in curves] for step in steps]
                axes = all_axes[place][column]
                (line,) = axes.plot(steps, [sum(each) / len(each) for each in values], label=arm)
                low, high = [min(each) for each in values], [max(each) for each in values]
                axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.12)
        all_axes[0][column].set_title(task)
        all_axes[0][column].set_ylabel("held-out accuracy" if task == "calculator" else "found")
        all_axes[0][column].legend(fontsize=8)
        all_axes[1][column].set_ylabel(TASKS[task].aside)
        all_axes[1][column].set_xlabel("step (mean of seeds; band: all seeds)")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default=",".join(TASKS))
    parser.add_argument("--stages", action="store_true", help="compare GRPO with GRPO after SFT")
    parser.set_defaults(warm_up=300)
    smoke = {"seeds": 1, "only": "guess", "warm_up": 1}
    options = parse(parser, out="learning_agents_cpu.md", work="outputs/learning_agents", **smoke)
    if options.smoke:
        TASKS["guess"] = replace(TASKS["guess"], shown=(0, 1))
    if options.stages:
        options.only, steps = "calculator", (0, 5, 10, 15, 20)
        ABOUT["calculator"] = ABOUT["calculator"].partition(" `noise`")[0] + f"\n\n{ABOUT_SFT}\n"
        TASKS["calculator"] = replace(TASKS["calculator"], shown=steps, arms={"GRPO": "", SFT: ""})
    out, tasks, seeds = options.work, options.only.split(","), range(1, options.seeds + 1)
    learning.at_once(
        options.jobs, [partial(train, out, task, seed, options.warm_up) for task in tasks for seed in seeds]
    )
    plot(out, tasks, options.seeds, options.out.with_suffix(".png"))
    write(
        options,
        TEXT.format(seeds=", ".join(map(str, seeds))),
        *("\n".join([ABOUT[task], *rows(out, task, options.seeds)]) for task in tasks),
        f"![held-out scores, and calls and guesses]({options.out.stem}.png)",
    )


ABOUT = {
    "calculator": """\
## Sums of two numbers up to 49

128 held-out ones, 4 sampled answers each. The warm-up ends with answers of which 4 of 10 begin with a call; half of
those say its result. `noise`: the tool says any sum of two numbers up to 49.
""",
    "guess": """\
## A number from 1 to 15 in at most 4 guesses

Each number, 32 sampled games each. The warm-up ends with games in which 4 of 10 guesses heed the words before. Halving
finds all numbers; any number of those that are left, 0.60 of them; different numbers without a look at the words, 0.27.
`noise`: "higher" and "lower" come by chance. The example itself goes on to 200 steps, where they find 0.92 0.96 0.87:
they have begun to halve. Where the warm-up heeds no word at all, 100 steps brought 0.21 to 0.29 (one seed), and 30
steps at twice the learning rate ended in words that are no numbers.
""",
}
ABOUT_SFT = f"""\
`{SFT}`: the same model, after `rltrain sft` on {SFT_STEPS} batches of {SFT_BATCH} conversations in which the
calculator is called and its result repeated, at lr 1e-4."""
TEXT = """\
examples/agent_cpu.sh: GRPO, a model of a third of a million parameters. Each cell: seeds {seeds}. Seconds a step with
other jobs on the same cores: an upper bound."""


if __name__ == "__main__":
    main()
