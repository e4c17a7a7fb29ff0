"""Seconds of a step: estimated and published.

    python -m bench.simulate

The published tables are verl's, of DeepSeek-R1-Distill-Qwen-7B on 64 devices (to which five assumptions were fitted)
and of the 1.5B on 8 H100 (which is the test). Settings are those of examples/, models are config.json alone. A report
on NPUs gives the seconds of a whole step only. Writes bench/results/simulate.md.
"""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import Qwen3Config

from bench.table import ROOT, parse, table, write
from rltrain.common.chips import find_chip
from rltrain.config.load import load_config
from rltrain.config.schema.arguments import read_arguments
from rltrain.run.seconds.assumptions import Assumptions
from rltrain.run.seconds.lengths import read_lengths
from rltrain.run.seconds.step import StepEstimate, estimate_step
from rltrain.trainer.plan import make_plan
from tests.config.test_recipes import TEXT

EXAMPLES = ROOT / "examples"
# A report of verl-project/verl-ascend-recipe: GRPO with adapters, engines of two without graphs. The report gives the
# rate of a device (655.5 tokens per second) but no lengths. The micro-batches and the rank of the adapters are guessed.
ON_NPU = """
    algorithm.adv_estimator=grpo data.train_files=none data.train_batch_size=128 data.max_prompt_length=1024
    data.max_response_length=1024 actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
    actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.n=8 trainer.device=npu trainer.n_gpus_per_node=4
"""
MODELS = TEXT | {
    "Qwen3-8B": Qwen3Config(
        hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=151_936, max_position_embeddings=40_960,
    )
}  # fmt: skip
# verl passes all samples in old_log_prob; 5.14 s of scoring for 2,048 samples are given, the 1.5B's are unknown.
AS_VERL = "actor_rollout_ref.actor.recompute_old_log_prob=always"
RECIPES = {
    "7B, 64 devices (fitted)": (
        "grpo_7b_boba_64gpu.sh", "R1-Distill-7B", "mean:10425.77,max:27648,prompt:148", "reward_ms=2.51",
        {"generate_sequences": 316.96, "reshard": 4.19, "gen": 325.09, "reward": 5.14, "old_log_prob": 21.58,
         "ref": 20.74, "adv": 0.47, "update_actor": 73.01, "step": 447.36},
    ),
    "1.5B, 8 H100 (test)": (
        "grpo_1_5b_boba_8gpu.sh", "R1-Distill-1.5B", "mean:14254.84,max:27648,prompt:148", "",
        {"generate_sequences": 260.92, "old_log_prob": 17.51, "update_actor": 61.13, "step": 363.55},
    ),
    "8B, 4 x 910B3 (test)": ("", "Qwen3-8B", "mean:600,max:1024,prompt:100", "", {"step": 273.0}),
}  # fmt: skip
TITLES = ("what", "phase", "published, s", "estimated, s", "difference")
# Other assumptions, to show how strongly both tables depend on them.
OTHERS = ("", "spread:0.5", "spread:0.9", "alike:0", "alike:0.8", "bandwidth_share=0.65", "bandwidth_share=0.95")


def words_of(script: str, model: str) -> list[str]:
    """Return the settings of a launch script ("": of the report on NPUs)."""
    if not script:
        return [*ON_NPU.split(), f"actor_rollout_ref.model.path={model}", AS_VERL]
    text = (EXAMPLES / script).read_text().partition("rltrain.main_ppo")[2].replace("\\\n", " ")
    words = shlex.split(text.replace("$MODEL", model).replace("$DATA", "none").replace('"$@"', ""))
    return [*words, AS_VERL]


def published(folder: Path, change: str = "") -> Iterator[tuple[str, StepEstimate, dict[str, float]]]:
    """Yield the tables; with a change, only tables with phases.

    change: to the lengths (``name:value``) or to the assumptions (``name=value``).
    """
    for name, (script, model, lengths, assumed, seconds) in RECIPES.items():
        if change and not script:
            continue
        MODELS[model].save_pretrained(folder / model)
        cfg = load_config(words_of(script, str(folder / model))).config
        chip = find_chip("H100" if script else "Ascend910B3")
        assert chip
        settings = [assumed, *([change] if "=" in change else [])]
        drawn = read_lengths(lengths + (f",{change}" if ":" in change else ""))
        assumptions = read_arguments(Assumptions, [part for part in settings if part])
        yield name, estimate_step(cfg, make_plan(cfg), drawn, chip, assumptions, round(chip.memory_bytes)), seconds


def row(what: str, phase: str, real: float, found: float) -> str:
    return f"| {what} | {phase} | {real:,.2f} | {found:,.2f} | {found / real - 1:+.1%} |"


def tables(others: Sequence[str]) -> tuple[list[str], str]:
    """Return the rows of both tables, and a note on the effect of the assumptions ``others``."""
    rows, lines = list[str](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for name, found, given in published(Path(folder)):
            rows += [row(name, phase, real, found.seconds[phase]) for phase, real in given.items()]
        for change in others:
            gaps = [
                f"{found.seconds['generate_sequences'] / given['generate_sequences'] - 1:+.1%}"
                for _, found, given in published(Path(folder), change)
                if "generate_sequences" in given
            ]
            lines.append(f"| {change or 'as above'} | {' | '.join(gaps)} |")
    return rows, table(["changed", "generate_sequences, 7B", "generate_sequences, 1.5B"], lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.set_defaults(others=OTHERS)
    options = parse(parser, argv, out="simulate.md", others=OTHERS[:1])
    rows, sensitivity = tables(options.others)
    assumed = ", ".join(f"{name}={value:g}" for name, value in vars(Assumptions()).items())
    write(
        options,
        "Seconds of a step, estimated by `rltrain.run.seconds`, and published tables. "
        "**Fitted** on the 7B table: `step_ms`, `forward_share`, `update_share`, `sync_gb_per_s`, `adv_us`; its reward "
        "is given. **The 1.5B table is the test**: nothing was fitted on it, though `bandwidth_share` and how "
        "activations are counted were chosen with both tables in sight. Its step has 24 s that no published phase "
        "contains (ref, reward, resharding); ours has ref, no reward. Devices of the 7B table are not named and are "
        "taken for H100. The report on NPUs has no phases, and its responses are assumed to have 600 tokens.",
        table(TITLES, rows),
        f"Assumed: {assumed}. Lengths: lognormal, spread 0.7, alike 0.5, prompts of 148 tokens, cut at 27,648.\n\n"
        f"How much rests on what was assumed, of generation with all else as fitted:\n\n{sensitivity}",
    )


if __name__ == "__main__":
    main()
