"""Which responses are saved, where, and the behaviour after failures. The writer runs in this process, without Ray."""

import json
import logging
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from rltrain.common.columns.answer import AnswerText
from rltrain.common.errors import DiskError
from rltrain.config.load import load_config
from rltrain.data.prompts import PromptStore
from rltrain.data.rows import read_rows
from rltrain.run.report.sample_logger import SampleLogger
from rltrain.run.report.sample_writer import MOST_AT_ONCE, MOST_WAITING, SampleJob, SampleWriter, WriterProcess, Written
from rltrain.runtime.samples import Samples, whole
from rltrain.trainer.metrics.step import Answered
from tests.tiny import write_arithmetic

N = 2
BYTES = 100.0  # of the step, per answer, without the sample_logger


class Letters:
    """A tokenizer whose ids are letters; 0 is special."""

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(each) if each else "<user>" for each in ids if each or not skip_special_tokens)


class LocalWriter(SampleWriter):
    """`WriterProcess` in this process, which writes at once."""

    def submit(self, job):
        return [self.write(job)]

    def flush(self, wait_s, step=None):
        return []

    def has_unwritten(self):
        return False

    def close(self, wait_s):
        return []


@pytest.fixture
def make(tmp_path):
    """make(keys…): return a sample_logger in tmp_path/run, with the tables that trackers got."""
    rows = read_rows(str(write_arithmetic(tmp_path / "rows.parquet", range(10))))
    ids = [np.array([0, *map(ord, row.prompt[0]["content"])]) for row in rows]
    offsets = np.cumsum([0, *map(len, ids)])
    store = PromptStore(np.concatenate(ids), offsets, np.arange(len(ids)), 0)

    def sample_logger(*keys):
        cfg = load_config([f"trainer.{key}" for key in keys]).config.trainer
        writer = LocalWriter(dict.fromkeys(("train", "val"), rows), dict.fromkeys(("train", "val"), store),
                             Letters(), lambda reference: reference)  # fmt: skip
        shown = []
        made = SampleLogger(
            cfg, tmp_path / "run", writer, SimpleNamespace(log_table=lambda *table: shown.append(table))
        )
        made.shown = shown
        return made

    return sample_logger


def batch(num_prompts=5) -> Samples:
    """Return N responses to each of the rows 9, 8, …; texts are in two objects, the second in another order."""
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
    sample_logger = make("samples_max_prompts=1")
    sample_logger.write(answered(3), tmp_path / "parts" / "a.parquet")
    assert pd.read_parquet(tmp_path / "parts" / "a.parquet")["answer"].tolist() == [f"answer {i}" for i in range(10)]
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(DiskError, match=r"a.parquet could not be written: .*Fix that and rerun the command"):
        sample_logger.write(answered(3), tmp_path / "file" / "a.parquet")


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
    sample_logger = make("samples_max_prompts=3", "samples_freq=2")
    for step in (1, 2, 3, 4):
        sample_logger.on_step(answered(step))
    sample_logger.on_validation(answered(3))
    files = sorted((tmp_path / "run" / "samples").iterdir())
    assert [file.stem for file in files] == ["train_000002", "train_000004", "val_000003"]
    for file in files:
        assert pd.read_parquet(file)["row"].tolist() == [9, 9, 7, 7, 5, 5]


def test_verls_json_lines_hold_every_answer(make, tmp_path):
    folder = tmp_path / "dump"
    sample_logger = make(f"rollout_data_dir={folder}", "samples_max_prompts=1")
    sample_logger.on_step(answered(7))
    lines = [json.loads(line) for line in (folder / "7.jsonl").read_text().splitlines()]
    assert lines[3] == {"input": "1+0=?", "output": "answer 3", "gts": "1", "score": 1.0, "step": 7,
                        "acc": 1.0, "answer": 1.0, "pred": "p3"}  # fmt: skip
    assert (len(lines), len(pd.read_parquet(tmp_path / "run" / "samples" / "train_000007.parquet"))) == (10, 2)
    sample_logger.on_validation(answered(7))
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
    assert table["policy_turns"].tolist() == table["num_turns"].tolist() == [1] * 10
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
    assert "a response of step 1, train: 2+1=? -> half" in caplog.text
    assert "not saved" not in caplog.text


