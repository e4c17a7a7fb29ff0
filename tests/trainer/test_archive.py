"""Which answers are kept, where, and what happens if that fails. The writer lives in this process, without Ray."""

import json
import logging

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from rltrain.base.columns.answer import AnswerText
from rltrain.base.errors import DiskError
from rltrain.config.load import load_config
from rltrain.controller.samples import Samples, whole
from rltrain.data.prompts import PromptStore
from rltrain.data.rows import read_rows
from rltrain.run.report import sample_writer
from rltrain.run.report.archive import Archive
from rltrain.run.report.sample_writer import SampleWriter, Written
from rltrain.trainer.metrics import Answered
from tests.tiny import write_arithmetic

N = 2
BYTES = 100.0  # of the step, per answer, without the archive


class Letters:
    """A tokenizer: ids are letters, 0 is special."""

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(each) if each else "<user>" for each in ids if each or not skip_special_tokens)


class LocalWriter(SampleWriter):
    """`WriterProcess` in this process; what it is asked to write is heard of at once."""

    def submit(self, job):
        self.jobs = [*getattr(self, "jobs", []), job]
        return [self.write(job)]

    def flush(self, wait_s, step=None):
        return []

    def has_unwritten(self):
        return False

    def close(self, wait_s):
        return []


class Tables:
    def __init__(self):
        self.shown = []

    def log_table(self, *table):
        self.shown.append(table)


@pytest.fixture
def make(tmp_path):
    """make(keys…): an archive in tmp_path/run whose writer is ``archive.writer``."""
    rows = read_rows(str(write_arithmetic(tmp_path / "rows.parquet", range(10))))
    ids = [np.array([0, *map(ord, row.prompt[0]["content"])]) for row in rows]
    offsets = np.cumsum([0, *map(len, ids)])
    store = PromptStore(np.concatenate(ids), offsets, np.arange(len(ids)), 0)

    def archive(*keys, tokenizer=None):
        cfg = load_config([f"trainer.{key}" for key in keys]).config
        writer = LocalWriter(dict.fromkeys(("train", "val"), rows), dict.fromkeys(("train", "val"), store),
                             tokenizer or Letters(), lambda reference: reference)  # fmt: skip
        made = Archive(cfg, tmp_path / "run", writer, Tables())
        made.writer, made.tables = writer, made._tracker
        return made

    return archive


def batch(num_prompts=5) -> Samples:
    """N answers to each of the rows 9, 8, …; texts in two objects, the second in another order."""
    n = num_prompts * N
    samples = Samples(n)
    texts, cut = [f"answer {i}" for i in range(n)], n // 2
    for ids in (np.arange(cut), np.arange(cut, n)[::-1]):
        samples.attach([whole([texts[i] for i in ids], ("text",), ids)])
    scores = np.arange(n) % 2.0
    samples.update({
        "row": 9 - np.arange(n, dtype=np.int32) // N, "score": scores, "reward": scores - 0.5,
        "advantage": scores * 2 - 1, "reward_failed": np.eye(n)[3], "reward_timeout": np.zeros(n), "scorer/acc": scores,
        "scorer/answer": scores, "scorer/pred": np.array([f"p{i}" for i in range(n)], dtype=object),
        "prompt_length": np.full(n, 6),
        "reward_error": np.array(["boom" if i == 3 else "" for i in range(n)], dtype=object),
        "response_length": np.arange(n), "truncated": np.arange(n) == 1, "complete": np.ones(n, dtype=bool),
    })  # fmt: skip
    return samples


def answered(step: int, samples: Samples | None = None) -> Answered:
    return Answered(step, {"perf/driver_bytes_per_sample": BYTES}, samples or batch(), N)


def test_all_answers_go_into_a_file_that_is_named_or_an_error_says_why(make, tmp_path):
    archive = make("samples_max_prompts=1")
    archive.write(answered(3), tmp_path / "parts" / "a.parquet")
    assert pd.read_parquet(tmp_path / "parts" / "a.parquet")["answer"].tolist() == [f"answer {i}" for i in range(10)]
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(DiskError, match=r"a.parquet could not be written: .*Mend that, and run the same command again"):
        archive.write(answered(3), tmp_path / "file" / "a.parquet")


def test_a_step_is_one_table_with_all_that_is_known_of_an_answer(make, tmp_path):
    make().on_step(answered(3))
    assert [file.name for file in (tmp_path / "run" / "samples").iterdir()] == ["train_000003.parquet"]
    table = pd.read_parquet(tmp_path / "run" / "samples" / "train_000003.parquet")
    assert table["answer"].tolist() == [f"answer {i}" for i in range(10)]
    assert table.iloc[3].drop(["scorer/answer"]).to_dict() == {
        "step": 3, "data_source": "rltrain/arithmetic", "row": 8, "sample": 1, "index": "8", "question": "1+0=?",
        "prompt": "<user>1+0=?", "answer": "answer 3", "ground_truth": "1", "score": 1.0, "reward": 0.5,
        "advantage": 1.0, "reward_failed": 1.0, "reward_timeout": 0.0, "reward_error": "boom", "prompt_length": 6,
        "response_length": 3, "finish_reason": "stop", "acc": 1.0, "pred": "p3",
    }  # fmt: skip
    assert table["finish_reason"].tolist()[:2] == ["stop", "length"]
    assert table["scorer/answer"].tolist() == table["score"].tolist(), "a name that is taken keeps its prefix"


