"""Dataset and sampler classes written for verl."""

import textwrap

import numpy as np
import pytest

from rltrain.common.errors import ConfigError, DataError
from rltrain.config.schema import DataConfig, SamplerConfig
from rltrain.data.batch_sampler import BatchOrder
from rltrain.data.custom import custom_rows
from rltrain.data.rows import read_rows
from rltrain.data.sampler import make_sampler

GOOD = """
    import numpy as np

    class Made:
        def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
            self.config, self.tokenizer, self.files = config, tokenizer, data_files
            self.number = config.get("number", 6) if max_samples < 0 else max_samples

        def __len__(self):
            return self.number

        def __getitem__(self, item):
            return {
                "data_source": "openai/gsm8k",
                "raw_prompt": np.array([{"role": "user", "content": f"what is {item} + 1 ?"}], dtype=object),
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": np.str_(item + 1)},
                "extra_info": {"index": np.int64(item), "split": "train"},
                "dummy_tensor": object(),
            }
"""


def written(file, code, name):
    """Return the setting that names a class of this code."""
    file.write_text(textwrap.dedent(code))
    return f"{file}:{name}"


def refusal(code, old, new, use):
    """Return the error of ``use`` for the code with a part of it replaced."""
    assert old in code
    with pytest.raises((ConfigError, DataError)) as caught:
        use(code.replace(old, new))
    return str(caught.value)


@pytest.fixture
def made(tmp_path):
    """Return the rows that a file's class creates."""

    def make(code, max_rows=-1, **data):
        cfg = DataConfig(custom_cls=written(tmp_path / "mine.py", code, "Made"), **data)
        return custom_rows(cfg, ["any.jsonl"], "the tokenizer", max_rows)

    return make


def test_a_class_makes_the_rows_that_a_file_would_hold(made, tmp_path, write, good_row):
    rows = made(GOOD)
    file = read_rows(write(tmp_path / "same.parquet", [good_row(i) for i in range(6)]))
    assert list(rows) == list(file)
    assert rows.fingerprint() == file.fingerprint()
    assert rows.data_sources() == {"openai/gsm8k": 0}
    assert rows.images(0) == []
    assert rows.origin(3).endswith("mine.py:Made of any.jsonl' row 3")
    assert len(made(GOOD, max_rows=2)) == 2


def test_the_class_reads_its_config_as_in_verl(made):
    body = 'config.number if config.sampler.get("group_key") == "domain" and config.image_key == "images" else 0'
    code = GOOD.replace('config.get("number", 6) if max_samples < 0 else max_samples', body)
    own = {"number": 3, "sampler": {"group_key": "domain"}}
    assert len(made(code, own_keys=own)) == 3


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("class Made", "class Other", "has no function 'Made'; it defines Other"),
        ("processor=None", "processor, env_url", "the class needs env_url; it gets data_files, tokenizer"),
        ("def __len__", "def length", "has no __len__: a dataset class needs both"),
        ("def __len__", "def on_batch_end(self, batch): ...\n        def __len__", "rows are read once"),
        ("self.files = config", "self.files = 1 / 0", "ZeroDivisionError"),
        ("return {", "return [item] or {", "row 0 is a list; it must be a dictionary"),
        ("return {", "return item / 0 or {", "row 0:\nTraceback"),
        ('"raw_prompt"', '"input_ids"', "neither 'raw_prompt' nor 'prompt'; it has data_source, input_ids"),
        ('"raw_prompt": np', '"images": [b"x"], "raw_prompt": np', "row 0: field 'images[0]': it cannot be read"),
        ('"raw_prompt": np', '"videos": [b"x"], "raw_prompt": np', "row 0 holds videos: only images are supported"),
        ('"split": "train"', '"split": object()', "extra_info.split is a object; a row may hold texts"),
        ('config.get("number", 6)', "0", "no usable row in data.custom_cls="),
    ],
)
def test_unusable_dataset_class_error(made, old, new, said):
    message = refusal(GOOD, old, new, made)
    assert said in message
    assert "data.custom_cls=" in message


SAMPLER = """
    class Down:
        def __init__(self, data_source, data_config):
            assert data_source[1]["extra_info"]["index"] == 1 and len(data_source.dataframe["data_source"]) == 6
            self.number, self.skip = len(data_source), data_config.sampler.get("skip", 0)

        def __iter__(self):
            return iter(range(self.number - 1, self.skip - 1, -1))

        def __len__(self):
            return self.number
"""


@pytest.fixture
def sampler(made, tmp_path):
    """A sampler over six rows, two per batch."""

    def make(code=SAMPLER, **own):
        name = written(tmp_path / "sampler.py", code, "Down")
        data = DataConfig(sampler=SamplerConfig(name), own_keys={"sampler": own})
        return make_sampler(data, BatchOrder(6, 2, seed=1), made(GOOD))

    return make


def test_verl_sampler_is_iterated_per_epoch(sampler):
    drawn = sampler(skip=1)
    assert [(drawn.rows(draw), drawn.epoch(draw)) for draw in range(3)] == [([5, 4], 0), ([3, 2], 0), ([5, 4], 1)]


def test_a_row_comes_once_in_a_batch(sampler):
    drawn = sampler(SAMPLER.replace("iter(range(", "iter([5, 5, 5, 1, 1, 0] or range("))
    assert [drawn.rows(draw) for draw in range(2)] == [[5, 1], [1, 0]]


def test_resumed_sampler_continues_identically(sampler, caplog):
    code = SAMPLER.replace("return iter(range", "return iter(R.permutation(self.number)) or (range")
    seeded = code.replace(
        "self.number,", "global R\n            R = np.random.default_rng(data_config.seed)\n            self.number,"
    )
    seeded = "    import numpy as np\n" + seeded
    first = sampler(seeded)
    for draw in range(5):
        first.rows(draw)
    expected, state = [], first.state()
    for draw in range(5, 9):
        expected.append(first.rows(draw))
    second = sampler(seeded)
    second.restore(state)
    assert [second.rows(draw) for draw in range(5, 9)] == expected
    assert not caplog.records
    third = sampler(SAMPLER)
    third.restore({"draws": np.array(1), "check": np.array(0)})
    assert "names other rows than before the run was stopped" in caplog.text


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "def __len__",
            "def update(self, batch): ...\n        def __len__",
            r"observe(rows, solved) reports to a sampler",
        ),
        ("def __iter__", "def walk", "has no __iter__"),
        ("data_config)", "data_config, ratios)", "the class needs ratios"),
        ("len(data_source),", "1 / 0,", "ZeroDivisionError"),
        ("iter(range(", "iter([6] or range(", "yields 6, which is not a row"),
        ("iter(range(", "iter([1, 1] or range(", "yields 1 different rows, fewer than data.train_batch_size=2"),
    ],
)
def test_unusable_sampler_error(sampler, old, new, said):
    message = refusal(SAMPLER, old, new, lambda code: sampler(code).rows(0))
    assert said in message
    assert "data.sampler.name=" in message
