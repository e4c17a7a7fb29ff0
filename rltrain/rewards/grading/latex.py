"""LaTeX answers: extraction of the last box, and normalisation of equivalent typesetting.

A model may write anything, and a backtracking pattern could use up the whole deadline. So every pattern here is linear:
one repeated character class, or a few bounded ones.
"""

import re
import unicodedata
from fractions import Fraction

TAIL_CHARS = 4096
_MAX_BOX_CHARS = 512

# Normalisation of characters: full-width forms, typographic signs, Greek letters, Chinese punctuation.
_SIGNS = {
    "‐‑‒–—―−﹣": "-", "·⋅∙•∗": "\\cdot ", "×": "\\times ", "÷⁄": "/", "≤⩽": "\\le ", "≥⩾": "\\ge ", "≠": "\\ne ",
    "∞": "\\infty ", "°": "^\\circ ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ",
    "±": "\\pm ", "∓": "\\mp ",
    "∖": "\\setminus ", "；": ",", "⟨": "(", "⟩": ")",
    "√": "\\sqrt ", "∛": "\\sqrt[3] ", "∠": "\\angle ", "′’": "'", "∶": ":", "∣": "|",
    "∨": "\\lor ", "∧": "\\land ", "ϕ": "\\phi ",
    "。": ".", "、": ",", "\n\r\t~\u00a0": " ", "\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\u00ad": "",
    "ℝ": "\\mathbb{R}",
}  # fmt: skip
_GREEK = "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ"
_CHARACTERS = {0xFF01 + i: chr(0x21 + i) for i in range(94)}
_CHARACTERS |= {ord(sign): plain for signs, plain in _SIGNS.items() for sign in signs}
for _sign in _GREEK:
    _, _size, _, _name = unicodedata.name(_sign).lower().replace("lamda", "lambda").split()
    _CHARACTERS[ord(_sign)] = f"\\{_name.capitalize() if _size == 'capital' else _name} "
_POWERS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_BELOW = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_MONEY = re.compile(r"^[$\s]*\\\$\s?([0-9][0-9,]*(?:\.[0-9]+)?)[$\s.]*$")
_FONTS = re.compile("[\U0001d400-\U0001d7ff]+")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_VULGAR = re.compile("([0-9]?) ?([½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒])")