def test_a_folder_that_takes_nothing_is_told_once_and_stops_nothing(make, tmp_path, caplog):
    sample_logger = make()
    (tmp_path / "run").write_text("")  # a file in its place
    for step in (1, 2, 3):
        sample_logger.on_step(answered(step))
    sample_logger.close()
    assert caplog.text.count("step 1, train: responses are not saved") == 1
    assert f"{tmp_path / 'run' / 'samples'}: the responses of these steps are missing: train 1-3" in caplog.text


def test_one_answer_is_shown_every_so_often(make, caplog):
    caplog.set_level(logging.INFO)
    sample_logger = make()
    for step in range(1, 21):
        sample_logger.on_step(answered(step))
    shown = [record.getMessage() for record in caplog.records]
    assert shown == [f"a response of step {step}, train: 2+1=? -> answer 0 ✗ (3)" for step in (1, 10, 20)]


def test_trackers_get_the_same_validation_prompts_every_time(make):
    sample_logger = make("log_val_generations=3", "samples_freq=-1")
    for step in (0, 5):
        sample_logger.on_validation(answered(step))
    for step, (at, name, columns, rows) in zip((0, 5), sample_logger.shown, strict=True):
        assert (at, name, columns[3]) == (step, "val/generations", "answer")
        assert [row[3] for row in rows] == ["answer 0", "answer 4", "answer 8"]


class Died(Exception):
    """The actor died."""


class StandInOfRay(ModuleType):
    """The part of Ray that the writer uses; calls finish when ``done(job)``, and end their process if
    ``deadly(job)``."""

    def __init__(self, done=lambda step: True, deadly=lambda step, process: False):
        super().__init__("ray")
        self.started, self.done, self.deadly = [], done, deadly
        self.exceptions = SimpleNamespace(RayActorError=Died)
        self.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "ab" * 28)
        self.kill = lambda actor: None

    def remote(self, **_):
        return lambda cls: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.start))

    def start(self, *_):
        actor = SimpleNamespace(dead=False, number=len(self.started))
        actor.write = SimpleNamespace(remote=lambda job: self.write(actor, job.step))
        self.started.append(actor)
        return actor

    def write(self, actor, step):
        actor.dead = actor.dead or self.deadly(step, actor.number)
        return (step, actor.dead, actor.number)

    def wait(self, calls, num_returns, timeout):
        return [call for call in calls if self.done(call[0])], []

    def get(self, call):
        if call[1]:
            raise Died("it was killed")
        return Written("train", call[0])


def job_of(step: int) -> SampleJob:
    return SampleJob("train", step, np.arange(0), 1, [], {}, np.arange(0))


def test_a_writer_that_lags_keeps_the_newest_and_never_blocks(monkeypatch):
    done = set()
    monkeypatch.setitem(sys.modules, "ray", StandInOfRay(done=done.__contains__))
    process = WriterProcess({}, None, None)
    most = MOST_AT_ONCE + MOST_WAITING
    told = [each for step in range(1, most + 2) for each in process.submit(job_of(step))]
    assert [each.step for each in told] == [MOST_AT_ONCE + 1], "the first are being written, and the newest wait"
    done |= {1, 2}
    assert [each.problem for each in process.submit(job_of(99))] == [None, None]
    done |= set(range(100))
    assert {each.step for each in process.close(5.0)} == {*range(3, most + 2), 99} - {MOST_AT_ONCE + 1}


@pytest.mark.parametrize(
    ("deadly", "lost", "processes"),
    [(lambda step, process: step == 2, [2], 3), (lambda step, process: process == 0, [], 2)],
    ids=["a job that ends every process", "a process that was killed"],
)
def test_a_writer_that_dies_is_started_again_and_what_is_lost_is_said(monkeypatch, caplog, deadly, lost, processes):
    monkeypatch.setitem(sys.modules, "ray", ray := StandInOfRay(deadly=deadly))
    process = WriterProcess({}, None, None)
    told = [each for step in (1, 2, 3) for each in process.submit(job_of(step))] + process.close(5.0)
    assert {each.step: each.problem is None for each in told} == {step: step not in lost for step in (1, 2, 3)}
    assert len(ray.started) == processes
    said = "the process that writes samples died (it was killed) and is restarted"
    assert caplog.text.count(said) == processes - 1
