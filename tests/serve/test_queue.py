"""The queue between server and engine: nobody who asks while the server ends is left without a word."""

import asyncio

import numpy as np

from rltrain.data.images import EncodedPrompt
from rltrain.tools.serve.answers import AnswerQueue, Asked
from rltrain.tools.serve.requests import Wanted
from rltrain.workers.rollout.contract import Sampling


def told_at_the_end(ask):
    """What an asker is told. ask(queue, asked): what happens until then, the close of the queue among it."""

    async def run():
        news = asyncio.Queue()
        prompt = EncodedPrompt(np.array([1, 2], dtype=np.int32))
        wanted = Wanted(Sampling(4), num_top=1, echo=True)
        ask(AnswerQueue(), Asked(prompt, wanted, 0, asyncio.get_running_loop(), news))
        return str(await asyncio.wait_for(news.get(), 5))

    return asyncio.run(run())


def test_who_asks_behind_the_end_is_told():
    def ask(queue, asked):
        queue.close()
        queue.put(asked)

    assert told_at_the_end(ask) == "the server ends"


def test_whose_prompt_is_being_read_at_the_end_is_told():
    def ask(queue, asked):
        queue.put(asked)
        assert queue.take_unread(8) == [asked]
        queue.close()

    assert told_at_the_end(ask) == "the server ends"
