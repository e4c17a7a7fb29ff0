"""How a judge's reply becomes a score, where no function of the user's and no scorer reads it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from rltrain.base.errors import ConfigError
from rltrain.config.schema.judge import BY_RULE, JudgeConfig
from rltrain.rewards.grading.latex import last_boxed

_WORDS = {"yes": 1.0, "true": 1.0, "correct": 1.0, "no": 0.0, "false": 0.0, "incorrect": 0.0}
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_TEXT_IN_BOX = re.compile(r"\\text\{([^{}]*)\}")
# Of "Score: 0.5" and "**Verdict:** yes".
_LABEL = re.compile(r"^[A-Za-z ]{0,30}:")
_SHOWN_CHARS = 200


@dataclass(frozen=True)
class Reply:
    """What a judge has said."""

    text: str
    """"" where there is none, such as a refusal."""
    about: str = ""
    """What stands beside the text, for a message about a reply without any."""
    is_cut: bool = False
    """It has ended at a limit of tokens, so its last word need not be the verdict."""
    unasked: str = ""
    """Why the judge could not be asked; "" where it was."""


class Unreadable(Exception):
    """A reply that has no score; the text says why."""


def reader(judge: JudgeConfig) -> Callable[[str], float] | None:
    """What reads replies by ``reward.judge.parse``; None where a scorer or a function does.

    Raises ConfigError for what is no regular expression.
    """
    if judge.parse is None:
        return last_verdict
    if judge.parse == BY_RULE or judge.function:
        return None
    try:
        pattern = re.compile(judge.parse, re.MULTILINE)
    except re.error as error:
        raise ConfigError(
            f"reward.judge.parse={judge.parse}: {error}. Write a regular expression, rule, or FILE.py:NAME."
        ) from None
    return lambda reply: _matched(pattern, reply)


def last_verdict(reply: str) -> float:
    """1 for yes, 0 for no, or a number from 0 to 1. Raises `Unreadable`.

    It is the last line where that is yes or no, else the last box, else the last line. Nothing else counts: a number in
    the reasons is no score, and a box in front of a verdict may be quoted from the answer.
    """
    box, lines = last_boxed(reply), reply.strip().splitlines() or [""]
    line = _LABEL.sub("", lines[-1].replace("*", "").strip())
    is_verdict = _word(line) in _WORDS
    score = _value(line if box is None or is_verdict else _TEXT_IN_BOX.sub(r"\1", box))
    if score is None or not 0 <= score <= 1:
        raise Unreadable(f"neither yes, no nor a number from 0 to 1 in the last box or line: {_end(reply)}")
    return score


def _matched(pattern: re.Pattern[str], reply: str) -> float:
    *_, match = (None, *pattern.finditer(reply))
    if match is None:
        raise Unreadable(f"reward.judge.parse={pattern.pattern} is not found in {_end(reply)}")
    text = next((group for group in match.groups() if group is not None), match[0])
    if (score := _value(text)) is None:
        raise Unreadable(f"reward.judge.parse={pattern.pattern} finds {text[:_SHOWN_CHARS]!r}, no number, yes or no")
    return score


def _value(text: str) -> float | None:
    word = _word(text)
    if word in _WORDS:
        return _WORDS[word]
    number = float(word) if _NUMBER.fullmatch(word) else math.nan
    return number if math.isfinite(number) else None


def _word(text: str) -> str:
    return text.strip().strip("*$`\"' .").casefold()


def is_whole_verdict(reply: str) -> bool:
    """Whether a reply is a verdict and nothing else."""
    return _value(reply) is not None


def _end(reply: str) -> str:
    return repr(reply if len(reply) <= _SHOWN_CHARS else f"…{reply[-_SHOWN_CHARS:]}")
