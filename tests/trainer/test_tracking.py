from rltrain.trainer.tracking import Tracker, markdown_table


def test_a_table_with_any_text_stays_one_line_a_row():
    text = markdown_table(["answer", "score"], [["a|b\nc", 0.123456], ["", 1]])
    assert text.splitlines() == ["| answer | score |", "| --- | --- |", "| a\\|b<br>c | 0.1235 |", "|  | 1 |"]


def tracker(folder, loggers, **changes):
    values = {"first_step": 0, "total_steps": 4, "project": "p", "name": "n", "config": {"a": {"b": 1}}}
    return Tracker(loggers, folder, **values | changes)


def test_tables_reach_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track = tracker(tmp_path, ["tensorboard"])
    track.log(1, {"x": 2.0})
    track.log_table(1, "samples/train", ["prompt", "score"], [["1+1=?", 1.0]])
    track.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    text = events.Tensors("samples/train/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "1+1=?" in text
    assert events.Scalars("x")[0].value == 2.0
