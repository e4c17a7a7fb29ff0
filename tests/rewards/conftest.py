import textwrap

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rltrain.config.schema import Config, CustomRewardConfig, RewardConfig
from rltrain.data.rows import read_rows
from rltrain.rewards.custom import CustomReward
from rltrain.rewards.processes.pool import RewardPool
from rltrain.rewards.processes.slot import ScoringSlot
from tests.clock import PATIENCE_S
from tests.doubles.judge import JudgeDouble


@pytest.fixture
def custom(tmp_path):
    """Write a reward file and return its section of the config."""

    def make(code, name="compute_score", **kwargs):
        path = tmp_path / "my_reward.py"
        path.write_text(textwrap.dedent(code))
        return CustomReward(str(path), name, kwargs)

    return make


@pytest.fixture
def slot(custom):
    """Make slots that run a body of ``compute_score``; close them after the test."""
    slots = []

    def make(body, timeout_s=PATIENCE_S, **limits):
        lines = textwrap.indent(textwrap.dedent(body).strip(), "    ")
        code = f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n{lines}\n"
        slots.append(ScoringSlot(custom(code), timeout_s, **limits))
        return slots[-1]

    yield make
    for made in slots:
        made.close()


@pytest.fixture
def pool(local_ray):
    """Make reward pools with ``rows`` as the split "train"; close them after the test."""
    pools = []

    def make(rows, reward=None, num_workers=2, log_file=None, reward_model=None, **settings):
        cfg = Config(reward=RewardConfig(**{"timeout_s": PATIENCE_S, "on_error": -2.0, **settings}))
        cfg.reward_model = reward_model or cfg.reward_model
        if reward:
            cfg.custom_reward_function = CustomRewardConfig(reward.path, reward.name, reward.kwargs)
        pools.append(RewardPool(cfg.scoring, num_workers, {"train": local_ray.put(rows)}, log_file))
        return pools[-1]

    yield make
    for made in pools:
        made.shutdown()


@pytest.fixture
def double():
    """Make `JudgeDouble`s; close them after the test."""
    made = []

    def make(reply, **options):
        made.append(JudgeDouble(reply, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def rows(tmp_path):
    """Twelve rows with one question."""
    truth = {"style": "rule", "ground_truth": "42"}
    record = {"data_source": "mine", "prompt": [{"role": "user", "content": "6 x 7?"}], "reward_model": truth}
    pq.write_table(pa.Table.from_pylist([record] * 12), tmp_path / "rows.parquet")
    return read_rows(str(tmp_path / "rows.parquet"))
