"""Common parts of remote and on-device judges: the rule scorer, the judge's prompts, the parser of its replies.

Code that may hang or crash (scorers and the user's function for replies) runs in slots. The slots are used from a
single thread, because a slot serves one call at a time and ends with the thread that started it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from rltrain.config.schema import ScoringConfig
from rltrain.config.schema.judge import BY_RULE, JudgeConfig
from rltrain.data.images import without_parts
from rltrain.data.rows import Rows
from rltrain.data.stored_images import StoredImages
from rltrain.rewards.custom import CustomReward
from rltrain.rewards.grading.latex import last_boxed
from rltrain.rewards.judge.message import Question, Template
from rltrain.rewards.judge.reply import Reply, Unreadable, is_complete_verdict, reader, without_thinking
from rltrain.rewards.judge.server import api_key
from rltrain.rewards.processes.load_scorer import last_turn
from rltrain.rewards.processes.score import JUDGE, Score, ScorerCall
from rltrain.rewards.processes.slot import ScoringSlot
from rltrain.rewards.scorers.registry import FORMS

_T = TypeVar("_T")
# Maximum number of replies that are requested per response until one can be parsed.
MAX_REPLIES = 3
_REPLY_CHARS = 250


def check_judge(judge: JudgeConfig) -> None:
    """Raise ConfigError for an unusable template, expression or key. Starts nothing and sends no request."""
    Template(judge), reader(judge)
    if judge.url is not None:
        api_key(judge)


class Judging:
    """Rule scorer, prompts and parsing of ``reward.judge``. Thread-safe.

    Raises ConfigError for an unusable template, expression or key.
    """

    def __init__(self, cfg: ScoringConfig) -> None:
        self._judge = judge = cfg.reward.judge
        check_judge(judge)  # before anything is started
        self._template, self._reader = Template(judge), reader(judge)
        self._slots = ThreadPoolExecutor(1, "slots")
        self._rule = self._in_slots(lambda: ScoringSlot.of(cfg)) if judge.runs_rule else None
        # The user's function for replies is called like a reward function, with the judge's reply as the response.
        by_function = CustomReward(*judge.function) if judge.function else None
        self._function = self._in_slots(lambda: ScoringSlot.of(cfg, by_function)) if by_function else None

    # -- the scorer of the data source ---------------------------------------------------------------------------------

    def rules(self, calls: Sequence[ScorerCall]) -> list[Score | None]:
        """Return the rule scorer's scores, or a None for each response if only the judge decides."""
        rule = self._rule
        if self._judge.rule == "none":
            return [None] * len(calls)
        assert rule
        return [*self._in_slots(lambda: rule.score_all(calls))] if calls else []

    def rule_of_truth(self, call: ScorerCall) -> Score | None:
        """Return the rule scorer's score of a ground truth, or None."""
        scorer = self._rule if self._judge.rule != "none" else None
        score = self._in_slots(lambda: scorer.score_truth(call)) if scorer else None
        return score if score and score.status == "ok" else None

    def needs_judge(self, rule: Score | None) -> bool:
        """Return True if the judge is needed. If the scorer failed, the response has failed, and judging it would be
        wasted cost."""
        return rule is None or (rule.status == "ok" and not (self._judge.rule == "first" and _is_right(rule)))

    def combine(self, rule: Score | None, judged: Score) -> Score:
        """Combine the rule scorer's score and the judge's."""
        if rule is None or judged.status != "ok":
            return judged
        if self._judge.rule == "beside":
            # If both have an extra of the same name, the rule's value takes precedence, because reward.weights refers
            # to it.
            of_judge = {name: value for name, value in judged.extras.items() if name.startswith("judge")}
            return replace(rule, extras=judged.extras | rule.extras | of_judge)
        extras = rule.extras | judged.extras
        # `acc` is taken from the judge, because validation uses it, and a response that is wrong by the rule may be
        # right by the judge.
        if "acc" in rule.extras and "acc" not in judged.extras:
            extras["acc"] = judged.extras["judge"]
        return replace(judged, extras=extras)

    # -- the judge -----------------------------------------------------------------------------------------------------

    def message(self, call: ScorerCall, question: Question) -> str:
        """Return the judge's prompt. Raises RewardError if the template cannot be filled in."""
        return self._template.filled(question.text, last_turn(call[1], call[3]), call[2], call[0], call[3])

    def read(self, reply: Reply, call: ScorerCall) -> Score:
        """Return the score from a judge's reply, with the judge's number as the extra ``judge``."""
        if not reply.text:
            return _unreadable(f"it sends {reply.about}")
        # A truncated reply counts only if it is a verdict and nothing else, because it may only have quoted the
        # response so far.
        if reply.is_cut and self._judge.parse in (None, BY_RULE) and not is_complete_verdict(reply.text):
            limits = "reward.judge.request.max_tokens, or the server's"
            limits = limits if self._judge.url is not None else "reward_model.rollout.response_length"
            return _unreadable(f"it was cut at a limit of tokens ({limits})")
        logged = {"judge_reply": reply.text[-_REPLY_CHARS:].replace("\0", "\ufffd")}
        try:
            if self._reader:
                number = self._reader(reply.text)
                return Score(number, "ok", None, {"judge": number, **logged})
            read = self._by_function if self._function else self._by_extraction
            score = self._in_slots(lambda: read(reply.text, call))
        except Unreadable as error:
            return _unreadable(str(error))
        if score.value is None:
            return _unreadable(f"reward.judge.parse={self._judge.parse}: {score.error}")
        return replace(score, extras={**score.extras, "judge": score.value, **logged})

    def _by_function(self, reply: str, call: ScorerCall) -> Score:
        assert self._function
        return self._function.score(call[0], reply, call[2], call[3] | {"answer": last_turn(call[1], call[3])})

    def _by_extraction(self, reply: str, call: ScorerCall) -> Score:
        """Return the rule scorer's best score of the result that the judge extracted, over all `FORMS`."""
        text = without_thinking(reply)
        box = last_boxed(text)
        result = text if box is None else box
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

    def take_printed(self) -> str:
        """Return and clear the output that scorer and function have printed."""
        slots = [slot for slot in (self._rule, self._function) if slot]
        return "".join(self._in_slots(slot.take_printed) for slot in slots)

    def close(self) -> None:
        """End the slots' processes."""
        for slot in (slot for slot in (self._rule, self._function) if slot):
            self._in_slots(slot.close)
        self._slots.shutdown()

    def _in_slots(self, call: Callable[[], _T]) -> _T:
        return self._slots.submit(call).result()


class Questions:
    """The questions of a split's rows. with_images: include the contents of the image files."""

    def __init__(self, rows: Rows, with_images: bool) -> None:
        self._rows = rows
        self._images: StoredImages | None = rows.stored_images() if with_images else None
        self._num_images = rows.num_images
        self._reading = threading.Lock()  # responses are judged concurrently, but only one thread reads files

    def __call__(self, row: int) -> Question:
        """Return the last user message and the images of the prompt, without videos. Raises DataError for missing
        images."""
        texts = [message["content"] for message in without_parts(self._rows[row].prompt) if message["role"] == "user"]
        if not self._images or not self._num_images[row]:
            return Question(texts[-1] if texts else "")
        with self._reading:
            images = (file for file in self._images.of(row) if isinstance(file, bytes))
            return Question(texts[-1] if texts else "", tuple(images))


def _is_right(rule: Score) -> bool:
    acc = rule.extras.get("acc", rule.value)
    return isinstance(acc, int | float) and acc >= 1


def _unreadable(sentence: str) -> Score:
    return Score(None, "rejected", sentence, kind=JUDGE)
