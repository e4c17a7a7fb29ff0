"""Supervised fine-tuning: loss on the validation data, and the metrics of a step under verl's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rltrain.common.columns import names as c
from rltrain.common.stop import Stop
from rltrain.runtime.samples import Samples
from rltrain.trainer.batching.balance import Layout
from rltrain.trainer.metrics.step import Answered, Metrics
from rltrain.trainer.metrics.timing import StepTimer
from rltrain.trainer.validation import Validation

# Metrics of a step under verl's names.
_NAMES = {"actor/pg_loss": "train/loss", "actor/lr": "train/lr", "actor/grad_norm": "train/grad_norm"}
# Metrics that have a meaning without rewards and without an engine.
_KEPT = (
    "timing_", "perf/", "training/", "global_seqlen/", "prompt_length/", "response_length/", "moe/", "actor/kl_",
    "actor/steps_", "actor/loss_scale", "actor/entropy", "actor/router_",
)  # fmt: skip
_DROPPED = (
    "perf/decode_", "perf/rollout_", "perf/weight_sync", "perf/gen_", "timing_s/update_weights", "timing_s/reshard",
    "timing_s/generate_", "timing_s/reward", "timing_per_token_ms/gen", "prompt_length/clip", "response_length/clip",
)  # fmt: skip


class LossValidation(Validation):
    """Mean negative log-likelihood per token of the responses in the validation data. lay_out: returns the layout of
    samples over the ranks."""

    _reads_images = True

    def __init__(self, *arguments: Any, lay_out: Callable[[Samples], Layout]) -> None:
        super().__init__(*arguments)
        self._lay_out = lay_out

    def run(self, step: int, stop: Stop) -> Answered | None:
        """Return val/loss, and val/loss/SOURCE if the data has several sources; None if a stop is requested."""
        timer, parts = StepTimer(self._on_phase), []
        rows = np.arange(self.num_prompts, dtype=np.int32)
        with timer("testing"):
            for part in np.array_split(rows, -(-len(rows) // self.prompts_at_once)):
                samples = self._generate(part, step)
                samples.update(self._rewards.score("val", samples))
                self._policy.log_probs(samples, self._lay_out(samples))
                parts.append(samples)
                if stop.requested:
                    return None
        samples = Samples.join([(part, np.arange(len(part))) for part in parts])
        samples.update({c.GROUP: np.arange(len(samples))})
        return Answered(step, self._losses(samples) | timer.metrics(), samples, 1)

    def _losses(self, samples: Samples) -> Metrics:
        sources = np.array(self._rewards.data_sources("val"), dtype=object)[samples[c.ROW]]
        sums, tokens = samples[c.LOG_PROB_SUM], samples[c.POLICY_TOKENS]
        metrics = {"val/loss": float(-sums.sum() / tokens.sum())}
        names = sorted(set(sources.tolist()))
        for name, its in ((name, sources == name) for name in names if len(names) > 1):
            metrics[f"val/loss/{name}"] = float(-sums[its].sum() / tokens[its].sum())
        return metrics


def supervised_metrics(metrics: Metrics) -> Metrics:
    """Return the metrics of a step that apply to supervised fine-tuning, under verl's names."""
    kept = {name: value for name, value in metrics.items() if name.startswith(_KEPT) and not name.startswith(_DROPPED)}
    return {new: metrics[name] for name, new in _NAMES.items() if name in metrics} | kept
