"""The launch scripts in examples/, each on its devices, with data from the converters and models of the real sizes
without weights. The memory of a device is estimated as for a user and listed in examples/README.md.
"""

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import DeepseekV3Config, Glm4MoeConfig, Qwen2Config, Qwen3MoeConfig

from rltrain.data_preprocess import geometry3k, virl39k
from rltrain.main_ppo import main
from rltrain.run import dry_run
from rltrain.run.preflight import models as preflight_models
from tests.tiny import save_tiny_tokenizer, write_arithmetic
from tests.tiny_tools import save_calling_tokenizer
from tests.tiny_vision import picture, save_tiny_vision_model

FOLDER = Path(__file__).parent.parent.parent / "examples"
# GiB of a device as reported by the driver.
ROOM = {"H100": 79.1, "H200": 139.8, "B300": 268.0, "910B": 60.9, "A3": 60.9}


def _sizes(
    width: int, mlp: int, layers: int, heads: int, of_keys: int, vocabulary: int, positions: int
) -> dict[str, int]:
    return {
        "hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": of_keys, "vocab_size": vocabulary, "max_position_embeddings": positions,
    }  # fmt: skip


# As in the config.json of each model.
TEXT = {
    "Qwen2.5-0.5B": Qwen2Config(**_sizes(896, 4864, 24, 14, 2, 151_936, 32_768), tie_word_embeddings=True),
    "Qwen2.5-7B": Qwen2Config(**_sizes(3584, 18_944, 28, 28, 4, 152_064, 32_768)),
    "Qwen2.5-32B": Qwen2Config(**_sizes(5120, 27_648, 64, 40, 8, 152_064, 32_768)),
    "R1-Distill-1.5B": Qwen2Config(**_sizes(1536, 8960, 28, 12, 2, 151_936, 131_072)),
    "R1-Distill-7B": Qwen2Config(**_sizes(3584, 18_944, 28, 28, 4, 152_064, 131_072)),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        **_sizes(2048, 6144, 48, 32, 4, 151_936, 40_960), head_dim=128, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True,
    ),
    # The first three layers of both are dense.
    "GLM-4.5": Glm4MoeConfig(
        **_sizes(5120, 12_288, 92, 96, 8, 151_552, 131_072), head_dim=128, moe_intermediate_size=1536,
        n_routed_experts=160, num_experts_per_tok=8, first_k_dense_replace=3, use_qk_norm=True, attention_bias=True,
    ),
    "DeepSeek-V3": DeepseekV3Config(**_sizes(7168, 18_432, 61, 128, 128, 129_280, 163_840)),
}  # fmt: skip
# Models whose chat template supports tools.
TOOLS = {
    "Qwen2.5-3B-tools": Qwen2Config(**_sizes(2048, 11_008, 36, 16, 2, 151_936, 32_768), tie_word_embeddings=True),
    "Qwen2.5-7B-tools": TEXT["Qwen2.5-7B"],
    "Qwen2.5-32B-tools": TEXT["Qwen2.5-32B"],
}
# The family of each, with the sizes of its text model and of its tower.
VISION = {
    "Qwen2.5-VL-3B": ("qwen2_5_vl", [16, 24, 24], _sizes(2048, 11_008, 36, 16, 2, 151_936, 128_000), {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048,
    }),
    "Qwen3-VL-30B-A3B": ("qwen3_vl_moe", [24, 20, 20], {
        **_sizes(2048, 6144, 48, 32, 4, 151_936, 262_144), "moe_intermediate_size": 768, "num_local_experts": 128,
        "num_experts_per_tok": 8,
    }, {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 2048,
    }),
    "Qwen3-VL-2B": ("qwen3_vl", [24, 20, 20], _sizes(2048, 6144, 28, 16, 8, 151_936, 262_144), {
        "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048,
    }),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A row of the table in examples/README.md: a script on nodes of one kind, and the GiB of its largest phases."""

    script: str
    nodes: int
    per_node: int
    chip: str
    generation: float
    training: float

    def __str__(self) -> str:
        return f"{Path(self.script).stem}-{self.chip}"


# Script -> its model and its data.
RECIPES = {
    "grpo_gsm8k_npu_8.sh": ("Qwen2.5-0.5B", "sums"),
    "ppo_gae_gsm8k_npu_8.sh": ("Qwen2.5-0.5B", "sums"),
    "math/qwen2_5_7b_grpo.sh": ("Qwen2.5-7B", "sums"),
    "math/qwen2_5_7b_dapo.sh": ("Qwen2.5-7B", "sums"),
    "math/qwen2_5_32b_grpo.sh": ("Qwen2.5-32B", "sums"),
    "math/qwen2_5_32b_dapo.sh": ("Qwen2.5-32B", "sums"),
    "math/qwen3_30b_a3b_grpo.sh": ("Qwen3-30B-A3B", "sums"),
    "math/qwen3_30b_a3b_dapo.sh": ("Qwen3-30B-A3B", "sums"),
    "math/qwen3_30b_a3b_grpo_npu.sh": ("Qwen3-30B-A3B", "sums"),
    "math/glm_4_5_grpo.sh": ("GLM-4.5", "sums"),
    "math/deepseek_v3_grpo.sh": ("DeepSeek-V3", "sums"),
    "grpo_7b_boba_64gpu.sh": ("R1-Distill-7B", "sums"),
    "grpo_1_5b_boba_8gpu.sh": ("R1-Distill-1.5B", "sums"),
    "agents/retool_qwen2_5_7b.sh": ("Qwen2.5-7B-tools", "sums"),
    "agents/retool_qwen2_5_7b_npu.sh": ("Qwen2.5-7B-tools", "sums"),
    "agents/retool_qwen2_5_32b.sh": ("Qwen2.5-32B-tools", "sums"),
    "agents/search_r1_qwen2_5_3b.sh": ("Qwen2.5-3B-tools", "sums"),
    "vlm_npu/qwen2_5_vl_3b_geometry3k_grpo.sh": ("Qwen2.5-VL-3B", "geometry3k"),
    "vlm_npu/qwen3_vl_2b_geometry3k_grpo.sh": ("Qwen3-VL-2B", "geometry3k"),
    "vlm_gpu/qwen3_vl_30b_a3b_geometry3k_grpo.sh": ("Qwen3-VL-30B-A3B", "geometry3k"),
    "vlm_npu/qwen3_vl_30b_a3b_geometry3k_grpo.sh": ("Qwen3-VL-30B-A3B", "geometry3k"),
    "vlm_npu/qwen2_5_vl_3b_virl39k_grpo_multinode.sh": ("Qwen2.5-VL-3B", "virl39k"),
}
_ROW = re.compile(r"^\| `(\S+\.sh)` \|.*\| (\d+) × (\d+) (\w+).*\| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)
ROWS = [
    Row(script, int(nodes), int(per_node), chip, float(generation), float(training))
    for script, nodes, per_node, chip, generation, training in _ROW.findall((FOLDER / "README.md").read_text())
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the data and, for each model, its configuration, its tokenizer and a weight file without
    weights."""
    folder = tmp_path_factory.mktemp("recipes")
    sources = {
        geometry3k: {"images": ["images/a.png"], "problem": "<image>Find x.", "answer": "7"},
        virl39k: {"image": ["images/a.png"] * 2, "question": "Which?", "answer": "\\boxed{A}", "category": "Charts"},
    }
    for convert, record in sources.items():
        name = convert.__name__.rpartition(".")[2]
        source = folder / f"{name}_source"
        (source / "images").mkdir(parents=True)
        picture(60, 900).save(source / "images" / "a.png")
        text = next(key for key in ("problem", "question") if key in record)
        for split, count in (("train", 530), ("test", 4)):
            rows = [record | {text: f"{record[text]} {number} {split}"} for number in range(count)]
            (source / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        assert convert.main(["--input", str(source), "--output", str(folder / name)]) == 0
    (folder / "sums").mkdir()
    for split, count in (("train", 1100), ("test", 4)):
        write_arithmetic(folder / "sums" / f"{split}.parquet", range(count))
    for name, config in (TEXT | TOOLS).items():
        (save_calling_tokenizer if name in TOOLS else save_tiny_tokenizer)(folder / name)
        config.update({"eos_token_id": 1, "bos_token_id": None})
        config.save_pretrained(folder / name)
        save_file({"nothing": torch.zeros(1)}, folder / name / "model.safetensors")
    for name, (family, sections, of_text, of_tower) in VISION.items():
        save_tiny_vision_model(folder / name, family, tied="A3B" not in name)
        config = json.loads((folder / name / "config.json").read_text())
        config["text_config"] |= of_text | {"head_dim": 128}
        config["text_config"].pop("layer_types", None)
        config["text_config"]["rope_parameters"]["mrope_section"] = sections
        config["vision_config"] |= of_tower
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def typed(tmp_path, made):
    """typed(row, *more): return the arguments that a script passes to ``rltrain.main_ppo``."""
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)

    def start(row: Row, *more: str) -> list[str]:
        model, data = RECIPES[row.script]
        environment = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "NNODES": str(row.nodes), "MODEL": str(made / model),
            "DATA": str(made / data), "VAL": str(made / data.replace("virl39k", "geometry3k") / "test.parquet"),
        }  # fmt: skip
        words = [f"trainer.n_gpus_per_node={row.per_node}", f"trainer.device_memory_gb={ROOM[row.chip]}"]
        words += [f"trainer.default_local_dir={tmp_path / 'run'}", *more]
        process = subprocess.run(
            ["bash", FOLDER / row.script, *words], capture_output=True, text=True, check=True, env=environment
        )
        option, module, *arguments = process.stdout.splitlines()
        assert (option, module) == ("-m", "rltrain.main_ppo")
        return arguments

    return start


