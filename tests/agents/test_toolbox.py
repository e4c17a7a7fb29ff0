"""The list of a run's tools, and the tools of one trajectory: the instance of a class, and the state of
verl's tools."""

import asyncio
import pickle

import pytest

from rltrain.agents.toolbox import Toolbox, ToolSources
from rltrain.common.errors import ConfigError

ADD = '''
def add(a: int, b: int = 0) -> str:
    """Add two numbers.

    Args:
        a: One of them.
        b: The other.
    """
    return str(a + b)
'''
SHOP = '''
import rltrain

class Base:
    def balance(self) -> str:
        """Tell what is left."""
        return str(self.money)

class Shop(Base):
    closed = []

    def __init__(self, money=10, names=None):
        self.money, self.names = money, names if names is not None else []

    def reset(self, row, seed):
        self.money += row["extra_info"]["more"]
        self.seed = seed

    async def buy(self, item: str, price: int):
        """Buy something.

        Args:
            item: Its name.
            price: In coins.
        """
        if price > self.money:
            raise ValueError("too dear")
        self.money -= price
        self.names.append(item)
        return {"bought": self.names}, 0.5, {"price": price}

    def score(self):
        return float(self.money)

    def close(self):
        Shop.closed.append(self.seed)

    def _check(self): pass
'''
GUESS = "class Guess:\n    def step(self, text): return 'higher', 0.0, False\n    def helper(self): pass\n"
TOOLS = '''
import asyncio
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

class Notes(BaseTool):
    """Keeps what it is told, as long as the trajectory lasts."""
    created, released, objects = [], [], 0

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        Notes.objects += 1
        self.notes = {}

    async def create(self, instance_id=None, **kwargs):
        from verl.tools.schemas import ToolResponse as Again
        await asyncio.sleep(0.01)
        instance_id, said = await super().create(instance_id)
        assert isinstance(said, Again)
        self.notes[instance_id] = [kwargs["create_kwargs"].get("first", "-")]
        Notes.created.append(instance_id)
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        self.notes[instance_id].append(parameters["text"] + kwargs.get("mark", ""))
        fields = kwargs["agent_data"].extra_fields
        fields["calls"] = fields.get("calls", 0) + 1
        return ToolResponse(text=self.config["sign"].join(self.notes[instance_id])), 0.25, {"calls": fields["calls"]}

    async def calc_reward(self, instance_id, **kwargs):
        raise AssertionError("nobody asks")

    async def release(self, instance_id, **kwargs):
        Notes.released.append(instance_id)
        del self.notes[instance_id]

class Named(BaseTool):
    """As classes of older versions: names its arguments, blocks, returns a bare text, and has a schema of its own."""
    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {
            "name": "named", "description": "N.", "parameters": {"type": "object", "properties": {}}}})

    def create(self, instance_id=None, ground_truth=None):
        self.truth = ground_truth
        return "the only one"

    def execute(self, instance_id, parameters):
        return f"{instance_id} {self.truth}", 0.0, {}
'''
CONFIG = """
tools:
  - class_name: {folder}/tools_of_verl.py:Notes
    config: {{type: native, sign: "+"}}
    tool_schema:
      type: function
      function:
        name: note
        description: Note something.
        parameters:
          type: object
          properties:
            text: {{type: string, description: What}}
          required: [text]
  - class_name: {folder}/tools_of_verl.py:Named
    config: {{}}
"""
ROW = {"data_source": "s", "ground_truth": "4", "extra_info": {"more": 5}}


@pytest.fixture
def places(tmp_path):
    """places(functions=..., ...): create files with these texts."""
    (tmp_path / "tools_of_verl.py").write_text(TOOLS)

    def write(functions=None, tool_config=None, environment=None, **kwargs):
        found = {}
        for key, text, name in (
            ("functions", functions, "tools.py"),
            ("tool_config", tool_config, "tools.yaml"),
            ("environment", environment, "shop.py"),
        ):
            if text is not None:
                (tmp_path / name).write_text(text.format(folder=tmp_path) if key == "tool_config" else text)
                found[key] = str(tmp_path / name)
        if environment is not None:
            kind = environment.rpartition("class ")[2].partition(":")[0].partition("(")[0]
            found["environment"] += f":{kind}"
        return ToolSources(**found, environment_kwargs=kwargs)

    return write


