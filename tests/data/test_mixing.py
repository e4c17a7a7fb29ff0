"""Batches have the configured shares of the data's parts, and depend only on seed and step."""

import pickle

import numpy as np
import pandas as pd
import pytest

from rltrain.common.errors import ConfigError
from rltrain.config.check import broken_rules
from rltrain.config.load import load_config
from rltrain.data.mixing import MixedOrder, mixed_order
from rltrain.run.checkpoints.resume import frozen_values
from tests.tiny import small_run, write_arithmetic

PARTS = [np.arange(0, 50), np.arange(50, 80), np.arange(80, 200)]
SHARES = [0.5, 0.2, 0.3]
# Of the order below, step 0; never edit: resumes rely on it.
FROZEN = [129, 1, 29, 77, 25, 143, 75, 10, 197, 28, 107, 54, 9, 90, 47, 12, 50, 14, 87, 63]


def order(seed=3, batch_size=20, shuffle=True) -> MixedOrder:
    return MixedOrder(200, batch_size, seed, PARTS, SHARES, shuffle)


def test_every_batch_and_each_part_of_it_has_its_shares():
    made = order()
    counts = np.zeros(3)
    for step in range(300):
        rows = made.rows(step)
        assert len(set(rows)) == len(rows) == 20
        for size in (20, 10):  # half a batch is a mini-batch
            part = np.bincount(np.searchsorted([50, 80], rows[:size], side="right"), minlength=3)
            assert (np.abs(part - size * np.array(SHARES)) < 2.5).all()
        counts += part if size == 20 else np.bincount(np.searchsorted([50, 80], rows, side="right"), minlength=3)
    assert counts / counts.sum() == pytest.approx(SHARES, abs=0.002)


def test_a_batch_depends_on_seed_and_step_alone():
    forward = [order().rows(step) for step in range(40)]
    second = pickle.loads(pickle.dumps(order()))
    assert [second.rows(step) for step in reversed(range(40))] == forward[::-1]
    assert order().rows(39) == forward[39]
    assert order(seed=4).rows(0) != forward[0]
    assert forward[0] == FROZEN


def test_each_part_is_gone_through_before_a_row_of_it_comes_again():
    made, seen = order(), {0: [], 1: [], 2: []}
    for step in range(12):
        for row in made.rows(step):
            seen[int(np.searchsorted([50, 80], row, side="right"))].append(row)
    for part, rows in seen.items():
        first = rows[: len(PARTS[part]) - 14]  # what a batch may leave at the end
        assert len(set(first)) == len(first)
        assert set(rows) <= set(PARTS[part].tolist())
    plain = [row for row in order(shuffle=False).rows(0) if row < 50]
    assert plain == list(range(len(plain)))


class Parts(list):
    """Rows with only a source and a file."""

    def sources(self):
        return [source for source, _ in self]

    def files(self):
        return [file for _, file in self]

    def origin(self, place):
        return f"row {place}"


ROWS = Parts([("a/b", "/data/one.parquet")] * 30 + [("c", "/data/two.parquet")] * 30 + [("d", "/data/two.parquet")] * 9)


def test_weights_go_by_data_source_or_file():
    made = mixed_order(ROWS, {"a/b": 1, "two.parquet": 3}, 8, 1, True)
    counts = sum(np.bincount(np.array(made.rows(step)) >= 30, minlength=2) for step in range(50))
    assert counts / 400 == pytest.approx([0.25, 0.75], abs=0.01)
    # A source takes precedence over its file, and 0 excludes rows.
    only = mixed_order(ROWS, {"one.parquet": 0, "c": 2, "/data/two.parquet": 0}, 8, 1, True)
    assert {row // 30 for step in range(9) for row in only.rows(step)} == {1}


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"a/b": 1, "c": 1}, "no weight for data_source 'd' \\(row 60\\)"),
        (
            {"a/b": 1, "two.parquet": 1, "e": 1},
            "no row belongs to 'e'. Data sources and files are: a/b, c, d, /data/one",
        ),
        ({"a/b": 1, "c": 1, "d": 8}, "'d' has 9 prompts, and a batch of 16 takes up to 15 of them"),
    ],
)
def test_invalid_mixing_is_an_error(weights, words):
    with pytest.raises(ConfigError, match=words):
        mixed_order(ROWS, weights, 16, 1, True)


def settings(tmp_path, **changes):
    return load_config(small_run(tmp_path, (tmp_path, tmp_path), tmp_path, **changes))


def test_weights_are_numbers_and_one_thing_alone_chooses(tmp_path):
    def problems(**changes):
        return broken_rules(settings(tmp_path, **changes))

    mixing = {"data__mixing": "{a/b: 3, c.parquet: 0.5}"}
    assert problems(**mixing) == []
    assert problems(data__mixing="{a: -1}") == [
        "data.mixing: the weight of 'a' is -1; it must be a finite number, at least 0."
    ]
    assert "every weight is 0" in problems(data__mixing="{a: 0}")[0]
    assert "both choose the prompts" in problems(**mixing, data__sampler__name="solve_rate")[0]
    # A resumed run must have the same value, which older checkpoints lack.
    assert frozen_values(settings(tmp_path, **mixing).config)["data.mixing"] == {"a/b": 3, "c.parquet": 0.5}
    assert "data.mixing" not in frozen_values(settings(tmp_path).config)


def test_run_mixes_files_and_reports_each_source(process_group, tiny_trainer, tmp_path):
    files = [str(write_arithmetic(tmp_path / f"{name}.parquet", range(24))) for name in ("one", "two")]
    pd.read_parquet(files[1]).assign(data_source="openai/gsm8k").to_parquet(files[1])
    trainer = tiny_trainer(data__train_files=f"[{','.join(files)}]", data__mixing="{one.parquet: 3, openai/gsm8k: 1}")
    assert isinstance(trainer.experience.sampler, MixedOrder)
    answered = trainer.step(1)
    of_second = answered.samples["row"] >= 24
    metrics = answered.metrics
    assert metrics["train/openai/gsm8k/share"] == of_second.mean() == 0.25
    assert metrics["train/rltrain/arithmetic/share"] == 0.75
    expected = answered.samples["score"][of_second].mean()
    assert metrics["train/openai/gsm8k/score/mean"] == pytest.approx(expected)
    assert not any(name.startswith("train/") for name in tiny_trainer().step(1).metrics)
