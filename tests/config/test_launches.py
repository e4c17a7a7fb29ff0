"""Recorded launches of public verl scripts in ``--dry-run``: which ones run, and why the others do not."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from transformers import AutoConfig

from rltrain.main_ppo import main
from rltrain.run import dry_run
from tests.images import RED
from tests.tiny import save_tiny_adapter, save_tiny_model, save_tiny_reward_model, write_arithmetic
from tests.tiny_tools import save_calling_model
from tests.tiny_vision import FAMILIES, WITH_EXPERTS, save_tiny_vision_model

FOLDER = Path(__file__).parent / "launches"
EXAMPLES = "HOME/verl/examples/sglang_multiturn/config"
# The settings in which the example files named by launches differ from the defaults.
CONFIG = """
defaults:
  - ppo_trainer
  - _self_
actor_rollout_ref:
  rollout:
    name: sglang
    multi_turn: {{enable: true, max_assistant_turns: {turns}{more}}}
"""
TOOLS = """
from verl.tools.base_tool import BaseTool, OpenAIFunctionToolSchema, ToolResponse

class Tool(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="4"), 0.0, {}

class CustomRLHFDataset:
    def __init__(self, data_files, tokenizer, processor, config, max_samples=-1):
        self.config = config

    def __len__(self):
        return 5000

    def __getitem__(self, row):
        messages = [{"role": "user", "content": f"{row}+1=?"}]
        reward = {"ground_truth": str(row + 1), "style": "rule"}
        return {"data_source": "arithmetic", "prompt": messages, "reward_model": reward, "agent_name": "tool_agent"}
"""
TOOL_CONFIG = """
tools:
  - class_name: {code}:Tool
    config: {{type: native}}
    tool_schema: {{type: function, function: {{name: tool, description: A tool., parameters: {{
      type: object, properties: {{answer: {{type: string, description: A number.}}}}, required: [answer]}}}}}}
