"""Multiple choice: extraction of the chosen letters from an answer, and of the choices from a question.

The rules apply in this order to the texts that `answers` extracts: letters at the beginning ("B", "(B)", "B. 40°",
"option B", "B because …"), a letter in parentheses or after "option", and the text of one choice. Two letters where one
is expected count as no choice. An article ("A triangle …") and the name of a quantity ("E = …") are not letters.
"""

import re
from collections.abc import Iterator, Sequence
from string import ascii_uppercase

from rltrain.rewards.grading.answers import boxed_and_marked, closing_sentence
from rltrain.rewards.grading.equivalence import equal
from rltrain.rewards.grading.latex import undressed

LETTERS = ascii_uppercase[:10]
_MOST_CHARS = 512
_DRESS = re.compile(r"[*_`$\"“”‘’]|\\[()\[\],;! ]|\\(?:left|right|quad)(?![a-z])|^[\s:：<{\[']+|[\s>}\]']+$")
_LEAD = re.compile(
    r"(?:(?:the|both|only|correct|right|final|answers?|options?|choices?|figures?|选项|选)[\s:：]{0,3}){0,4}",
    re.IGNORECASE,
)
_LETTER = re.compile(r"[(（\[]?\s?([A-Za-z])\s?(?:[)）\]]|(?![A-Za-z0-9'’^(=]))")
_JOIN = re.compile(
    r"\s{0,3}(,\s{0,2}and\s|,\s{0,2}or\s|[,，、&;/]|\band\b|\bor\b|和|或)\s{0,3}(?:option\s|choice\s)?", re.IGNORECASE
)
_RUN = re.compile(r"[A-Z]{2,8}|[A-Z](?:\s[A-Z]){1,7}")
_EXPLAINS = re.compile(
    r"[.,:;)）、。—–-]|\s?(?:[(（]|because|since|as\b|are\b|which|with\b|for\b|by\b"
    r"|is\s(?:the\s)?(?:\w{1,8}\s)?(?:correct|right|best|true|answer)\b)",
    re.IGNORECASE,
)
_NAMED = re.compile(
    r"[(（]([A-Z])[)）]|\b(?:option|choice|figure|labell?ed|answer)\s([A-Z])(?![A-Za-z0-9'’])"
    r"(?!\s(?:is|has|was|shows|can|does)\s(?!(?:the\s)?(?:correct|right|best|answer)))|\b([B-HJ])(?=[.,;:!]{0,2}$)"
    r"|\b([A-J])\sis\s(?:the\s)?(?:\w{1,8}\s)?(?:correct|right|best|answer)\b"
)
_INSTEAD = re.compile(r"^not\s[^.,;]{1,40}?,?\s(?:but|rather)\s")
_VERB = re.compile(r"\s(?:is|has|was|can|does|shows)\b")
_NOT = re.compile(r"\b(?:not|no|none|neither|nor|wrong|incorrect|except|eliminat\w{1,4}|\w{2,6}n't)\b", re.IGNORECASE)
_BESIDE = re.compile(
    r"\b(?:or|and)\s(?:the\s)?(?:option\s|choice\s)?[(（]?[A-Z](?:[)）]|[.,;]?$)|\b(?:either|neither)\b"
)
_SAID = re.compile(r"\b(?:is|are|be)\b:?\s")
_YES_OR_NO = re.compile(r"(?:yes|no|true|false)\b(?=,)", re.IGNORECASE)
_DIGITS = re.compile(r"[0-9]+")


def chosen_letter(solution: str, letters: str = LETTERS, texts: Sequence[str] = ()) -> str | None:
    """Return the one letter of ``letters`` that a solution chooses; None for no letter, several, or an invalid one.

    texts: the choices in the order of their letters; an answer may write out a choice instead of its letter.
    """
    for stated, is_denied in _stated(solution):
        named = None if is_denied else _letters(stated)
        if named is None and (place := _place(stated, texts)) is not None:
            named = letters[place]
        if named is not None:
            return named if len(named) == 1 and named in letters else None
    return None


def chosen_labels(solution: str, truth: str) -> str | None:
    """Return all letters (or numbers, if the truth has digits) that a solution chooses, sorted: ``A, C``."""
    has_figures = bool(_DIGITS.search(truth))
    for stated, is_denied in _stated(solution):
        if is_denied:
            continue
        named = _DIGITS.findall(stated) if has_figures else _letters(stated)
        if named:
            return ", ".join(sorted(set(named)))
        if named == "":
            return None
    return None


