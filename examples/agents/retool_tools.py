"""The interpreter under the name and argument that models trained on ReTool-SFT call."""

from rltrain.agents.ready import python
from rltrain.runtime.slots.program import needs_programs


@needs_programs
def code_interpreter(code: str) -> str:
    """A tool for executing code.

    Args:
        code: The code to execute.
    """
    return python.python(code)
