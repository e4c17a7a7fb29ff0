"""Samples masked out of the loss: failed trajectories, and with `algorithm.mask_truncated` truncated responses.

A failed trajectory (dead process, lost server) carries no information about the policy, and a score of 0 would train on
it, so it is excluded from the baseline too. A truncated response cannot be judged, but its reward is part of the
policy's expected reward on the prompt. It stays in the baseline as in DAPO (Yu et al. 2025, section 3.4). A
baseline of the other responses alone would overestimate the expected reward.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rltrain.common.columns import names as c
from rltrain.common.errors import AgentBug, AgentError
from rltrain.runtime.samples import Samples

log = logging.getLogger(__name__)
# If a larger share of the trajectories fails, something is broken, and the remaining responses are a biased sample.
_MOST = 0.5
_TRACEBACK = 'File "'  # matches a traceback without its first line, which is missing if the traceback was truncated
_OF_SERVICES = re.compile(
    r"OSError|IOError|Connect|Timeout|HTTP|API|RateLimit|Unavailable|Pipe|Memory|SSL|socket", re.I
)


def raise_on_failures(samples: Samples, failure: str, run: str | Path) -> None:
    """Raise AgentError if more than half of the responses have failed. failure: the first error. run: run folder."""
    failed, printed = failed_of(samples), Path(run, "agents.log")
    if failed.any():
        message = f"{int(failed.sum())} of {len(failed)} trajectories failed. The first: {failure or 'unknown'}"
        if failed.mean() > _MOST:
            message += f"\nThe output of tools and agents is in {printed}." if printed.exists() else ""
            if failed.all() and is_bug(failure):
                raise AgentBug(f"{message}\nThis is an error in the agent's code, so a rerun would fail too.")
            raise AgentError(message)
        log.warning("%s (they are excluded from loss and baseline; agent/failed counts them)", message)


def is_bug(failure: str) -> bool:
    """Return True if the failure is an exception in user code and not from a service that may recover."""
    kind = failure.rstrip().rpartition("\n")[2].partition(":")[0]
    return _TRACEBACK in failure and not _OF_SERVICES.search(kind)


def failed_of(samples: Samples) -> NDArray[np.bool_]:
    """Return a mask [n] of failed trajectories."""
    return samples.numbers.get(c.AGENT_FAILED, np.zeros(len(samples), dtype=bool)).astype(bool)


def loss_masks(
    samples: Samples, *, compares: bool, mask_truncated: bool = False, by_token: bool = False
) -> dict[str, NDArray[np.bool_]]:
    """Return ``left_out`` [n], masked in the loss, and ``uncompared`` [n], also excluded from the baseline.

    compares: the estimator compares the responses to a prompt, so the only remaining response of a group is excluded.
    mask_truncated: mask truncated responses. by_token: also exclude truncated responses from the baseline, because
    token estimators weight it by the responses' gradients.
    """
    failed = failed_of(samples)
    failed = failed | samples[c.TRUNCATED] if mask_truncated and by_token else failed
    if compares and failed.any():
        groups = samples[c.GROUP]
        left, size = np.bincount(groups[~failed], minlength=groups.max() + 1), np.bincount(groups)
        failed |= (left[groups] == 1) & (size[groups] > 1)
    return {c.MASKED: failed | samples[c.TRUNCATED] if mask_truncated else failed, c.EXCLUDED_FROM_BASELINE: failed}


def valid_samples(samples: Samples) -> Samples:
    """Return the samples that have not failed, for metrics. Returns all samples if all have failed."""
    failed = failed_of(samples)
    return Samples.join([(samples, np.flatnonzero(~failed))]) if failed.any() and not failed.all() else samples