@pytest.fixture
def dry(typed, of_another_machine, monkeypatch, capsys):
    """dry(row, *more): return exit code and text of the script's dry run on its devices."""
    monkeypatch.setattr(dry_run, "missing_room", lambda *_: ("", ""))
    # For models only the configuration exists.
    monkeypatch.setattr(preflight_models, "check_weight_files", lambda *_: [])

    def start(row: Row, *more: str) -> tuple[int, str]:
        code = main(typed(row, *more, "--dry-run"))
        out, error = capsys.readouterr()
        assert error == "", out
        return code, out

    return start


@pytest.fixture
def without_memory(monkeypatch):
    """Without the memory estimate, which takes seconds."""
    monkeypatch.setattr(dry_run, "check_memory", lambda *_: ([], ""))


def the_row(stem: str) -> Row:
    return next(row for row in ROWS if str(row) == stem)


@pytest.mark.few(5)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_recipe_would_run_on_its_devices(row, dry, without_memory):
    code, out = dry(row)
    assert code == 0, out
    assert f"{row.nodes} x {row.per_node} = {row.nodes * row.per_node} " in out
    # Every key of a recipe has an effect, and its data has no problem for a run.
    assert "no effect" not in out
    if RECIPES[row.script][1] != "sums":
        assert "nothing found" in out


