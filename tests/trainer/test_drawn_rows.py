"""data.train_max_samples and val_max_samples in a run."""

from rltrain.config.load import load_config
from rltrain.run.splits import load_data
from tests.tiny import small_run


def test_max_samples_are_drawn_unless_nothing_is_shuffled(tiny_model, arithmetic_files, tmp_path):
    def rows(**changes):
        keys = {"data__train_max_samples": 6, "data__val_max_samples": 5} | changes
        data = load_data(load_config(small_run(tiny_model, arithmetic_files, tmp_path, **keys)).config)
        return {split: [row.extra_info["index"] for row in found] for split, found in data.rows.items()}

    everything = rows(data__train_max_samples=0, data__val_max_samples=-1)
    first, drawn = rows(data__shuffle=False), rows()
    for split, size in (("train", 6), ("val", 5)):
        assert first[split] == everything[split][:size]
        assert drawn[split] != first[split]
        assert len(set(drawn[split])) == size
        assert set(drawn[split]) < set(everything[split])
    assert rows() == drawn
    assert rows(data__seed=2) != drawn
