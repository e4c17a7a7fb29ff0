import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }} {{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant {% endif %}"
)


def make_row(index=0, **changes):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"what is {index} + 1 ?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(index + 1)},
        "extra_info": {"index": index, "split": "train"},
    }
    return {**row, **changes}


@pytest.fixture
def good_row():
    """Make a row that passes every check, with some fields replaced."""
    return make_row


@pytest.fixture
def write():
    """Write rows as parquet with page checksums; return the path as text."""

    def write_rows(path, rows):
        pq.write_table(pa.Table.from_pylist(rows), path, write_page_checksum=True)
        return str(path)

    return write_rows


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """A word-level tokenizer with a chat template, saved in transformers' format, created on demand."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<|start|>", "<|end|>", "<|stop|>", "<pad>", "user", "assistant", "system", "what", "is"]
    words += ["+", "?", *map(str, range(50))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", eos_token="<|end|>", pad_token="<pad>",
        additional_special_tokens=["<|start|>", "<|stop|>"],
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    return folder