# tests/trainer/test_memory.py tests the estimate.
@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_recipe_needs_what_the_table_says(row, dry):
    code, out = dry(row)
    assert code == 0, out
    together = {
        line.split()[0]: float(line.split()[-1]) for line in out.splitlines() if re.match(r"  \w+ +\d+\.\d+ ", line)
    }
    generation, training = together["gen"], max(together[each] for each in together if each.startswith("update_"))
    assert (generation, training) == pytest.approx((row.generation, row.training), abs=0.051)


def test_a_vllm_ascend_that_cannot_load_experts_is_refused(dry, without_memory, monkeypatch, tmp_path):
    row = the_row("qwen3_30b_a3b_grpo_npu-A3")
    package = tmp_path / "packages" / "vllm_ascend-0.23.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-ascend\nVersion: 0.23.0\n")
    monkeypatch.syspath_prepend(package.parent)
    code, out = dry(row)
    assert code == 2
    assert "rollout.name=vllm with vllm-ascend 0.23.0 cannot load new experts" in out
    assert "Install vllm-ascend 0.26 or later" in out


def test_every_script_of_the_folder_is_in_the_table():
    scripts = {str(file.relative_to(FOLDER)) for file in FOLDER.rglob("*.sh") if not file.name.endswith("_cpu.sh")}
    assert scripts == {row.script for row in ROWS} == set(RECIPES)
