"""Competition maths (Hendrycks et al. 2021): the last ``\\boxed{}``, compared as normalised LaTeX text.

Left out: algebraic equality (``x+1`` is not ``1+x`` here). Use math-verify in a custom_reward_function for that.
"""

from typing import Any

from rltrain.rewards.registry import scorer

_MAX_BOX_CHARS = 512
_TAIL_CHARS = 4096

_REMOVED = ("\\!", "\\,", "\\;", "\\:", "\\left", "\\right", "^{\\circ}", "^\\circ", "\\$", "$", "\\%", "%", "~")
_RENAMED = (
    ("\\tfrac", "\\frac"),
    ("\\dfrac", "\\frac"),
    ("\\cfrac", "\\frac"),
    ("\\neq", "\\ne"),
    ("\\leq", "\\le"),
    ("\\geq", "\\ge"),
)


def last_boxed(solution: str) -> str | None:
    """What the last ``\\boxed{}`` or ``\\fbox{}`` holds, braces counted; None if it never closes or is too long."""
    start = max(solution.rfind("\\boxed{"), solution.rfind("\\fbox{"))
    if start < 0:
        return None
    opening = solution.index("{", start)
    depth = 0
    for position in range(opening, min(len(solution), opening + _MAX_BOX_CHARS + 2)):
        depth += {"{": 1, "}": -1}.get(solution[position], 0)
        if depth == 0:
            return solution[opening + 1 : position]
    return None


def normalise(text: str) -> str:
    """One spelling for answers that are typeset differently: spaces, units, ``\\dfrac``, ``\\frac12``, ``1/2``, ``.5``."""
    text = _without_unit(text.replace("\n", ""))
    for old, new in _RENAMED:
        text = text.replace(old, new)
    for removed in _REMOVED:
        text = text.replace(removed, "")
    text = _without_text_wrapper(text.strip()).rstrip(".")
    name, equals, value = text.partition("=")
    if equals and len(name.strip()) <= 2 and "=" not in value:  # "x = 5" answers "5"
        text = value
    text = _braced(_braced(text, "\\frac", 2), "\\sqrt", 1).replace(" ", "")
    return _number(text)


@scorer("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
def math_boxed(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 if the last box holds the ground truth up to typesetting, else 0."""
    answer = last_boxed(solution_str[-_TAIL_CHARS:])
    truth = str(ground_truth)
    boxed_truth = last_boxed(truth)
    return float(answer is not None and normalise(answer) == normalise(truth if boxed_truth is None else boxed_truth))


def _without_unit(text: str) -> str:
    """``5\\text{ cm}`` is 5: what follows a number as text."""
    cut = text.find("\\text{")
    if cut < 0:
        cut = text.find("\\mbox{")
    return text[:cut] if cut > 0 and text[:cut].strip()[-1:].isdigit() else text


def _without_text_wrapper(text: str) -> str:
    for wrapper in ("\\text{", "\\mathrm{", "\\textbf{", "\\mathbf{", "\\mbox{"):
        if text.startswith(wrapper) and text.endswith("}") and text.count("{") == 1:
            return text[len(wrapper) : -1].strip()
    return text


def _braced(text: str, command: str, num_arguments: int) -> str:
    """Braces around one-character arguments: ``\\frac12`` to ``\\frac{1}{2}``, ``\\sqrt3`` to ``\\sqrt{3}``."""
    head, *pieces = text.split(command)
    return head + "".join(command + _brace_arguments(piece, num_arguments) for piece in pieces)


def _brace_arguments(piece: str, num_arguments: int) -> str:
    done, position = [], 0
    for _ in range(num_arguments):
        while position < len(piece) and piece[position] == " ":
            position += 1
        if position >= len(piece) or not piece[position].isalnum():
            break  # already braced (nested braces are left alone), or an optional argument
        done.append("{" + piece[position] + "}")
        position += 1
    return "".join(done) + piece[position:]


def _number(text: str) -> str:
    """``1,000`` to ``1000``, ``0.50`` to ``.5``'s spelling ``0.5``, and ``1/2`` to ``\\frac{1}{2}``."""
    upper, slash, lower = text.partition("/")
    sign = "-" if upper.startswith("-") else ""
    if slash and upper.removeprefix("-").isdigit() and lower.isdigit():
        return f"{sign}\\frac{{{upper.removeprefix('-')}}}{{{lower}}}"
    digits = text.removeprefix("-")
    groups = digits.split(".")[0].split(",")
    if len(groups) > 1 and 1 <= len(groups[0]) <= 3 and all(len(group) == 3 for group in groups[1:]):
        digits = digits.replace(",", "")
    whole, _, fraction = digits.partition(".")
    if not (whole + fraction).isdigit():
        return text
    fraction = fraction.rstrip("0")
    return ("-" if text.startswith("-") else "") + (whole.lstrip("0") or "0") + ("." + fraction if fraction else "")
