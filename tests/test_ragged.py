import pytest
import torch

from rltrain.common.columns.batch import Batch, DictionaryColumn
from rltrain.common.columns.ragged import Ragged


def make(lengths: list[int]) -> Ragged:
    return Ragged(torch.arange(sum(lengths), dtype=torch.float32), torch.tensor(lengths))


def test_batch_select_split_concat_keep_columns_together():
    batch = Batch({"tokens": make([1, 2, 3]), "score": torch.tensor([1.0, 2.0, 3.0]), "text": ["a", "b", "c"]})
    picked = batch.select([2, 0])
    assert picked.ragged("tokens").lengths.tolist() == [3, 1]
    assert picked.dense("score").tolist() == [3.0, 1.0]
    assert picked["text"] == ["c", "a"]
    again = Batch.concat(batch.split([1, 0, 2]))
    assert again.ragged("tokens") == batch.ragged("tokens")
    assert again["text"] == ["a", "b", "c"]


def test_a_dictionary_column_keeps_the_values_in_use():
    batch = Batch({"prompt": DictionaryColumn(make([1, 2, 3]), torch.tensor([0, 0, 1, 2]))})
    picked = batch.select([3, 0, 3]).dictionary("prompt")
    assert (picked.values.lengths.tolist(), picked.index.tolist()) == ([1, 3], [1, 0, 1])
    parts = batch.split([1, 2, 1])
    assert [part.dictionary("prompt").values.lengths.tolist() for part in parts] == [[1], [1, 2], [3]]
    again = Batch.concat(parts).dictionary("prompt")
    assert again.values.lengths[again.index].tolist() == [1, 1, 2, 3]
    with pytest.raises(TypeError, match="'prompt' is a DictionaryColumn, not a Ragged"):
        batch.ragged("prompt")
