"""A model folder may name its own code (auto_map), which runs only with trust_remote_code."""

import json
import shutil

import pytest

from rltrain.common.errors import ConfigError
from rltrain.data.chat import ChatEncoder
from rltrain.models.load import load_config

CODE = """
import pathlib
pathlib.Path({trace!r}).mkdir()
from transformers import PretrainedConfig, PreTrainedTokenizerFast
class Own(PretrainedConfig):
    model_type = "qwen3"
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def crafted(tiny_model, tmp_path):
    """crafted(model_type): return a copy of the model whose config and tokenizer name code that writes a file when it
    runs."""

    def crafted(model_type=None):
        folder = tmp_path / "crafted"
        shutil.copytree(tiny_model, folder)
        (folder / "own.py").write_text(CODE.format(trace=str(tmp_path / "it_ran")))
        for file, changes in (
            ("config.json", {"auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}),
            ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}),
        ):
            known = json.loads((folder / file).read_text()) | changes
            if model_type and file == "config.json":
                known["model_type"] = model_type
            (folder / file).write_text(json.dumps(known))
        return folder

    yield crafted
    assert not (tmp_path / "it_ran").exists()


def test_code_that_a_model_names_is_not_run(crafted):
    folder = crafted()
    assert load_config(str(folder)).model_type == "qwen3"
    assert ChatEncoder(str(folder)).tokenizer("1+1=?")["input_ids"]


def test_a_model_that_is_known_by_its_code_alone_is_refused(crafted):
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_config(str(crafted("unheard_of")))
