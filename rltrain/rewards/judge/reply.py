"""Parsing of a judge's reply into a score without a user's function or a scorer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from rltrain.common.errors import ConfigError
from rltrain.config.schema.judge import BY_RULE, JudgeConfig

_WORDS = {"yes": 1.0, "true": 1.0, "correct": 1.0, "no": 0.0, "false": 0.0, "incorrect": 0.0}
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_TEXT_IN_BOX = re.compile(r"\\text\{([^{}]*)\}")
# The label in "Score: 0.5" and "**Verdict:** yes".
_LABEL = re.compile(r"^[A-Za-z ]{0,30}:")
_BOX_AT_END = re.compile(r"\\(?:boxed|fbox)\s*\{((?:[^{}]|\{[^{}]*\})*)\}$")
_AFTER_BOX = re.compile(r"(?:\\[\])]|[\s$*.!`])+$")
_THINKING_BEGINS, _THINKING_ENDS = re.compile(r"<think(?:ing)?>"), re.compile(r"</think(?:ing)?>")
_SHOWN_CHARS = 200


@dataclass(frozen=True)
class Reply:
    """A judge's reply."""

    text: str
    """"" if there is no text, for example after a refusal."""
    about: str = ""
    """Details for an error message if the text is empty."""
    is_cut: bool = False
    """True if the reply ended at a token limit, so that its last word need not be the verdict."""
    no_prompt: str = ""
    """Reason why no request was sent to the judge; "" if one was sent."""


class Unreadable(Exception):
    """A reply without a readable score; the text is the reason."""


def reader(judge: JudgeConfig) -> Callable[[str], float] | None:
    """Return the parser for ``reward.judge.parse``, or None if a scorer or a function parses replies.

    Raises ConfigError for an invalid regular expression.
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
    """Return the verdict at the end of a reply: 1 for yes, 0 for no, or a number from 0 to 1. Raises `Unreadable`.

    The verdict is a box followed only by punctuation, or a last line that is a verdict or a label and a verdict
    ("Score: 0.2", "**No**"). A number or a box before other words may be a quote from the judged response.
    """
    text = without_thinking(reply).rstrip()
    line = _LABEL.sub("", (text.splitlines() or [""])[-1].replace("*", "").strip())
    box = _BOX_AT_END.search(_AFTER_BOX.sub("", text))
    score = _value(line if box is None else _TEXT_IN_BOX.sub(r"\1", box[1]))
    if score is None or not 0 <= score <= 1:
        raise Unreadable(f"it does not end with yes, no or a number from 0 to 1: {_end(reply)}")
    return score


def without_thinking(reply: str) -> str:
    """Return the part of a reply after its thinking. Raises `Unreadable` if the thinking never ends."""
    text = _THINKING_ENDS.split(reply)[-1]
    if _THINKING_BEGINS.search(text):
        raise Unreadable(f"it ends inside its thinking: {_end(reply)}")
    return text


def _matched(pattern: re.Pattern[str], reply: str) -> float:
    *_, match = (None, *pattern.finditer(without_thinking(reply)))
    if match is None:
        raise Unreadable(f"reward.judge.parse={pattern.pattern} is not found in {_end(reply)}")
    text = next((group for group in match.groups() if group is not None), match[0])
    if (score := _value(text)) is None:
        raise Unreadable(f"reward.judge.parse={pattern.pattern} finds {text[:_SHOWN_CHARS]!r}, not a number, yes or no")
    return score


def _value(text: str) -> float | None:
    word = _word(text)
    if word in _WORDS:
        return _WORDS[word]
    number = float(word) if _NUMBER.fullmatch(word) else math.nan
    return number if math.isfinite(number) else None


def _word(text: str) -> str:
    return text.strip().strip("*$`\"' .").casefold()


def is_complete_verdict(reply: str) -> bool:
    """Return True if a reply is a verdict and nothing else."""
    return _value(reply) is not None


def _end(reply: str) -> str:
    return repr(reply if len(reply) <= _SHOWN_CHARS else f"…{reply[-_SHOWN_CHARS:]}")