# Commands that only change the appearance of the following braces, or of everything that follows.
_TEXT = "text textbf textit textrm textsf texttt textnormal mathrm mbox hbox emph operatorname rm"
_DRESS = "boldsymbol mathbf mathit mathsf mathtt bm pmb underline fbox boxed ensuremath bf it"
_WRAPPER = re.compile(rf"\\(?:({'|'.join(_TEXT.split())})|{'|'.join(_DRESS.split())})\s?(?=\{{)")
_ROMAN = re.compile(r"\{\s?\\(?:rm|sf|tt|it|text)\s([^{}]*)\}")
_COLOR = re.compile(r"\\(?:textcolor|colorbox)\s?\{[^{}]*\}(?=\s?\{)|\\color\s?\{[^{}]*\}|\\hspace\*?\s?\{[^{}]*\}")
_SWITCH = re.compile(
    r"\\(?:(?:math(?:bf|it|rm|sf)|boldsymbol|text)(?=\s?[0-9(-])|(?:left|right)\."
    r"|(?:left|right|middle|[bB]igg?[lrm]?|bf|it|rm|sf|tt|em|bfseries|itshape|large|Large|LARGE|huge"
    r"|Huge|small|tiny|normalsize|displaystyle|textstyle|scriptstyle|limits|nolimits|strut|mathstrut|hfill|hline)(?![A-Za-z]))"
)
_DELIMITER = re.compile(r"(?<!\\)\\[()\[\]]")
_ARRAY = re.compile(r"(\\\{|[(\[|])?\s?\\begin\{array\}\s?\{[^{}]*\}(.*?)\\end\{array\}\s?([)\]|]|\\\})?")
_CASES = re.compile(r"\\begin\{cases\}([^&]*?)\\end\{cases\}")
_BRACKETED = re.compile(r"[(\[]\s?(\\begin\{pmatrix\}[^()\[\]]*\\end\{pmatrix\})\s?[)\]]")
_ALIGNED = re.compile(r"\\(?:begin|end)\{(?:aligned|align\*?|gathered|gather\*?|equation\*?|split)\}")
_COMMANDS = (
    ("{bmatrix}", "{pmatrix}"), ("{smallmatrix}", "{pmatrix}"), ("{matrix}", "{pmatrix}"), ("{dcases}", "{cases}"),
    ("\\tfrac", "\\frac"), ("\\dfrac", "\\frac"), ("\\cfrac", "\\frac"),
    ("\\dbinom", "\\binom"), ("\\tbinom", "\\binom"),
    ("\\neq", "\\ne"), ("\\not=", "\\ne "), (">=", "\\ge "), ("<=", "\\le "),
    ("\\leqslant", "\\le"), ("\\geqslant", "\\ge"), ("\\leq", "\\le"), ("\\geq", "\\ge"),
    ("\\lt ", "<"), ("\\gt ", ">"), ("\\varnothing", "\\emptyset"), ("\\{\\}", "\\emptyset"), ("\\{ \\}", "\\emptyset"),
    ("\\langle", "("), ("\\rangle", ")"),
    ("\\lbrace", "\\{"), ("\\rbrace", "\\}"), ("\\lbrack", "["), ("\\rbrack", "]"),
    ("\\lvert", "|"), ("\\rvert", "|"), ("\\vert", "|"), ("\\mid", "|"), ("\\bigcup", "\\cup"),
    ("\\varphi", "\\phi"), ("\\varepsilon", "\\epsilon"), ("\\vartheta", "\\theta"),
    ("\\div", "/"), ("\\ast", "\\cdot"),
    ("^{\\prime\\prime}", "''"), ("^{\\prime}", "'"), ("^\\prime", "'"), ("\\prime", "'"),
    ("\\mathbb R", "\\mathbb{R}"), ("\\degree", "^\\circ"), ("^{\\circ}", "^\\circ"), ("^{ \\circ}", "^\\circ"),
    ("\\qquad", " "), ("\\quad", " "), ("\\space", " "), ("\\!", ""), ("\\$", ""), ("$", ""),
)  # fmt: skip
_ROW_SPACE = re.compile(r"\\\\\[[^\[\]]{0,9}\]")
_SPACES = re.compile(r"(?<!\\)\\[,;:> ]")
_GROUP_COMMA = re.compile(r"(?<=[0-9])(?:\{,\}|,\s?\\!\s?)(?=[0-9]{3})")
_SEGMENT = re.compile(r"\\overline\s?\{([A-Z]{2})\}")
_RADICAL = re.compile(r"(?:√|(?<![\\A-Za-z])sqrt)\s?([0-9]+(?:\.[0-9]+)?)")
_INEQUALITY = re.compile(r"[<>]|\\(?:le|ge|ne)(?![A-Za-z])")
_AND = re.compile(r"\\text\{\s?and\s?\}|\sand\s|且|\\(?:land|wedge)(?![a-z])")
_OR = re.compile(
    r"\\text\{\s?,?\s?(?:or|and)\s?\}|,?\s(?:or|and)\s(?!more|less|fewer|greater|above|below|over|under|equal)|[和或]"
    r"|\\(?:lor|vee)(?![a-z])"
)
_EMPTY_PART = re.compile(r",(?:\s?,)+")
_ONE_CHARACTER = re.compile(r"([\^_])\{(\w)\}")
# \frac12 and \frac1{2}. Nested braces are handled by the formula parser.
_ARGUMENTS = re.compile(r"\\frac\s?(?:\{([^{}]*)\}|(\w))\s?(?:\{([^{}]*)\}|(\w))")
_ROOT = re.compile(r"\\sqrt\s?(\[[^\[\]{}]{1,8}\])?\s?(?:\{([^{}]*)\}|(\w))")
_REPEATING = re.compile(r"(?<![0-9])([0-9]{0,15})\.([0-9]{0,15})\\(?:overline|bar|dot)\s?(?:\{([0-9]{1,15})\}|([0-9]))")
_DOTTED = re.compile(r"\\dot\s?\{?([0-9])\}?([0-9]{0,9})\\dot\s?\{?([0-9])\}?")
_INNER_SPACE = re.compile(r"(?<![0-9]) | (?![0-9])")
_GROUPED = re.compile(r"-?[0-9]{1,3}(?: [0-9]{3})+")
_MIXED = re.compile(r"(-?[0-9]{1,12}) ([0-9]{1,12})/([0-9]{1,12})")
_PLUS = re.compile(r"(^|[(,\[])\+")


def last_boxed(solution: str) -> str | None:
    """Return the content of the last ``\\boxed{}`` or ``\\fbox{}`` with balanced braces; None if unclosed or long."""
    start = max(solution.rfind("\\boxed"), solution.rfind("\\fbox"))
    if start < 0:
        return None
    # Both commands have a single x: \boxed continues with "ed", \fbox ends.
    opening = solution.find("x", start + 3) + (len("ed") if solution[start + 1] == "b" else 0) + 1
    # Only this many characters are searched, so that an unclosed box costs little.
    content = solution[opening : opening + _MAX_BOX_CHARS + 2]
    if content.startswith(" ") and not content.lstrip().startswith("{"):  # "\boxed 5$": up to the end of the formula
        return re.split(r"[$\n]", content)[0].strip() or None
    content = content.lstrip()
    end = closing(content, 0)
    return content[1:end] if end > 0 else None


