"""Trajectories that could not go on, through no fault of the policy: no loss and no baseline knows of them.

A process that died or a server that is gone says nothing of an answer, and a score of 0 for it would be learnt from.
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from rltrain.base.columns import names as c
from rltrain.base.errors import AgentError
from rltrain.controller.samples import Samples

log = logging.getLogger(__name__)
# With more of them something is broken, and what is left is no fair sample of the answers.
_MOST = 0.5


def refuse_failures(samples: Samples, failure: str) -> None:
    """Raise AgentError where more than half of the answers of a round have failed. failure: why the first did."""
    failed = failed_of(samples)
    if failed.any():
        first = f"The first: {failure}" if failure else "See agents.log."
        told = f"{int(failed.sum())} of {len(failed)} trajectories could not go on. {first}"
        if failed.mean() > _MOST:
            raise AgentError(f"{told}\nWhat tools and agents have printed stands in agents.log of the run folder.")
        log.warning("%s (they are left out of loss and baseline; agent/failed counts all)", told)


def failed_of(samples: Samples) -> NDArray[np.bool_]:
    """Whether the trajectory of each sample [n] has failed."""
    return samples.numbers.get(c.AGENT_FAILED, np.zeros(len(samples), dtype=bool)).astype(bool)


def left_out(samples: Samples, *, compares: bool) -> NDArray[np.bool_]:
    """The samples [n] that nothing learns from.

    compares: an estimator compares the answers to a prompt, so one whose fellows have all failed says nothing.
    """
    failed = failed_of(samples)
    if not (compares and failed.any()):
        return failed
    groups = samples[c.GROUP]
    left, size = np.bincount(groups[~failed], minlength=groups.max() + 1), np.bincount(groups)
    return failed | ((left[groups] == 1) & (size[groups] > 1))


def present(samples: Samples) -> Samples:
    """The samples that have not failed, for metrics; all where that is none."""
    failed = failed_of(samples)
    return Samples.join([(samples, np.flatnonzero(~failed))]) if failed.any() and not failed.all() else samples
