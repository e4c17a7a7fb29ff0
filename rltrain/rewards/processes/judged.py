"""Answers scored by a model as judge, alone or with the scorer of their data source.

The judge is asked from this process, in an event loop of a thread of its own, about many answers at the same time.
What may hang or crash, scorers and the user's function for replies, stays in slots; these are used from one thread
alone, since a slot serves one call at a time and ends with the thread that started it.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from rltrain.base.errors import JudgeError, RewardError, RltrainError
from rltrain.config.schema import Config
from rltrain.config.schema.judge import BY_RULE
from rltrain.data.images import without_parts
from rltrain.data.pictures import Pictures
from rltrain.data.rows import Rows
from rltrain.rewards.custom import CustomReward, custom_reward
from rltrain.rewards.grading.latex import last_boxed
from rltrain.rewards.judge.cache import ReplyCache
from rltrain.rewards.judge.message import Question, Template, messages_of
from rltrain.rewards.judge.reply import Unreadable, is_whole_verdict, reader
from rltrain.rewards.judge.server import JudgeServer, Unanswered, api_key
from rltrain.rewards.processes.score import JUDGE, Score, ScorerCall
from rltrain.rewards.processes.slot import ScoringSlot
from rltrain.rewards.scorers.registry import FORMS

_T = TypeVar("_T")
# How often an answer is judged until the reply can be read.
_READINGS = 3
_REPLY_CHARS = 250


class JudgedScorer:
    """Scores answers by ``reward.judge``. May be used from several threads.

    num_sharing: processes that ask the same judge for this run. Raises ConfigError for a template, an expression, a
    cache or a key that cannot be used.
    """

    def __init__(self, cfg: Config, num_sharing: int = 1) -> None:
        self._judge = judge = cfg.reward.judge
        check_judge(cfg)  # before anything is started
        self._template, self._reader = Template(judge), reader(judge)
        self._cache = ReplyCache(judge.cache) if judge.cache else None
        self._slots = ThreadPoolExecutor(1, "slots")
        reward, custom = cfg.reward, custom_reward(cfg)
        limits = (reward.timeout_s, reward.memory_limit_mb, reward.allow_code_execution)
        self._rule = self._in_slots(lambda: ScoringSlot(custom, *limits)) if judge.runs_rule else None
        # It is a reward function whose answer is the reply.
        by_function = CustomReward(*judge.function) if judge.function else None
        self._function = self._in_slots(lambda: ScoringSlot(by_function, *limits)) if by_function else None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judge", daemon=True)
        self._thread.start()
        self._server = self._in_loop(_made(lambda: JudgeServer(judge, num_sharing)))
        self._under_way: set[asyncio.Task[Any]] = set()
        self._counts: Counter[str] = Counter()
        self._said: dict[str, None] = {}
        self._counting = threading.Lock()

    def score_all(self, calls: Sequence[ScorerCall], questions: Sequence[Callable[[], Question]]) -> list[Score]:
        """Score answers; what ``questions`` make is asked for where the judge is."""
        rules = self._by_rule(calls) if self._judge.rule != "none" else [None] * len(calls)
        asked = [at for at, rule in enumerate(rules) if self._is_asked(rule)]
        judging = self._judge_all([calls[at] for at in asked], [questions[at] for at in asked])
        verdicts = dict(zip(asked, self._in_loop(judging), strict=True))
        return [
            self._together(rule, verdicts[at]).about(call) if at in verdicts else _of_rule(rule)
            for at, (rule, call) in enumerate(zip(rules, calls, strict=True))
        ]

    def score_truth(self, call: ScorerCall, question: Callable[[], Question]) -> Score:
        """Have the judge judge a ground truth as the answer, whatever the scorer says of it.

        Raises JudgeError where the server does not answer now, RewardError where it refuses or its reply has no score.
        """
        scorer = self._rule if self._judge.rule != "none" else None
        rule = self._in_slots(lambda: scorer.score_truth(call)) if scorer else None
        verdict = self._in_loop(self._judge_all([call], [question], self._judge.deadline_s))[0]
        if verdict.status != "ok":
            kind = RewardError if verdict.status == "rejected" else JudgeError
            raise kind(
                f"reward.judge.url={self._judge.url} gives no score for data_source={call[0]!r}: {verdict.error}"
            )
        return self._together(rule if rule and rule.status == "ok" else None, verdict)

    def give_up(self) -> None:
        """Leave what is being judged unscored."""

        def cancel() -> None:
            for task in self._under_way:
                task.cancel()

        self._loop.call_soon_threadsafe(cancel)

    def take_counts(self) -> Counter[str]:
        """What the judge has cost since the last call, by `JUDGE_COUNTS`."""
        with self._counting:
            counts, self._counts = self._counts, Counter()
        return counts

    def take_printed(self) -> str:
        """What scorer and function have printed since the last call, and what is said of the cache."""
        slots = [slot for slot in (self._rule, self._function) if slot]
        with self._counting:
            said, self._said = self._said, {}
        return "".join(self._in_slots(slot.take_printed) for slot in slots) + "".join(f"{line}\n" for line in said)

    def close(self) -> None:
        """End the slots' processes and close the connections."""
        for slot in (slot for slot in (self._rule, self._function) if slot):
            self._in_slots(slot.close)
        self._slots.shutdown()
        self.give_up()
        self._in_loop(self._server.close())
        self._in_loop(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._cache:
            self._cache.close()

    # -- the scorer of the data source ---------------------------------------------------------------------------------

    def _by_rule(self, calls: Sequence[ScorerCall]) -> list[Score]:
        rule = self._rule
        assert rule
        return self._in_slots(lambda: rule.score_all(calls)) if calls else []

    def _is_asked(self, rule: Score | None) -> bool:
        """A failed scorer fails its answer, so that nothing is paid for it."""
        return rule is None or (rule.status == "ok" and not (self._judge.rule == "first" and _is_right(rule)))

    def _together(self, rule: Score | None, verdict: Score) -> Score:
        """The score of an answer of which rule and judge have spoken."""
        if rule is None or verdict.status != "ok":
            return verdict
        if self._judge.rule == "beside":
            # Numbers of one name are the rule's, of which reward.weights speaks.
            of_judge = {name: value for name, value in verdict.extras.items() if name.startswith("judge")}
            return replace(rule, extras=verdict.extras | rule.extras | of_judge)
        extras = rule.extras | verdict.extras
        # `acc` is what a validation counts, and what is wrong by the rule may be right by the judge.
        if "acc" in rule.extras and "acc" not in verdict.extras:
            extras["acc"] = verdict.extras["judge"]
        return replace(verdict, extras=extras)

    # -- the judge -----------------------------------------------------------------------------------------------------

    async def _judge_all(
        self, calls: Sequence[ScorerCall], questions: Sequence[Callable[[], Question]], within_s: float | None = None
    ) -> list[Score]:
        tasks = [
            asyncio.ensure_future(asyncio.wait_for(self._judged(call, question), within_s))
            for call, question in zip(calls, questions, strict=True)
        ]
        self._under_way.update(tasks)
        try:
            verdicts = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._under_way.difference_update(tasks)
        return [verdict if isinstance(verdict, Score) else self._failed(verdict) for verdict in verdicts]

    async def _judged(self, call: ScorerCall, question: Callable[[], Question]) -> Score:
        counts: Counter[str] = Counter()
        try:
            asked = await asyncio.to_thread(question)
            text = self._template.filled(asked.text, _answer(call), call[2], call[0], call[3])
            request = self._server.request(messages_of(text, asked.images))
            return await self._read_reply(request, call, counts)
        finally:
            with self._counting:
                self._counts.update(counts)

    async def _read_reply(self, request: dict[str, Any], call: ScorerCall, counts: Counter[str]) -> Score:
        kept = await asyncio.to_thread(self._kept, request)
        # An expression or a function may be another one now, to which what is kept says nothing.
        if kept is not None and (score := await self._score_of(kept, call)).status == "ok":
            counts["cache_hits"] += 1
            return score
        for reading in range(_READINGS):
            counts["retries"] += reading > 0
            reply = await self._server.reply(request, counts)
            score = await self._score_of(reply.text, call) if reply.text else _unread(f"it sends {reply.about}")
            # Up to where it was cut it may only have quoted the answer.
            if reply.is_cut and self._judge.parse in (None, BY_RULE) and not is_whole_verdict(reply.text):
                score = _unread("it was cut at a limit of tokens (reward.judge.request.max_tokens, or the server's)")
            if score.status == "ok":
                await asyncio.to_thread(self._keep, request, reply.text)
                return score
            counts["parse_failures"] += 1
        return replace(score, status="rejected", error=f"{score.error} (asked {_READINGS} times)")

    def _kept(self, request: dict[str, Any]) -> str | None:
        """The reply in the cache; a file that fails now costs money and no score."""
        try:
            return self._cache.get(request) if self._cache else None
        except sqlite3.Error as error:
            self._say(f"reward.judge.cache={self._judge.cache} cannot be read: {error}")
            return None

    def _keep(self, request: dict[str, Any], reply: str) -> None:
        try:
            if self._cache:
                self._cache.put(request, reply)
        except sqlite3.Error as error:
            self._say(f"reward.judge.cache={self._judge.cache} cannot be written: {error}")

    def _say(self, sentence: str) -> None:
        with self._counting:
            self._said[sentence] = None

    async def _score_of(self, reply: str, call: ScorerCall) -> Score:
        """What a reply says of an answer; ``judge`` among the extras is the judge's number."""
        shown = {"judge_reply": reply[-_REPLY_CHARS:].replace("\0", "\ufffd")}
        try:
            if self._reader:
                score = self._reader(reply)
                return Score(score, "ok", None, {"judge": score, **shown})
            read = self._of_function if self._function else self._of_extraction
            score_read = await self._loop.run_in_executor(self._slots, read, reply, call)
        except Unreadable as error:
            return _unread(str(error))
        if score_read.value is None:
            return _unread(f"reward.judge.parse={self._judge.parse}: {score_read.error}")
        return replace(score_read, extras={**score_read.extras, "judge": score_read.value, **shown})

    def _of_function(self, reply: str, call: ScorerCall) -> Score:
        assert self._function
        told = call[3] | {"answer": _answer(call)}
        return self._function.score(call[0], reply, call[2], told)

    def _of_extraction(self, reply: str, call: ScorerCall) -> Score:
        """The scorer's verdict on the result that the judge has found, in whichever form it can read it."""
        box = last_boxed(reply)
        result = reply if box is None else box
        best: Score | None = None
        extra_info = {name: value for name, value in call[3].items() if name != "last_turn"}
        for form in FORMS:
            assert self._rule
            score = self._rule.score_all([(call[0], form.format(result), call[2], extra_info)])[0]
            if best is None or best.value is None or (score.value is not None and score.value > best.value):
                best = score
            if _is_right(best):
                break
        assert best
        return best

    def _failed(self, error: BaseException) -> Score:
        if isinstance(error, asyncio.CancelledError | asyncio.TimeoutError):
            seconds = f"{self._judge.deadline_s:g} s (reward.judge.deadline_s)"
            return Score(None, "timeout", f"not judged within {seconds}", kind=JUDGE)
        if isinstance(error, Unanswered):
            sentence = f"{self._judge.url}: {error}"
            return Score(None, "rejected" if error.is_refused else "crashed", sentence, kind=JUDGE)
        if isinstance(error, RltrainError):
            return Score(None, "rejected", str(error), kind=JUDGE)
        raise error

    def _in_slots(self, call: Callable[[], _T]) -> _T:
        return self._slots.submit(call).result()

    def _in_loop(self, awaitable: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(awaitable, self._loop).result()


async def _made(make: Callable[[], _T]) -> _T:
    return make()


def check_judge(cfg: Config) -> None:
    """Raise ConfigError for a template, an expression or a key that cannot be used; nothing is started or asked."""
    Template(cfg.reward.judge), reader(cfg.reward.judge), api_key(cfg.reward.judge)


class Questions:
    """The questions of a split's rows. with_images: with the files of their images."""

    def __init__(self, rows: Rows, with_images: bool) -> None:
        self._rows = rows
        self._pictures: Pictures | None = rows.pictures() if with_images else None
        self._num_images = rows.num_images
        self._reading = threading.Lock()  # many answers at once ask for images, and files are read by one

    def __call__(self, row: int) -> Question:
        """The last message of the user, and the images of the prompt. Raises DataError for images that are gone."""
        texts = [message["content"] for message in without_parts(self._rows[row].prompt) if message["role"] == "user"]
        if not self._pictures or not self._num_images[row]:
            return Question(texts[-1] if texts else "")
        with self._reading:
            return Question(texts[-1] if texts else "", tuple(self._pictures.of(row)))


def _answer(call: ScorerCall) -> str:
    """The last turn of the policy, where there are several, as the scorers read it."""
    turn = call[3].get("last_turn")
    return turn if isinstance(turn, str) else call[1]


def _is_right(rule: Score) -> bool:
    acc = rule.extras.get("acc", rule.value)
    return isinstance(acc, int | float) and acc >= 1


def _of_rule(rule: Score | None) -> Score:
    assert rule
    return rule


def _unread(sentence: str) -> Score:
    return Score(None, "rejected", sentence, kind=JUDGE)
