import json

import numpy as np
import pytest

from rltrain.common.errors import ConfigError
from rltrain.config.schema import DataConfig, SamplerConfig
from rltrain.data.batch_sampler import BatchOrder
from rltrain.data.sampler import SolveRateSampler, make_sampler


class Row:
    def __init__(self, **extra_info):
        self.extra_info = extra_info


def sampler(rates=(), num_rows=12, batch=3, revisit=0.0) -> SolveRateSampler:
    rows = [Row(PassRate_7BBase=rates[i]) if i < len(rates) else Row() for i in range(num_rows)]
    return SolveRateSampler(BatchOrder(num_rows, batch, seed=5), rows, revisit)


def named(name) -> DataConfig:
    return DataConfig(sampler=SamplerConfig(name))


def test_unknown_prompts_come_in_the_shuffled_order():
    plain, adaptive = BatchOrder(12, 3, seed=5), sampler()
    assert [adaptive.rows(draw) for draw in range(8)] == [plain.rows(draw) for draw in range(8)]
    assert adaptive.epoch(8) == 1


def test_prompts_that_are_always_or_never_solved_are_skipped():
    adaptive = sampler(rates=[0.0, 1.0, 0.0, 1.0, 0.5, 0.25])
    drawn = [row for draw in range(16) for row in adaptive.rows(draw)]
    assert set(drawn) == set(range(4, 12))
    adaptive.observe([4, 5], [1.0, 0.0])
    assert {row for draw in range(16) for row in adaptive.rows(draw)} == set(range(6, 12))
    adaptive.observe([0], [0.5])
    assert 0 in [row for draw in range(8) for row in adaptive.rows(draw)]


def test_revisit_share_of_solved_prompts():
    adaptive = sampler(rates=[0.0] * 400, num_rows=1000, batch=10, revisit=0.2)
    drawn = [row for draw in range(68) for row in adaptive.rows(draw)]  # about one epoch
    again = sum(row < 400 for row in drawn)
    assert 50 < again < 110


def test_a_batch_is_filled_up_without_repeats():
    adaptive = sampler(rates=[1.0] * 11)
    for draw in range(6):
        rows = adaptive.rows(draw)
        assert len(set(rows)) == len(rows) == 3


def test_sampler_resumes_from_its_state():
    first, second = sampler(rates=[0.0, 0.5], revisit=0.3), sampler(rates=[0.0, 0.5], revisit=0.3)
    for draw in range(5):
        rows = first.rows(draw)
        first.observe(rows, [(row % 3) / 2 for row in rows])
    state = {name: np.array(json.loads(json.dumps(values.tolist()))) for name, values in first.state().items()}
    second.restore(state)
    assert [first.rows(draw) for draw in range(5, 15)] == [second.rows(draw) for draw in range(5, 15)]


def test_custom_sampler(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "class Mine:\n"
        "    def __init__(self, order, rows): self.order = order\n"
        "    def rows(self, draw): return [0, 1, 2]\n"
        "    def epoch(self, draw): return 0\n"
        "    def observe(self, rows, solved): pass\n"
        "    def state(self): return {}\n"
        "    def restore(self, state): pass\n"
        "class Half:\n"
        "    def __init__(self, order, rows): pass\n"
    )
    order = BatchOrder(12, 3, seed=5)
    assert make_sampler(named(f"{file}:Mine"), order, []).rows(0) == [0, 1, 2]
    with pytest.raises(ConfigError, match="Half has no method rows, epoch, observe, state, restore"):
        make_sampler(named(f"{file}:Half"), order, [])
    assert make_sampler(named("shuffle"), order, []) is order