def test_prompts_are_kept_with_all_their_answers_on_some_steps(make, tmp_path):
    archive = make("samples_max_prompts=3", "samples_freq=2")
    for step in (1, 2, 3, 4):
        archive.on_step(answered(step))
    archive.on_validation(answered(3))
    files = sorted((tmp_path / "run" / "samples").iterdir())
    assert [file.stem for file in files] == ["train_000002", "train_000004", "val_000003"]
    for file in files:
        assert pd.read_parquet(file)["row"].tolist() == [9, 9, 7, 7, 5, 5]


def test_verls_json_lines_hold_every_answer(make, tmp_path):
    folder = tmp_path / "dump"
    archive = make(f"rollout_data_dir={folder}", "samples_max_prompts=1")
    archive.on_step(answered(7))
    lines = [json.loads(line) for line in (folder / "7.jsonl").read_text().splitlines()]
    assert lines[3] == {"input": "1+0=?", "output": "answer 3", "gts": "1", "score": 1.0, "step": 7,
                        "acc": 1.0, "answer": 1.0, "pred": "p3"}  # fmt: skip
    assert (len(lines), len(pd.read_parquet(tmp_path / "run" / "samples" / "train_000007.parquet"))) == (10, 2)
    archive.on_validation(answered(7))
    assert [file.name for file in folder.iterdir()] == ["7.jsonl"]


def test_answers_of_several_turns_are_kept_as_conversations(make, tmp_path):
    said = [
        {"role": "assistant", "content": "call"},
        {"role": "tool", "name": "add", "content": "5 \ud83d", "seconds": 0.5},
    ]
    samples = batch()
    for part in samples.parts_with("text"):
        part.ref[:] = [AnswerText.of(text, messages=said, num_turns=2) for text in part.ref]
    first = next(part for part in samples.parts_with("text"))
    first.ref[0] = AnswerText.of("", messages=[], agent_failed="the agent's process ended")
    first.ref[1] = AnswerText.of("x", messages=[{"role": "user", "content": "y" * 1_000_000}] * 2)
    samples.update({"tool_s": np.full(10, 0.5, dtype=np.float32), "num_turns": np.full(10, 1)})
    make(f"rollout_data_dir={tmp_path / 'dump'}").on_step(answered(1, samples))
    table = pd.read_parquet(tmp_path / "run" / "samples" / "train_000001.parquet")
    kept = [*said[:1], said[1] | {"content": "5 \ufffd"}]
    assert json.loads(table["messages"][2]) == kept
    assert table["agent_failed"].tolist() == ["the agent's process ended", *[""] * 9]
    assert table["tool_s"].tolist() == [0.5] * 10
    assert 200_000 < len(table["messages"][1]) < 201_000, "of a conversation so much is kept"
    lines = [json.loads(line) for line in (tmp_path / "dump" / "1.jsonl").read_text().splitlines()]
    assert [line["agent_failed"] for line in lines] == table["agent_failed"].tolist()
    assert lines[2]["messages"] == kept


def test_whatever_a_model_or_a_scorer_writes_is_kept(make, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    odd = ["half \ud83d of a pair", "both \ud83d\ude00", "[/red] \x1b[31m", "NUL \0", "\u2028 \udc80", "x" * 1_000_000]
    samples = batch()
    for part in samples.parts_with("text"):
        part.ref[:] = (odd * 2)[: len(part.ref)]
    words = np.array((odd * 2)[:10], dtype=object)
    samples.update({"scorer/pred": words, "reward_error": words, "scorer/acc": words})
    make(f"rollout_data_dir={tmp_path / 'dump'}", "log_val_generations=2").on_step(answered(1, samples))
    table = pd.read_parquet(tmp_path / "run" / "samples" / "train_000001.parquet")
    expected = ["half \ufffd of a pair", "both \U0001f600", *odd[2:4], "\u2028 \ufffd", odd[5]]
    assert table["pred"].tolist()[:6] == table["acc"].tolist()[:6] == expected
    assert table["answer"].tolist()[:5] == expected[:5]
    lines = [json.loads(line) for line in (tmp_path / "dump" / "1.jsonl").read_text().split("\n")[:-1]]
    assert [line["pred"] for line in lines][:6] == expected
    assert "an answer of step 1, train: 2+1=? -> half" in caplog.text
    assert "not kept" not in caplog.text


def test_nothing_is_kept_where_nothing_is_wanted(make, tmp_path):
    archive = make("samples_freq=-1", f"validation_data_dir={tmp_path / 'dump'}")
    archive.on_step(answered(1))
    archive.on_validation(answered(1))
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "dump" / "1.jsonl").exists()


