import numpy as np
import pytest
import torch

from rltrain.common.columns.batch import Batch, DictionaryColumn
from rltrain.common.columns.ragged import Ragged
from rltrain.runtime.samples import Samples, assemble, driver_bytes, whole


def tokens_of(ids) -> Batch:
    """Sample i has i + 1 tokens of value i."""
    return Batch(
        {
            "tokens": Ragged.from_rows([torch.full((i + 1,), i) for i in ids]),
            "prompt_length": torch.tensor([10 * i for i in ids]),
        }
    )


@pytest.fixture
def samples():
    samples = Samples(5)
    for ids in ([3, 0], [1, 4, 2]):
        samples.attach([whole(tokens_of(ids), ("tokens", "prompt_length"), np.array(ids))])
    samples.attach([whole(Batch({"score": torch.arange(5.0)}), ("score",), np.arange(5))])
    samples.update({"advantage": np.array([0.0, 0.1, 0.2, 0.3, 0.4])})
    return samples


def resolve(request) -> Batch:
    return assemble(request, [part.ref for part in request.parts])


def test_a_request_brings_the_wanted_rows_in_the_wanted_order(samples):
    batch = resolve(samples.request(np.array([4, 0, 1]), ["tokens", "prompt_length", "score"], ["advantage"]))
    assert [row.tolist() for row in batch.ragged("tokens").rows()] == [[4] * 5, [0], [1, 1]]
    assert batch.dense("prompt_length").tolist() == [40, 0, 10]
    assert batch.dense("score").tolist() == [4.0, 0.0, 1.0]
    assert batch.dense("advantage").tolist() == [0.4, 0.0, 0.1]


def test_a_column_that_is_not_there_for_all_is_named(samples):
    samples.attach([whole(None, ("ref_log_probs",), np.array([0, 1]))])
    with pytest.raises(KeyError, match="'ref_log_probs' exists for 2 of 3 samples"):
        samples.request(np.array([0, 1, 2]), ["ref_log_probs"])


def test_optional_columns_bring_the_rows_that_there_are(samples):
    some = Batch({"old_log_probs": Ragged.from_rows([torch.ones(2), torch.ones(1)])})
    samples.attach([whole(some, ("old_log_probs",), np.array([2, 0]))])
    batch = resolve(samples.request(np.array([1, 0, 2]), ["tokens"], optional=["old_log_probs"]))
    assert [row.tolist() for row in batch.ragged("old_log_probs").rows()] == [[], [1.0], [1.0, 1.0]]
    assert [len(row) for row in batch.ragged("tokens").rows()] == [2, 1, 3]
    assert "old_log_probs" not in resolve(samples.request(np.array([1, 4]), ["tokens"], optional=["old_log_probs"]))


def test_bytes_through_the_driver_do_not_grow_with_tokens(samples):
    long = Samples(5)
    rows = [torch.zeros(10_000 * (i + 1)) for i in range(5)]
    long.attach([whole(Batch({"tokens": Ragged.from_rows(rows)}), ("tokens",), np.arange(5))])
    short = Samples(5)
    short.attach([whole(tokens_of(range(5)), ("tokens",), np.arange(5))])
    ids = np.arange(5)
    assert driver_bytes([long.request(ids, ["tokens"])]) == driver_bytes([short.request(ids, ["tokens"])])


def test_samples_of_another_step_may_stand_among_new_ones(samples):
    new = Samples(3)
    new.update({"advantage": np.array([9.0, 9.0, 9.0])})
    new.attach([whole(tokens_of([7]), ("tokens", "prompt_length"), np.array([1]))])
    new.adopt(samples, np.array([4, 3]), np.array([0, 2]), ["advantage"])
    assert new["advantage"].tolist() == [0.4, 9.0, 0.3]
    batch = resolve(new.request(np.arange(3), ["tokens", "prompt_length"]))
    assert batch.dense("prompt_length").tolist() == [40, 70, 30]


def test_an_object_is_fetched_once_however_often_it_is_used(samples):
    new = Samples(5)
    for sample in range(5):
        new.adopt(samples, np.array([sample]), np.array([4 - sample]))
    request = new.request(np.arange(5), ["tokens", "prompt_length"])
    assert len(request.parts) == 2
    assert resolve(request).dense("prompt_length").tolist() == [40, 30, 20, 10, 0]


def test_replicas_that_share_a_prompt_make_it_one_value():
    samples = Samples(4)
    samples.update({"group": np.array([0, 0, 1, 1])})
    for prompts, index, ids in (([[7, 8], [9]], [0, 1], [1, 2]), ([[9], [7, 8]], [0, 1], [3, 0])):
        rows = Ragged.from_rows([torch.tensor(row) for row in prompts])
        column = DictionaryColumn(rows, torch.tensor(index))
        samples.attach([whole(Batch({"prompt": column}), ("prompt",), np.array(ids))])
    prompts = resolve(samples.request(np.array([3, 0, 2, 1]), ["prompt"])).dictionary("prompt")
    assert [row.tolist() for row in prompts.values.rows()] == [[7, 8], [9]]
    assert prompts.index.tolist() == [1, 0, 1, 0]


def test_joined_samples_have_no_number_among_texts():
    """Rounds of dynamic sampling have the columns of their rows' scorers, but a file needs one type per column."""
    first, second = Samples(2), Samples(1)
    first.update({"reward_error": np.array(["ValueError", ""], dtype=object), "scorer/x": np.array([1.0, 2.0])})
    second.update({"score": np.array([1.0]), "scorer/x": np.array(["a"], dtype=object)})
    joined = Samples.join([(first, np.arange(2)), (second, np.arange(1))])
    assert joined["reward_error"].tolist() == ["ValueError", "", ""]
    assert joined["score"] == pytest.approx([np.nan, np.nan, 1.0], nan_ok=True)
    assert joined["scorer/x"] == pytest.approx([1.0, 2.0, np.nan], nan_ok=True)
