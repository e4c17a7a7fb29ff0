"""The built-in tools and environments, named as in a run: loaded by module or class, shown to the model, called."""

import asyncio
import json
from pathlib import Path

import pytest

from rltrain.agents.toolbox import Toolbox, ToolSources
from rltrain.common.errors import ConfigError, DataError

ROOT = Path(__file__).parents[3]
READY = "rltrain.agents.ready."
BOTH = """
from rltrain import tool
from rltrain.agents.ready.calculator import calculator
from rltrain.agents.ready.python import python

tool(calculator)
tool(python)
"""


def shown(box):
    return {schema["function"]["name"]: list(schema["function"]["parameters"]["properties"]) for schema in box.schemas}


@pytest.mark.parametrize(
    ("name", "tools"), [("calculator", {"calculator": ["expression"]}), ("python", {"python": ["code"]})]
)
def test_a_module_holds_one_tool(name, tools):
    assert shown(Toolbox(ToolSources(functions=READY + name))) == tools


def test_several_ready_tools_in_one_file(tmp_path):
    (tmp_path / "tools.py").write_text(BOTH)
    box = Toolbox(ToolSources(functions=str(tmp_path / "tools.py")))
    assert shown(box) == {"calculator": ["expression"], "python": ["code"]}


def test_the_interpreter_of_retool_is_called_as_its_models_learnt_and_asks_for_leave():
    box = Toolbox(ToolSources(functions=str(ROOT / "examples" / "agents" / "retool_tools.py")))
    assert shown(box) == {"code_interpreter": ["code"]}
    with pytest.raises(ConfigError, match=r"'code_interpreter' runs programs .*allow_code_execution=True"):
        box.check_programs(allowed=False, unsandboxed=False)


def test_each_trajectory_searches_the_corpus_of_the_run(tmp_path):
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"title": "Oslo", "text": "Oslo is the capital of Norway."}))

    async def asked(**kwargs):
        box = Toolbox(ToolSources(environment=READY + "search:Search", environment_kwargs=kwargs))
        assert shown(box) == {"search": ["query"]}
        sessions = [await box.open({"extra_info": {}}, seed) for seed in range(4)]
        told = await asyncio.gather(*(each.call("search", {"query": "capital of Norway?"}) for each in sessions))
        for each in sessions:
            await each.close()
        return {said["content"] for said in told}

    found = asyncio.run(asked(corpus=str(tmp_path / "corpus.jsonl"), topk=2))
    assert found == {"Doc 1(Title: Oslo) Oslo is the capital of Norway."}
    with pytest.raises(DataError, match="the file does not exist"):
        asyncio.run(asked(corpus=str(tmp_path / "other.jsonl")))