def test_a_disk_that_fails_is_told_once_and_stops_nothing(make, tmp_path, monkeypatch, caplog):
    archive = make()

    def no_room(table, file, **options):
        file.write_text("half of")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", no_room)
    for step in (1, 2, 3):
        archive.on_step(answered(step))
    archive.close()
    folder = tmp_path / "run" / "samples"
    assert caplog.text.count(f"the disk of {folder} is full") == 1
    assert "step 1, train: answers are not kept" in caplog.text
    assert f"{folder}: the answers of these steps are missing: train 1-3" in caplog.text
    assert not list((tmp_path / "run" / "samples").iterdir())


def test_one_answer_is_shown_every_so_often(make, caplog):
    caplog.set_level(logging.INFO)
    archive = make()
    for step in range(1, 21):
        archive.on_step(answered(step))
    shown = [record.getMessage() for record in caplog.records]
    assert shown == [f"an answer of step {step}, train: 2+1=? -> answer 0 ✗ (3)" for step in (1, 10, 20)]


def test_trackers_get_the_same_validation_prompts_every_time(make):
    archive = make("log_val_generations=3", "samples_freq=-1")
    for step in (0, 5):
        archive.on_validation(answered(step))
    for step, (at, name, columns, rows) in zip((0, 5), archive.tables.shown, strict=True):
        assert (at, name, columns[3]) == (step, "val/generations", "answer")
        assert [row[3] for row in rows] == ["answer 0", "answer 4", "answer 8"]


def test_few_bytes_of_an_answer_go_through_the_driver(make):
    """However long it is."""
    sizes = []
    for length in (1, 1000):
        archive = make()
        samples = batch()
        for part in samples.parts_with("text"):
            part.ref[:] = [text * length for text in part.ref]
        found = archive.on_step(answered(1, samples))
        sizes.append(found["perf/driver_bytes_per_sample"] - BYTES)
    assert sizes[0] == sizes[1]
    assert 0 < sizes[0] < 60


def test_prompts_without_a_tokenizer_to_decode_them_are_messages(make, tmp_path):
    archive = make()
    archive.writer._tokenizer = None
    archive.on_step(answered(1))
    assert pd.read_parquet(tmp_path / "run" / "samples" / "train_000001.parquet")["prompt"][0] == "user: 2+1=?"


def test_a_writer_that_lags_keeps_the_newest_and_never_blocks(monkeypatch):
    """With a stand-in for Ray, whose calls end when the test says so."""
    monkeypatch.setattr(sample_writer, "MOST_AT_ONCE", 2)
    process = object.__new__(sample_writer.WriterProcess)
    process._running, process._waiting, done = {}, [], []

    class Actor:
        class write:
            remote = staticmethod(lambda job: job.step)

    class Ray:
        wait = staticmethod(lambda calls, num_returns, timeout: ([call for call in calls if call in done], []))
        get = staticmethod(lambda call: Written("train", call))
        kill = staticmethod(lambda actor: None)

    monkeypatch.setitem(__import__("sys").modules, "ray", Ray)
    process._actor = Actor
    jobs = [sample_writer.SampleJob("train", step, np.arange(0), 1, [], {}, np.arange(0)) for step in range(1, 6)]
    told = [each for job in jobs[:4] for each in process.submit(job)]
    assert [each.step for each in told] == [3], "1 and 2 are under way, 4 waits"
    done += [1, 2]
    assert [each.problem for each in process.submit(jobs[4])] == [None, None]
    done += [4, 5]
    assert {each.step for each in process.close(5.0)} == {4, 5}


@pytest.mark.parametrize(("deadly", "lost", "processes"), [(2, [2], 3), (0, [], 2)])
def test_a_writer_that_dies_is_started_again_and_what_is_lost_is_said(monkeypatch, deadly, lost, processes):
    """With a stand-in for Ray: a job ends every process that it is given to, or the first is killed from outside."""

    class Died(Exception):
        """The actor died."""

    started = []

    class Actor:
        def __init__(self):
            started.append(self)
            self.dead, self.write = not deadly and len(started) == 1, self

        def remote(self, job):
            self.dead = self.dead or job.step == deadly
            return (job.step, self.dead, len(started))

    class Ray:
        class exceptions:
            RayActorError = Died

        wait = staticmethod(lambda calls, num_returns, timeout: (calls, []))
        kill = staticmethod(lambda actor: None)

        @staticmethod
        def get(call):
            if call[1]:
                raise Died("it was killed")
            return Written("train", call[0])

    monkeypatch.setitem(__import__("sys").modules, "ray", Ray)
    process = object.__new__(sample_writer.WriterProcess)
    monkeypatch.setattr(process, "_start", lambda: setattr(process, "_actor", Actor()), raising=False)
    process._running, process._waiting, process._deadly = {}, [], None
    process._start()
    jobs = [sample_writer.SampleJob("train", step, np.arange(0), 1, [], {}, np.arange(0)) for step in (1, 2, 3)]
    for job in jobs:
        process._write(job)
    told = process.close(5.0)
    assert {each.step: each.problem is None for each in told} == {step: step not in lost for step in (1, 2, 3)}
    assert len(started) == processes
