"""Driver side of the judge on the run's devices: distributes messages over ranks and counts costs."""

from __future__ import annotations

import time
from collections import Counter

from rltrain.common.columns import names as c
from rltrain.runtime.calls import bind
from rltrain.runtime.group import WorkerGroup
from rltrain.runtime.samples import Samples, whole
from rltrain.trainer.roles import deal_by_length
from rltrain.workers.interface import roles


class Judge:
    """Generative reward model. ``readings``: maximum number of attempts per message until a reply can be parsed."""

    def __init__(self, group: WorkerGroup, seed: int, readings: int) -> None:
        self._group, self._seed, self.readings = group, seed, readings

    def replies(self, messages: Samples, reading: int, at_once: int | None = None) -> Counter[str]:
        """Attach a ``judge_reply`` to every ``judge_message``, with ``at_once`` messages (None: all) per call. Returns
        `JUDGE_COUNTS`.

        reading: number of earlier attempts.
        """
        started, num_tokens = time.perf_counter(), 0
        lengths, at_once = messages[c.MESSAGE_LENGTH], at_once or max(1, len(messages))
        for first in range(0, len(messages), at_once):
            shares = [first + ids for ids in deal_by_length(lengths[first : first + at_once], self._group.world)]
            requests = [messages.request(ids, [c.JUDGE_MESSAGE]) for ids in shares]
            calls = [bind(roles.Judge.replies, request.as_batch, self._seed, reading) for request in requests]
            results = self._group.submit(calls).collect()
            for ids, node, (replies, numbers) in zip(shares, self._group.nodes, results, strict=True):
                messages.attach([whole(replies, (c.JUDGE_REPLY,), ids, node)] if len(ids) else [])
                num_tokens += numbers.num_tokens
        costs = {"calls": len(messages), "tokens": num_tokens, "seconds": time.perf_counter() - started}
        return Counter(costs | {"retries": len(messages) if reading else 0})
