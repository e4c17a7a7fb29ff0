"""A Python interpreter for the policy: a fresh one for each call, in the jail of scored programs (docs/rewards.md).

Disabled unless ``rollout.multi_turn.allow_code_execution=True``. Nothing is kept between calls: a restarted
conversation gets the same results, and a program cannot affect the next one.
"""

from rltrain.common.errors import ConfigError
from rltrain.runtime.slots.limits import current_limits
from rltrain.runtime.slots.program import Ending, end_of_program, needs_programs

_MAX_CODE_CHARS = 65_536
# Characters of the output; the limit of a turn (multi_turn.max_tool_response_length) is usually lower.
_MAX_OUTPUT_CHARS = 100_000
# Share of a call's deadline; the rest is for ending processes and replying.
_SHARE_OF_DEADLINE = 0.8
# Runs as the program. As in a notebook, the last line shows its value, because models seldom print it. A traceback
# starts in the policy's code and goes to stdout. Prints are kept after a timeout.
_NOTEBOOK = """
import ast, linecache, sys, traceback
sys.stdout.reconfigure(line_buffering=True, errors="replace")
code = {code!r}
linecache.cache["answer.py"] = (len(code), None, code.splitlines(True), "answer.py")
try:
    tree = ast.parse(code, "answer.py")
    last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
    names = {{"__name__": "__main__", "exit": sys.exit, "quit": sys.exit}}
    exec(compile(tree, "answer.py", "exec"), names)
    exec(compile(ast.Interactive(last), "answer.py", "single"), names)
except SystemExit as error:
    if isinstance(error.code, str):
        print(error.code)
except BaseException as error:
    first = error.__traceback__.tb_next
    report = traceback.TracebackException(type(error), error, first)
    report.stack[:] = [frame for frame in report.stack if not frame.filename.endswith(("/jail.py", "/ast.py"))]
    print(*report.format(), sep="", end="")
"""


@needs_programs
def python(code: str) -> str:
    """Run a Python program and return what it prints, and the value of its last line.

    Args:
        code: A whole program, which may use the standard library; nothing is kept from earlier ones.
    """
    limits = current_limits()
    if not limits.allow_code_execution:
        raise ConfigError("programs are not run: actor_rollout_ref.rollout.multi_turn.allow_code_execution=False")
    program = _without_fence(str(code))
    if len(program) > _MAX_CODE_CHARS:
        return f"Error: a program has at most {_MAX_CODE_CHARS:,} characters."
    seconds = _SHARE_OF_DEADLINE * limits.timeout_s
    return _words(end_of_program(_NOTEBOOK.format(code=program), seconds=seconds), seconds)


def _without_fence(code: str) -> str:
    """Return the code inside three backticks, which a model may have written around its program."""
    inner = code.strip()
    if not inner.startswith("```"):
        return code
    _, _, rest = inner.partition("\n")
    return rest.removesuffix("```")


def _words(ending: Ending, seconds: float) -> str:
    output = ending.output[:_MAX_OUTPUT_CHARS].rstrip("\n")
    if ending.exit_code is None:
        return f"{output}\nError: the program was stopped after {seconds:g} s.".lstrip("\n")
    if ending.exit_code:
        return f"{output}\nError: the program has ended with exit code {ending.exit_code}.".lstrip("\n")
    return output or "(The program printed nothing.)"