def tidy(text: str) -> str:
    """Normalise signs, spaces, fractions and enumerations of a formula. The result is valid LaTeX."""
    text = _MONEY.sub(r"\1\\text{ dollars}", text)
    text = _FONTS.sub(lambda letters: unicodedata.normalize("NFKC", letters[0]), text)
    text = _RADICAL.sub(r"\\sqrt{\1}", _VULGAR.sub(_vulgar, text))
    text = _RAISED.sub(lambda sign: f"^{{{sign[0].translate(_POWERS)}}}", text)
    text = _LOWERED.sub(lambda sign: f"_{{{sign[0].translate(_BELOW)}}}", text).translate(_CHARACTERS)
    text = _SEGMENT.sub(r"\1", _GROUP_COMMA.sub("", text)).replace("{,}", ",")
    text = undressed(_ROMAN.sub(r"\\text{\1}", _COLOR.sub("", text)))
    text = _DELIMITER.sub(" ", _ROW_SPACE.sub(r"\\\\", _SWITCH.sub("", text)))
    for old, new in _COMMANDS:
        text = text.replace(old, new)
    text = " ".join(_ALIGNED.sub(" ", _SPACES.sub(" ", text)).split())
    text = _CASES.sub(lambda rows: rows[1].replace("\\\\", ","), _BRACKETED.sub(r"\1", _ARRAY.sub(_array, text)))
    text = _REPEATING.sub(_repeating, _DOTTED.sub(r"\\overline{\1\2\3}", text))
    if _INEQUALITY.search(text):
        text = _AND.sub(r"\\land ", text)
    text = _EMPTY_PART.sub(",", _OR.sub(",", text.replace(";", ",")))
    text = _ROOT.sub(r"\\sqrt\1{\2\3}", _ARGUMENTS.sub(r"\\frac{\1\2}{\3\4}", text))
    text = text.strip().removesuffix(".").strip(" ,;")
    while text.startswith("{") and closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def closing(text: str, opening: int) -> int:
    """Return the position of the closing brace for ``opening``; -1 if there is none. ``\\{`` is not a brace."""
    depth, position = 0, opening
    while position < len(text):
        character = text[position]
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return position
        position += 2 if character == "\\" else 1
    return -1


def undressed(text: str, words: str = "\\text{{{}}}") -> str:
    """Remove commands that only change the appearance. Words stay in ``\\text{}``, or in the format ``words``."""
    position = 0
    while wrapper := _WRAPPER.search(text, position):
        end = closing(text, wrapper.end())
        if end < 0:
            return text
        content = undressed(text[wrapper.end() + 1 : end], words="{}")
        is_text = wrapper[1] is not None and any(character.isalpha() for character in content)
        content = words.format(content) if is_text else content
        position = wrapper.start() + len(content)
        text = text[: wrapper.start()] + content + text[end + 1 :]
    return text


def normalise(text: str) -> str:
    """Normalise the typesetting of a tidy text: spaces, percent signs, ``1/2``, ``.5`` and others."""
    text = undressed(text, words="{}").strip()
    if text.casefold() in ("no solution", "no solutions", "empty set", "the empty set"):
        return "\\emptyset"
    for removed in ("^\\circ", "\\%", "%"):
        text = text.replace(removed, "")
    text = text.strip().rstrip(".")
    mixed = _MIXED.fullmatch(text)
    if mixed:
        return f"{mixed[1]}\\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    if _GROUPED.fullmatch(text):
        text = text.replace(" ", "")
    text = _ONE_CHARACTER.sub(r"\1\2", _INNER_SPACE.sub("", text))
    return _number(_PLUS.sub(r"\1", text))


def _vulgar(sign: re.Match[str]) -> str:
    part = Fraction(unicodedata.numeric(sign[2])).limit_denominator(10)
    return f"{sign[1]}\\frac{{{part.numerator}}}{{{part.denominator}}}"


def _array(array: re.Match[str]) -> str:
    kind = {"\\{": "cases", "|": "vmatrix"}.get(array[1] or "", "pmatrix")
    return f"\\begin{{{kind}}}{array[2]}\\end{{{kind}}}"


def _repeating(decimal: re.Match[str]) -> str:
    whole, fixed, repeated = decimal[1], decimal[2], decimal[3] or decimal[4]
    upper = int(whole + fixed + repeated) - int("0" + whole + fixed)
    return f"\\frac{{{upper}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"


def _number(text: str) -> str:
    """Normalise numbers: 0.5 for .5 and 0.50, ``\\frac{1}{2}`` for 1/2."""
    upper, slash, lower = text.partition("/")
    sign = "-" if upper.startswith("-") else ""
    if slash and upper.removeprefix("-").isdigit() and lower.isdigit():
        return f"{sign}\\frac{{{upper.removeprefix('-')}}}{{{lower}}}"
    whole, _, fraction = text.removeprefix("-").partition(".")
    if not (whole + fraction).isdigit():
        return text
    fraction = fraction.rstrip("0")
    return ("-" if text.startswith("-") else "") + (whole.lstrip("0") or "0") + ("." + fraction if fraction else "")