def conversation(toolbox, *calls, row=ROW, seed=7):
    """Return the results of successive calls in a separate trajectory."""

    async def run():
        session = await toolbox.open(row, seed)
        try:
            return [await session.call(name, arguments) for name, arguments in calls]
        finally:
            await session.close()

    return asyncio.run(run())


def test_tools_of_all_places_are_one_list_in_order(places):
    box = Toolbox(pickle.loads(pickle.dumps(places(ADD, CONFIG, SHOP))))
    assert box.names == ["add", "note", "named", "balance", "buy"]
    assert [schema["function"]["name"] for schema in box.schemas] == box.names
    assert box.schemas[1]["function"]["parameters"]["required"] == ["text"]
    assert box.schemas[4]["function"]["parameters"]["properties"].keys() == {"item", "price"}
    assert not box.has_step
    assert Toolbox(ToolSources()).schemas == []


def test_a_name_in_two_places_is_refused_with_both(places):
    with pytest.raises(ConfigError, match=r"'note' is in .*function_tool_path=.* and in .*tool_config_path="):
        Toolbox(places(ADD.replace("add", "note"), CONFIG))
    with pytest.raises(ConfigError, match=r"'buy' is in .*function_tool_path=.* and in .*environment=.*:Shop"):
        Toolbox(places(ADD.replace("add", "buy"), None, SHOP))


def test_each_trajectory_has_an_instance_that_is_reset_and_closed(places):
    names: list[str] = []
    box = Toolbox(places(None, None, SHOP, money=3, names=names))
    said = conversation(box, ("buy", {"item": "ox", "price": 6}), ("balance", {}))
    assert said[0] == {"content": '{"bought": ["ox"]}', "reward": 0.5, "metrics": {"price": 6}}
    assert said[1]["content"] == "2"
    assert conversation(box, ("buy", {"item": "ass", "price": 1}), seed=8)[0]["content"] == '{"bought": ["ass"]}'
    assert names == [], "arguments are copied for each"

    async def instances():
        first, second = await box.open(ROW, 1), await box.open(ROW, 2)
        shop = first.environment
        assert shop is not second.environment
        assert (shop.score(), shop.seed, shop.money) == (8.0, 1, 8)
        await first.close()
        await first.close()
        await second.close()
        return type(shop).closed

    assert asyncio.run(instances()) == [7, 8, 1, 2]


