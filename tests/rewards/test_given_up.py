"""Requests to a judge that are given up leave nothing behind for those of the next step."""

import asyncio
import time
from collections import Counter

from rltrain.config.schema.judge import JudgeConfig
from rltrain.rewards.judge.server import JudgeServer
from tests.doubles.judge import JudgeDouble


def test_who_is_given_up_has_taken_no_turn_of_the_rate():
    judge = JudgeDouble(lambda *_: "yes")

    async def next_step_waits_s():
        server = JudgeServer(JudgeConfig(url=judge.url, model="grader", rate_limit_per_min=300))
        request = server.request([{"role": "user", "content": "?"}])
        step = [asyncio.ensure_future(server.reply(request, Counter())) for _ in range(60)]
        await asyncio.wait(step, return_when=asyncio.FIRST_COMPLETED)
        for task in step:
            task.cancel()
        await asyncio.wait(step)
        started = time.monotonic()
        assert (await server.reply(request, Counter())).text == "yes"
        await server.close()
        return time.monotonic() - started

    try:
        assert asyncio.run(next_step_waits_s()) < 4.0  # the others would have taken 12 s
    finally:
        judge.close()
