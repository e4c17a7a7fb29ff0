import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.common.errors import DataError
from rltrain.data.batch_sampler import BatchOrder

FROZEN = ([2, 0, 1, 4, 5], [5, 0, 8, 2, 4])  # of num_rows=10, batch_size=5, seed=1; never edit: resumes rely on it


@given(st.integers(1, 60), st.integers(1, 60), st.integers(-5, 2**70), st.booleans())
def test_an_epoch_visits_distinct_rows_and_drops_only_the_tail(num_rows, batch_size, seed, shuffle):
    if batch_size > num_rows:
        return
    order = BatchOrder(num_rows, batch_size, seed, shuffle)
    seen = [row for step in range(order.steps_per_epoch) for row in order.rows(step)]
    assert len(set(seen)) == len(seen) == num_rows - num_rows % batch_size
    assert set(seen) <= set(range(num_rows))


def test_a_batch_depends_on_seed_and_step_alone():
    first = BatchOrder(100, 8, 3)
    forward = [first.rows(step) for step in range(40)]
    second = pickle.loads(pickle.dumps(BatchOrder(100, 8, 3)))
    assert [second.rows(step) for step in reversed(range(40))] == forward[::-1]
    assert first.rows(39) == forward[39]


def test_the_order_of_old_runs_stays():
    assert BatchOrder(10, 5, 1).rows(0) == FROZEN[0]
    assert BatchOrder(10, 5, 1).rows(3) == FROZEN[1]


def test_without_shuffle_rows_come_as_they_are():
    order = BatchOrder(7, 3, 1, shuffle=False)
    assert [order.rows(step) for step in range(3)] == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


def test_too_few_rows_name_the_key_and_the_file_key():
    with pytest.raises(DataError, match=r"data\.train_batch_size=8 .* 5 prompts in data\.train_files"):
        BatchOrder(5, 8, 1)