def test_an_environment_with_step_has_no_tools(places):
    box = Toolbox(places(None, None, GUESS))
    assert box.has_step
    assert box.schemas == []
    with pytest.raises(LookupError, match="there is no tool 'step'"):
        conversation(box, ("step", {"text": "5"}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            f"from rltrain import tool\n{GUESS}".replace("    def helper", "    @tool\n    def helper"),
            "helper would never be called",
        ),
        ("class Empty:\n    def reset(self, row, seed): pass\n", "neither step nor public methods"),
        ("class Bad:\n    def use(self, x): pass\n", "use has no schema for the model"),
        ("import nowhere\nclass Shop: pass", "cannot be imported"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_with_the_key(places, text, words):
    with pytest.raises(ConfigError, match=words) as refusal:
        _ = Toolbox(places(None, None, text)).schemas
    assert "multi_turn.environment=" in str(refusal.value)


def test_marked_methods_are_tools(places):
    marked = SHOP.replace("    async def buy", "    @rltrain.tool(name='purchase')\n    async def buy")
    box = Toolbox(places(None, None, marked))
    assert box.names == ["purchase"]
    assert conversation(box, ("purchase", {"item": "ox", "price": 1}))[0]["reward"] == 0.5


def test_tool_errors_are_raised_and_the_instance_is_closed(places, caplog):
    box = Toolbox(places(ADD, None, SHOP))
    for call, error, words in (
        (("sell", {}), LookupError, "there is no tool 'sell'; the tools are add, balance, buy"),
        (("add", {"a": 1, "c": 1}), TypeError, "unexpected keyword argument 'c'"),
        (("buy", {"item": "ox", "price": 99}), ValueError, "too dear"),
    ):
        with pytest.raises(error, match=words):
            conversation(box, call, seed=words)
    with pytest.raises(KeyError, match="more"):
        asyncio.run(box.open({"extra_info": {}}, 1))
    assert "close of Shop raised" in caplog.text, "it has no seed yet"


def test_close_never_raises(places, caplog):
    text = SHOP.replace("Shop.closed.append(self.seed)", "raise SystemExit(4)")
    assert conversation(Toolbox(places(None, None, text)), ("balance", {}))[0]["content"] == "15"
    assert "SystemExit: 4" in caplog.text


def test_a_row_may_have_some_of_the_tools_alone(places):
    box = Toolbox(places(ADD, CONFIG))
    row = ROW | {"extra_info": {"tool_selection": ["note"]}}
    assert conversation(box, ("note", {"text": "x"}), row=row)[0]["content"] == "-+x"
    with pytest.raises(LookupError, match="there is no tool 'add'; the tools are note"):
        conversation(box, ("add", {"a": 1}), row=row)
    for none in (None, []):
        assert conversation(box, ("add", {"a": 1}), row={"extra_info": {"tool_selection": none}})[0]["content"] == "1"


def test_a_tool_of_verls_is_created_once_a_trajectory_and_released_at_its_end(places):
    box = Toolbox(places(None, CONFIG))
    kind = box.configured["note"].kind
    assert kind.objects == 0, "schemas need no object where the file has them"
    kwargs = {"create_kwargs": {"first": "1"}, "execute_kwargs": {"mark": "!"}}
    row = {"extra_info": {"tools_kwargs": {"note": kwargs, "named": {"create_kwargs": {"ground_truth": "4"}}}}}
    said = conversation(box, ("note", {"text": "a"}), ("note", {"text": "b"}), ("named", {}), row=row)
    assert said[1] == {"content": "1+a!+b!", "reward": 0.25, "metrics": {"calls": 2}}
    assert said[2]["content"] == "the only one 4"
    assert conversation(box, ("note", {"text": "c"}))[0] == {"content": "-+c", "reward": 0.25, "metrics": {"calls": 1}}
    conversation(box)
    assert kind.objects == 1
    assert len(kind.created) == 2
    assert kind.released == kind.created


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tools: [", "cannot be read"),
        ("tools: []", "has no list of tools"),
        (
            "tools: [{{class_name: a.B, config: {{type: mcp}}}}]",
            "type=mcp: only native tools .* call the server in a function",
        ),
        ("tools: [{{class_name: nowhere.B, config: {{type: native}}}}]", "No module named 'nowhere'"),
        ("tools: [{{class_name: verl.tools.search_tool.SearchTool, config: {{}}}}]", "install a version of verl"),
        ("tools: [{{class_name: json.JSONDecoder, config: {{}}}}]", "the class has no method `execute`"),
        (CONFIG.replace("name: note", "nick: note"), r"tools\[0\].tool_schema: its schema must be"),
        (
            CONFIG.replace("Named", "Notes"),
            r"tools\[1\] has no tool_schema, and its class raised:(.|\n)*Notes has no schema",
        ),
        (CONFIG.replace("name: note", "name: named"), "has two tools 'named'"),
    ],
)
def test_unusable_tool_yaml_error(places, text, words):
    with pytest.raises(ConfigError, match=words) as refusal:
        Toolbox(places(None, text))
    assert "multi_turn.tool_config_path=" in str(refusal.value)