def listed_choices(question: str) -> list[str]:
    """Return the choices that a text lists, marked ``A.``, ``(A)``, ``A:`` and so on; [] for fewer than two."""
    marks: list[re.Match[str]] = []
    for letter in LETTERS:
        start = marks[-1].end() if marks else 0
        mark = re.compile(rf"(?:^|(?<=[\s;,:(]))[(（]?{letter}\s?[.:)）、．：]", re.MULTILINE).search(question, start)
        if mark is None:
            break
        marks.append(mark)
    if len(marks) < 2:
        return []
    ends = [*(mark.start() for mark in marks[1:]), len(question)]
    return [question[mark.end() : end].strip().rstrip(";,(").strip() for mark, end in zip(marks, ends, strict=True)]


def _stated(solution: str) -> Iterator[tuple[str, bool]]:
    """Yield candidates for the answer, with True for sentences that contain "not", from which no letter is taken."""
    yield from ((stated, False) for stated in boxed_and_marked(solution))
    closing = closing_sentence(solution)
    if closing is not None:
        yield closing, _NOT.search(closing) is not None


def _letters(stated: str) -> str | None:
    """Return the letters in a short text; "" if it names several alternatives, None if it names none."""
    text = undressed(stated[:_MOST_CHARS], words="{}")
    while (bare := _DRESS.sub("", text).strip()) != text:
        text = bare
    text = _LEAD.sub("", _INSTEAD.sub("", text), count=1)
    if _RUN.fullmatch(text.rstrip(".")):
        return "".join(dict.fromkeys(text.replace(" ", "").rstrip(".")))
    remainder = _SAID.split(text)[-1]
    for beginning in (text, remainder) if remainder != text else (text,):
        if (named := _begins(beginning)) is not None:
            return named
    if _NOT.search(text):
        return None
    letters = {next(filter(None, match.groups())) for match in _NAMED.finditer(text)}
    return None if not letters else letters.pop() if len(letters) == 1 and not _BESIDE.search(text) else ""


def _begins(text: str) -> str | None:
    """Return the letters at the beginning of a text, as `_letters`."""
    named: list[str] = []
    position, undecided = 0, False
    while letter := _LETTER.match(text, position):
        rest = text[letter.end() :]
        is_marked = letter[0][0] in "(（[" or letter[0][-1] in ")）]"
        joined = _JOIN.match(text, letter.end())
        goes_on = joined is not None and _LETTER.match(text, joined.end()) is not None
        if not (is_marked or not rest.strip(" .。") or goes_on or _is_label(letter[1], rest, bool(named))):
            break
        named.append(letter[1].upper())
        position = letter.end()
        if joined is None or not goes_on:
            break
        undecided = undecided or "or" in joined[1].lower() or joined[1] in "/或"
        position = joined.end()
    if not named:
        return None
    rest = text[position:].lstrip(" .:)）、-").partition(". ")[0]
    # unless the text states that the other choices are wrong
    is_beside = _BESIDE.search(rest) and not _NOT.search(rest)
    return "" if undecided or is_beside else "".join(dict.fromkeys(named))


def _is_label(letter: str, rest: str, is_further: bool) -> bool:
    """Return True if a bare letter is the name of a choice, judging by the text after it."""
    if letter.islower():
        return not is_further and rest[:1] in (".", ")", ":") and not rest[1:2].isalnum()
    if _EXPLAINS.match(rest):
        return rest[:1] != "-" or not rest[1:2].isalnum()
    word = rest.strip()[:1]
    is_article = letter in "AI" and word.isalpha() and word.isascii()
    return not (is_article or is_further or _VERB.match(rest)) and rest[:1].isspace() and word not in "=+-*/<>^\\"


def _place(stated: str, texts: Sequence[str]) -> int | None:
    """Return the index of the choice whose text equals this text or its part after "is"; None for none or several."""
    yes_or_no = _YES_OR_NO.match(stated)  # "No, it is not."
    tries = [stated, _SAID.split(stated)[-1], *([yes_or_no[0]] if yes_or_no else [])]
    return next((place for text in tries if (place := _same(text, texts)) is not None), None)


def _same(stated: str, texts: Sequence[str]) -> int | None:
    plain = _plain(stated)
    places = [place for place, text in enumerate(texts) if _plain(text) == plain]
    if not places and len(stated) <= _MOST_CHARS:
        places = [place for place, text in enumerate(texts) if text and equal(stated, text)]
    return places[0] if len(places) == 1 and plain else None


def _plain(text: str) -> str:
    return " ".join(_DRESS.sub("", undressed(text, words="{}")).casefold().split()).strip(" .")
