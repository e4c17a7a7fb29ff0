"""The interpreter under the name and argument that models trained on ReTool-SFT call: code_interpreter(code)."""

from rltrain import tool
from rltrain.agents.ready.python import python

tool(python, name="code_interpreter")
