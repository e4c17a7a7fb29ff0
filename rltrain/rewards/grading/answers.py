"""Extraction of the answer from a solution: its last box, the text after a mark, a phrase, or the closing sentence.

These rules are for benchmarks with free-text answers whose published protocol lets a model extract the answer. Text
inside thinking is ignored. Every pattern takes linear time, as in `latex`.
"""

import re
from collections.abc import Iterator

from rltrain.rewards.grading.latex import TAIL_CHARS, last_boxed

_THOUGHT = "</think>"
# "Answer:", "**Answer**:", "Final Answer:", "<Answer>: <<", {"short answer": "…"}, <answer>…, a heading "### Answer".
_MARK = re.compile(
    r"<answer>(?![>*\"'\s]{0,3}[:：])\s{0,9}|answer[>*_\"'\s]{0,4}[:：][ \t*_<]{0,6}\"?"
    r"|答案[ \t]{0,2}[:：][ \t*]{0,4}"
    r"|^[#*]{1,6} ?(?:final |correct )?answer[*: \t]{0,6}\n",
    re.IGNORECASE | re.MULTILINE,
)
_PHRASE = re.compile(
    r"\b(?:answers?|(?:correct|right|best|only|final) (?:choices?|options?|figures?))\b[^.\n:：]{0,60}?"
    r"\b(?:is|are|should be|must be|would be)\b[ \t:：*_]{0,6}"
    r"|\bI(?:'ll| will| would)? (?:choose|select|pick|go with)\b[ \t:：*_]{0,6}|答案[是为][ \t:：*]{0,4}",
    re.IGNORECASE,
)
# "B. 40°" is one sentence.
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\b[A-Z]\.)[\"')*]{0,3}\s|。")
_CONCLUSION = re.compile(
    r"\b(?:therefore|thus|hence|so|conclu\w{1,8}|finally|correct|choose|select|pick"
    r"|best|corresponds? to|should be|must be)\b"
    r"|因此|所以|故",
    re.IGNORECASE,
)
# "The next one is D.", "52 - 45 = 7."
_NAMES = re.compile(r"(?:\b(?:is|are)|=)\s{1,3}(?:[a-z]{1,9} )?[^\s]{1,12}[.!]$")
# A last line, or a whole solution, of at most this length counts as the answer even without a marker.
_MOST_LINE_CHARS, _MOST_WHOLE_CHARS = 24, 32
_ITEM = re.compile(r"\W{0,3}[A-J0-9][).:]\s")
_STOP = re.compile(r"(?:\s{0,9}(?:<\|\w{1,20}\|>|</s>)){1,3}\s{0,9}$")
_ENDS = '.!)]*$。"”>'
_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")


def answer_tail(solution: str) -> str:
    """Return the end of the text after the thinking; "" if the thinking never ends."""
    thought = solution.rfind(_THOUGHT)
    if thought < 0 and "<think>" in solution:
        return ""
    start = max(thought + len(_THOUGHT) if thought >= 0 else 0, len(solution) - TAIL_CHARS)
    return _STOP.sub("", solution[start:])


def boxed_and_marked(solution: str) -> Iterator[str]:
    """Yield the content of the last box, the line after the last mark, and the text after the last phrase, if they
    exist."""
    tail = answer_tail(solution)
    box = last_boxed(tail)
    if box is not None:
        yield box.strip()
    mark = _last(_MARK, tail)
    if mark is not None:
        line = _line(tail, mark)
        phrase = _last(_PHRASE, line)  # "Answer: The correct choice is B."
        yield _first_sentence(line[phrase.end() :]) if phrase else line
    phrase = _last(_PHRASE, tail)
    if phrase is not None:
        yield _first_sentence(tail[phrase.end() :].lstrip("\n"))


def closing_sentence(solution: str) -> str | None:
    """Return the last sentence if it is a short line, a whole solution or a conclusion; None if it only explains or was
    truncated."""
    lines = [line.strip() for line in answer_tail(solution).splitlines() if line.strip()]
    if not lines:
        return None
    sentences = [part.strip() for part in _SENTENCE_END.split(lines[-1]) if part.strip()]
    sentence, is_alone = sentences[-1], len(lines) == len(sentences) == 1
    is_item = len(lines) > 1 and _ITEM.match(lines[-2]) is not None  # an item of a list that may continue
    most = _MOST_WHOLE_CHARS if is_alone else _MOST_LINE_CHARS
    is_short = len(sentences) == 1 and len(sentence) <= most and not is_item
    is_complete = sentence[-1] in _ENDS and (is_alone or bool(_CONCLUSION.search(sentence) or _NAMES.search(sentence)))
    return sentence if is_short or is_complete else None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    matches = list(pattern.finditer(text))
    return matches[-1] if matches else None


def _line(text: str, mark: re.Match[str]) -> str:
    """Return the rest of the line after a mark, or the next non-empty line; within quotes, up to the closing one."""
    rest = text[mark.end() :].lstrip()
    if mark[0].endswith('"'):
        # The text is not parsed as JSON, because LaTeX backslashes would become escape sequences.
        quoted = rest.partition('"')[0].replace("\\\\", "\\").strip()
        return _ESCAPED.sub(lambda code: chr(int(code[1], 16)), quoted)
    line = re.split(r"</?answer>|>>|\n", rest, maxsplit=1, flags=re.IGNORECASE)[0]
    return line.rstrip("}").strip() if "{" not in line else line.strip()


def _first_sentence(text: str) -> str:
    return _SENTENCE_END.split(text.partition("\n")[0], maxsplit=1)[0].strip()