"""
MODELS = ("actor_rollout_ref.model.path", "critic.model.path", "distillation.teacher_models.teacher_model.model_path")
# Part of a model's name -> its model_type; the first match counts.
KINDS = {
    "Qwen2-VL": "qwen2_vl", "Qwen2.5-VL": "qwen2_5_vl", "Qwen3-VL-30B": "qwen3_vl_moe", "Qwen3-VL": "qwen3_vl",
    "Qwen3.5-35B": "qwen3_5_moe", "Qwen3.5": "qwen3_5",
    "InternVL": "internvl", "GLM-4.1V": "glm4v", "Mistral-Small-3.1": "mistral3",
}  # fmt: skip
# Models of a refused family need only a configuration.
SMALL = {"hidden_size": 64, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 16, "num_key_value_heads": 16}


@dataclass(frozen=True)
class Launch:
    name: str
    version: str
    kind: str
    outcome: str
    words: tuple[str, ...]


def recorded() -> list[Launch]:
    launches = []
    for file in sorted(FOLDER.glob("*.txt")):
        for block in file.read_text().strip().split("\n\n"):
            name, about, outcome, *words = block.splitlines()
            version, kind = about[2:].split(", ")
            launches.append(Launch(name[2:], version, kind, outcome[2:], tuple(words)))
    return launches


LAUNCHES = recorded()


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """Map each key to a replacement for its value in a launch."""
    folder = tmp_path_factory.mktemp("launches")
    model = save_tiny_model(folder / "model", heads=16, kv_heads=16, positions=131_072)
    data = write_arithmetic(folder / "data.parquet", range(5000))
    code = folder / "code.py"
    score = "{'score': 1.0, 'acc': 1.0, 'accuracy_reward': 1.0, 'format_reward': 1.0}"
    names = ("compute_score", "my_reward_function", "char_count_reward_function", "compute_score_fapo")
    code.write_text("".join(f"def {name}(*rest, **named):\n    return {score}\n" for name in names))
    judges = ("reward_model.model.path", "reward_model.model_path", "reward.reward_model.model_path")
    codes = ("custom_reward_function.path", "reward.custom_reward_function.path")
    adapter = save_tiny_adapter(folder / "adapter", model)
    folders = {"trainer.default_local_dir": folder / "run", "actor_rollout_ref.model.lora_adapter_path": adapter}
    files = {("data.train_files", "data.val_files"): data, codes: code, MODELS: model,
             judges: save_tiny_reward_model(folder / "judge", heads=16)}  # fmt: skip
    return folders | {key: instead for keys, instead in files.items() for key in keys}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """seeing(launch): return replacements for models and files of a launch with images."""
    folder = tmp_path_factory.mktemp("seeing")
    data = write_arithmetic(folder / "data.parquet", range(5000), "hiyouga/geometry3k", image=RED)

    @cache
    def model(kind: str) -> Path:
        family = kind if kind in (*FAMILIES, *WITH_EXPERTS) else "qwen3_vl"
        sizes = {"heads": 16, "kv_heads": 16, "positions": 131_072}
        path = save_tiny_vision_model(folder / kind, family, tied=False, **sizes)
        if kind != family:  # refused before other files of the folder are read
            text = {"model_type": "mistral"} if kind == "mistral3" else {}
            AutoConfig.for_model(kind, text_config=SMALL | text, vision_config=SMALL).save_pretrained(path)
        return path

    def make(launch: Launch) -> dict[str, Path]:
        settings = dict(word.partition("=")[::2] for word in launch.words)
        name = settings["actor_rollout_ref.model.path"]
        return dict.fromkeys(("data.train_files", "data.val_files"), data) | dict.fromkeys(
            MODELS, model(next(kind for part, kind in KINDS.items() if part in name))
        )

    return make


@pytest.fixture(scope="module")
def calling(tmp_path_factory):
    """Replacements for models and files of a launch with tools, and for the folder of their configurations."""
    folder = tmp_path_factory.mktemp("calling")
    (folder / "gsm8k_multiturn_grpo.yaml").write_text(CONFIG.format(turns=5, more=""))
    (folder / "geo3k_multiturn_grpo.yaml").write_text(CONFIG.format(turns=5, more=""))
    (folder / "search_multiturn_grpo.yaml").write_text(CONFIG.format(turns=4, more=", format: qwen"))
    code, tools = folder / "dataset.py", folder / "tools.yaml"
    code.write_text(TOOLS)
    tools.write_text(TOOL_CONFIG.format(code=code))
    model = save_calling_model(folder / "model", heads=16, kv_heads=16, positions=131_072)
    return folder, dict.fromkeys(MODELS, model) | {
        "data.custom_cls.path": code,
        "actor_rollout_ref.rollout.multi_turn.tool_config_path": tools,
    }


@pytest.fixture
def walk(stand_ins, seeing, calling, of_another_machine, monkeypatch, capsys):
    """walk(launch): return None, or the text of the error."""
    # Rows and reward functions are replacements, so problems with them do not concern the launch.
    for name in ("try_reward", "_check_rows"):
        monkeypatch.setattr(dry_run, name, lambda *_: [])
    # The same holds for the memory of tiny models; tests/config/test_recipes.py estimates that of models of the real
    # sizes.
    monkeypatch.setattr(dry_run, "check_memory", lambda *_: ([], ""))

    def run(launch: Launch) -> str | None:
        settings = [word.lstrip("+").partition("=") for word in launch.words]
        configs, tools = calling
        replaced = stand_ins | tools if launch.kind != "text" else stand_ins
        replaced |= seeing(launch) if launch.kind == "images" else {}
        words = [word.replace(EXAMPLES, str(configs)) if word.startswith("--") else word for word in launch.words]
        instead = [f"{key}={replaced[key]}" for key, _, value in settings if key in replaced and value != "null"]
        # A script that names no number was written for verl's default.
        devices = [] if any("n_gpus_per_node=" in word for word in launch.words) else ["trainer.n_gpus_per_node=8"]
        code = main([*words, *instead, *devices, "--dry-run"])
        out, error = capsys.readouterr()
        assert code in (0, 2), error
        return None if code == 0 else error + out[out.find("a run would refuse") :]

    return run


@pytest.mark.few(20)
@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: f"{launch.version}-{launch.name}")
def test_a_recorded_launch_ends_as_recorded(launch, walk):
    refusal = walk(launch)
    expected, _, words = launch.outcome.partition(": ")
    if expected == "runs":
        assert refusal is None
    else:
        assert expected in ("refused", "not yet")
        assert refusal is not None, "it runs now: say so in its block"
        assert words in refusal


@pytest.mark.parametrize(("kind", "least"), [("text", 60), ("images", 15), ("tools", 15)])
def test_every_launch_runs_that_no_decision_refuses(kind, least):
    ends = [launch.outcome.partition(":")[0] for launch in LAUNCHES if launch.kind == kind]
    assert len(ends) >= least
    assert {*ends} <= {"runs", "refused"}
