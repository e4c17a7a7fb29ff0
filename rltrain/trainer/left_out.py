"""Answers that no loss knows of: those that could not go on, and with `algorithm.mask_truncated` those that were cut.

A process that died or a server that is gone says nothing of an answer, and a score of 0 for it would be learnt from: no
baseline knows of it either. What is cut has no end that could be judged, but its reward is what the policy earns on the
prompt as it is: it stays in the baseline, as in DAPO (Yu et al. 2025, section 3.4), which a group of the rest alone
would put too high.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rltrain.base.columns import names as c
from rltrain.base.errors import AgentBug, AgentError
from rltrain.controller.samples import Samples

log = logging.getLogger(__name__)
# With more of them something is broken, and what is left is no fair sample of the answers.
_MOST = 0.5
_TRACEBACK = 'File "'  # long ones have lost their first line
_OF_SERVICES = re.compile(
    r"OSError|IOError|Connect|Timeout|HTTP|API|RateLimit|Unavailable|Pipe|Memory|SSL|socket", re.I
)


def refuse_failures(samples: Samples, failure: str, run: str | Path) -> None:
    """Raise AgentError where more than half of the answers of a round have failed. failure: why the first did. run: the
    run folder."""
    failed, printed = failed_of(samples), Path(run, "agents.log")
    if failed.any():
        told = f"{int(failed.sum())} of {len(failed)} trajectories could not go on. The first: {failure or 'unknown'}"
        if failed.mean() > _MOST:
            told += f"\nWhat tools and agents have printed is in {printed}." if printed.exists() else ""
            if failed.all() and is_bug(failure):
                raise AgentBug(f"{told}\nThis is an error of its code, so running again would end in the same way.")
            raise AgentError(told)
        log.warning("%s (they are left out of loss and baseline; agent/failed counts all)", told)


def is_bug(failure: str) -> bool:
    """Whether a failure is an exception of a user's code that does not come from a service that may be back later."""
    kind = failure.rstrip().rpartition("\n")[2].partition(":")[0]
    return _TRACEBACK in failure and not _OF_SERVICES.search(kind)


def failed_of(samples: Samples) -> NDArray[np.bool_]:
    """Whether the trajectory of each sample [n] has failed."""
    return samples.numbers.get(c.AGENT_FAILED, np.zeros(len(samples), dtype=bool)).astype(bool)


def left_out(
    samples: Samples, *, compares: bool, mask_truncated: bool = False, by_token: bool = False
) -> dict[str, NDArray[np.bool_]]:
    """``left_out`` [n], of which no loss knows, and ``uncompared`` [n], of which no baseline does either.

    compares: an estimator compares the answers to a prompt, so one whose fellows have all failed says nothing.
    mask_truncated: answers that were cut at the limit leave the loss; by_token: of an estimator that compares tokens
    they leave the baseline too, which it weighs by their gradients.
    """
    failed = failed_of(samples)
    failed = failed | samples[c.TRUNCATED] if mask_truncated and by_token else failed
    if compares and failed.any():
        groups = samples[c.GROUP]
        left, size = np.bincount(groups[~failed], minlength=groups.max() + 1), np.bincount(groups)
        failed |= (left[groups] == 1) & (size[groups] > 1)
    return {c.LEFT_OUT: failed | samples[c.TRUNCATED] if mask_truncated else failed, c.UNCOMPARED: failed}


def present(samples: Samples) -> Samples:
    """The samples that have not failed, for metrics; all where that is none."""
    failed = failed_of(samples)
    return Samples.join([(samples, np.flatnonzero(~failed))]) if failed.any() and not failed.all() else samples
