import json
import logging
import re
import subprocess
import sys
import threading
import types

import pytest

from rltrain.common.clock import Backoff
from rltrain.config.check import broken_rules
from rltrain.config.load import load_config, to_dict
from rltrain.config.schema.trainer import LOGGERS
from rltrain.run.report import tracking
from rltrain.run.report.trackers import TRACKERS, RunInfo, Sink, markdown_table, unsent_wandb, wandb_login_lacks
from rltrain.run.report.tracking import Sender, Tracker, tracker_notes
from tests.clock import PATIENCE_S, eventually

METRICS = {"critic/score/mean": 0.5, "val-core/openai/gsm8k/acc/mean@1": 0.25, "odd: name": float("nan")}


def tracker(folder, loggers, first_step=0, **options):
    run = RunInfo("project", "run", {"a": {"b": 1}, "files": ["x"]}, folder, first_step)
    return Tracker(loggers, run, total_steps=4, **options)


def test_a_table_with_any_text_stays_one_line_a_row():
    text = markdown_table(["answer", "score"], [["a|b\nc", 0.123456], ["", 1]])
    assert text.splitlines() == ["| answer | score |", "| --- | --- |", "| a\\|b<br>c | 0.1235 |", "|  | 1 |"]


class Recorder(Sink):
    """Fails while ``fails(step)`` is true."""

    def __init__(self, fails=lambda step: False):
        self.run_id, self.calls, self.arrived, self._fails = "id-1", 0, [], fails

    def log(self, step, metrics):
        self.calls += 1
        if self._fails(step):
            raise ConnectionError("no route")
        self.arrived.append(step)

    def finish(self, summary, failed):
        self.arrived.append("failed" if failed else "finished")


def put(sender, *steps):
    for step in steps:
        sender.put(lambda sink, step=step: sink.log(step, {}))


def finish(sender):
    sender.ask_to_finish(lambda sink: sink.finish({}, False))
    sender.wait_until_finished(PATIENCE_S)


def test_a_resumed_run_tells_the_best_of_all_its_steps(tmp_path, monkeypatch):
    """The tracker continues its run, whose summary is replaced at the end."""
    told, name = [], "critic/score/mean"
    sink = types.SimpleNamespace(run_id="1", log=lambda *_: None, finish=lambda summary, failed: told.append(summary))
    monkeypatch.setitem(TRACKERS, "tensorboard", lambda run: sink)
    scores = {1: 0.2, 2: 0.9, 3: 0.3}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": at, name: scores[at]}) + "\n" for at in scores))
    with tracker(tmp_path, ["tensorboard"], first_step=3) as resumed:
        for step, score in ((4, 0.5), (5, float("nan"))):
            resumed.on_metrics(step, {name: score})
    assert told == [{"summary/steps": 5, f"summary/best/{name}": 0.9, f"summary/last/{name}": 0.5}]


def test_after_a_failure_all_arrives_and_one_line_told(caplog):
    down = [True]
    sink = Recorder(lambda step: down[0])
    sender = Sender("far", lambda: sink, backoff=Backoff(0.01, 0.02))
    put(sender, *range(1, 6))
    eventually(lambda: sink.calls > 20)
    down[0] = False
    finish(sender)
    assert sink.arrived == [1, 2, 3, 4, 5, "finished"]
    (told,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "tracker 'far' failed (ConnectionError: no route). Training continues" in told.getMessage()


@pytest.mark.parametrize("error", [OSError("not yet"), SystemExit("no account")])
def test_a_tracker_that_cannot_start_is_tried_again(error, caplog):
    attempts, sink = [], Recorder()

    def make():
        attempts.append(1)
        if len(attempts) < 4:
            raise error
        return sink

    sender = Sender("late", make, backoff=Backoff(0.01, 0.02))
    put(sender, 1)
    finish(sender)
    assert sink.arrived == [1, "finished"]
    assert f"tracker 'late' failed ({type(error).__name__}: {error})" in caplog.text


def test_one_entry_that_is_refused_does_not_hold_up_the_others(caplog):
    sink = Recorder(lambda step: step == 2)
    sender = Sender("picky", lambda: sink, backoff=Backoff(0.001, 0.002))
    for step in range(1, 10):
        put(sender, step)
        eventually(lambda step=step: step == 2 or step in sink.arrived)
    finish(sender)
    assert sink.arrived == [1, 3, 4, 5, 6, 7, 8, 9, "finished"]
    assert "1 entries did not arrive" in caplog.text


def test_a_tracker_that_hangs_neither_slows_nor_holds_up_the_end(tmp_path, monkeypatch, caplog):
    release = threading.Event()
    monkeypatch.setitem(TRACKERS, "tensorboard", lambda run: Recorder(lambda step: release.wait(PATIENCE_S) and False))
    track = tracker(tmp_path, ["tensorboard"], close_s=0.2)
    for step in range(1, 4):
        track.on_metrics(step, METRICS)
    track.close()
    assert not release.is_set(), "steps and the end have not waited for it"
    assert "tracker 'tensorboard': not finished" in caplog.text
    assert tracking.hanging()
    release.set()
    eventually(lambda: not tracking.hanging())
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_the_queue_is_bounded_and_the_oldest_go_first():
    down = [True]
    sink = Recorder(lambda step: down[0])
    sender = Sender("full", lambda: sink, backoff=Backoff(0.01, 0.01), most_kept=3)
    put(sender, *range(1, 8))
    down[0] = False
    finish(sender)
    assert sink.arrived == [5, 6, 7, "finished"]


@pytest.fixture
def recorded(monkeypatch):
    """wandb is a recorder; returns its creation arguments."""
    made = []
    monkeypatch.setitem(TRACKERS, "wandb", lambda run: made.append((run, Recorder())) or made[-1][1])
    monkeypatch.setitem(LOGGERS, "wandb", None)  # it need not be installed
    return made


def test_a_resumed_run_goes_on_in_the_same_tracker_run(tmp_path, recorded, caplog):
    for first_step in (0, 2, 0):
        with tracker(tmp_path, ["wandb"], first_step):
            pass
    assert [run.run_id for run, _ in recorded] == [None, "id-1", None]
    assert json.loads((tmp_path / "tracking.json").read_text()) == {"wandb": "id-1"}
    (tmp_path / "tracking.json").write_text("\ufffd{")
    with tracker(tmp_path, ["wandb"], 2):
        pass
    assert recorded[-1][0].run_id is None
    assert "so trackers begin new runs" in caplog.text


def test_a_run_without_a_name_has_one_of_folder_and_time_also_when_it_resumes(tmp_path, recorded):
    keys = {"actor_rollout_ref.model.path": "/m", "data.train_files": "/d", "trainer.logger": ["wandb"]}
    for first_step, more in ((0, {}), (2, {}), (2, {"trainer.experiment_name": "mine"})):
        with Tracker.of((cfg := load_config([], [keys | more]).config).trainer, to_dict(cfg), tmp_path, first_step, 4):
            pass
    first, resumed, named = (run.name for run, _ in recorded)
    assert re.fullmatch(rf"{tmp_path.name}-\d{{8}}-\d{{6}}", first)
    assert (resumed, named) == (first, "mine")


@pytest.mark.fault("A tracker that cannot write is told once, and the run and its metrics.jsonl go on")
def test_trackers_that_cannot_write_are_told_once(tmp_path, recorded, caplog):
    """A file is in the place of TensorBoard's folder, and a folder in the place of the list of ids."""
    (tmp_path / "tensorboard").write_text("")
    (tmp_path / "tracking.tmp").mkdir()
    with tracker(tmp_path, ["tensorboard", "wandb"], close_s=0.2) as track:
        for step in range(1, 4):
            track.on_metrics(step, METRICS)
        told = "tracker 'tensorboard' failed ("
        eventually(lambda: caplog.text.count(told) == 1 and recorded and recorded[0][1].arrived == [1, 2, 3])
    assert caplog.text.count("so a resumed run begins new tracker runs") == 1
    assert "tracker 'tensorboard': not finished, 3 entries did not arrive" in caplog.text
    (tmp_path / "tensorboard").unlink()
    eventually(lambda: not tracking.hanging())  # it is still tried
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_run_that_fails_is_not_marked_as_finished(tmp_path, recorded):
    with pytest.raises(ZeroDivisionError), tracker(tmp_path, ["wandb"]):
        raise ZeroDivisionError
    with tracker(tmp_path, ["wandb"]):
        pass
    assert [sink.arrived for _, sink in recorded] == [["failed"], ["finished"]]


def test_a_tracker_that_is_not_installed_is_named_and_left_out(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(LOGGERS, "vemlp_wandb", "no_such_package")
    with tracker(tmp_path, ["vemlp_wandb", "file"]) as track:
        track.on_metrics(1, METRICS)
    assert "trainer.logger=vemlp_wandb needs 'pip install no_such_package'" in caplog.text
    assert (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", ["evil_tracker", "evil_tracker:Tracker", "../evil_tracker.py:Tracker"])
def test_a_name_that_is_no_tracker_imports_nothing(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "evil_tracker.py").write_text("open('trace', 'w')\nclass Tracker: pass\n")
    assert any(line.startswith("trainer.logger") for line in broken_rules(load_config([f"trainer.logger=['{name}']"])))
    with pytest.raises(KeyError):
        Tracker([name], RunInfo("project", "run", {}, tmp_path), total_steps=4)
    assert not (tmp_path / "trace").exists()


def test_every_name_that_is_accepted_leads_somewhere():
    assert set(LOGGERS) == {"console", "file", *TRACKERS}


def test_a_run_ends_although_a_tracker_hangs_at_exit(tmp_path):
    code = (
        "import atexit, sys, threading; from rltrain import main_ppo; from rltrain.run.report.tracking import Sender\n"
        "sender = Sender('stuck', lambda: threading.Event().wait())\n"
        "sender.wait_until_finished(0); atexit.register(lambda: threading.Event().wait())\n"
        "sys.exit(main_ppo.main(['no.such.key=1']))"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=PATIENCE_S, check=False)
    assert process.returncode == 2


class StandInOfWandb(types.ModuleType):
    """The part of wandb that a run uses. ``refuses``: the call that raises, as in wandb without its server."""

    def __init__(self, mode="online", api_key="key", refuses=""):
        super().__init__("wandb")
        self.modes, self.logged, self._refuses = [], [], refuses
        self.errors = types.SimpleNamespace(Error=type("CommError", (Exception,), {}))
        self.settings = types.SimpleNamespace(mode=mode, api_key=api_key, base_url="https://wandb.example")
        self.setup, self.Settings = lambda: self, lambda **given: given

    def login(self, prompt=True, verify=False):
        assert (prompt, verify) == (False, True)
        return not self._fail("login")

    def init(self, mode=None, **_):
        self._fail("init" if mode != "offline" else "")
        self.modes.append(mode)
        take = lambda *given, **named: self.logged.append((given, named))  # noqa: E731
        return types.SimpleNamespace(id="abc", define_metric=take, log=take)

    def _fail(self, call):
        if call and call == self._refuses:
            raise self.errors.Error(f"{call}: no answer.")


@pytest.mark.parametrize("refuses", ["login", "init", ""])
def test_a_run_without_wandbs_server_keeps_files_and_says_so_once(tmp_path, monkeypatch, caplog, refuses):
    wandb = StandInOfWandb(refuses=refuses)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    TRACKERS["wandb"](RunInfo("p", "n", {}, tmp_path))
    assert wandb.modes == (["offline"] if refuses else [None])
    assert caplog.text.count(f"{refuses}: no answer. Metrics go to {tmp_path}/wandb") == bool(refuses)


def test_wandb_loses_no_step_that_is_made_again(tmp_path, monkeypatch):
    """wandb drops entries with a smaller ``step`` than an earlier one, so the step is a metric, and the axis of all
    others."""
    monkeypatch.setitem(sys.modules, "wandb", wandb := StandInOfWandb())
    sink = TRACKERS["wandb"](RunInfo("p", "n", {}, tmp_path))
    for step in (4, 3, 4):
        sink.log(step, {"x": step})
    axis = "training/global_step"
    expected = [((axis,), {}), (("*",), {"step_metric": axis}), *((({"x": at, axis: at},), {}) for at in (4, 3, 4))]
    assert wandb.logged == expected


@pytest.mark.parametrize(("mark", "mode"), [("run-abc.wandb", "offline"), ("run-abc.wandb.synced", None)])
def test_a_resumed_run_goes_online_once_its_earlier_steps_are_sent(tmp_path, monkeypatch, mark, mode):
    monkeypatch.setitem(sys.modules, "wandb", wandb := StandInOfWandb())
    folder = tmp_path / "wandb" / "offline-run-20260101_000000-abc"
    folder.mkdir(parents=True)
    for name in ("run-abc.wandb", mark):
        (folder / name).touch()
    TRACKERS["wandb"](RunInfo("p", "n", {}, tmp_path, 2, "abc"))
    TRACKERS["wandb"](RunInfo("p", "n", {}, tmp_path))
    assert wandb.modes == [mode, None]  # another run need not wait


NETRC = "machine wandb.example login user password key\n"


@pytest.mark.parametrize(
    ("mode", "key", "netrc", "lacks"),
    [
        ("online", None, "", True),
        ("online", "key", "", False),
        ("online", None, NETRC, False),
        ("offline", None, "", False),
    ],
)
def test_a_dry_run_says_whether_there_is_a_login(tmp_path, monkeypatch, mode, key, netrc, lacks):
    monkeypatch.setitem(sys.modules, "wandb", StandInOfWandb(mode, key))
    monkeypatch.setitem(LOGGERS, "wandb", None)
    (tmp_path / "netrc").write_text(netrc)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    notes = [*tracker_notes(["console", "wandb"], tmp_path)]
    assert [f"wandb sync {tmp_path}/wandb/offline-run-*" in note for note in notes] == [True] * lacks
    assert bool(wandb_login_lacks()) == lacks


# -- the real packages, in their offline or local modes ----------------------------------------------------------------

# Two steps of a run: in a process of its own, as these packages leave threads and hooks behind.
RUN = """
import sys
from pathlib import Path
from rltrain.run.report.trackers import RunInfo
from rltrain.run.report.tracking import Tracker
name, folder, first = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
with Tracker([name], RunInfo("project", "run", {"a": {"b": 1}, "files": ["x"], "long": "y" * 900}, folder, \
first), 4) as track:
    for step in (first + 1, first + 2):
        track.on_metrics(step, {"critic/score/mean": step / 10, "val-core/openai/gsm8k/acc/mean@1": 0.25, \
"odd: name": float("nan")})
    track.log_table(step, "samples/train", ["prompt", "answer", "score"], [["1+1=?", "2 | ü\\n", 1.0], ["", "x", 0.0]])
"""


@pytest.fixture
def real(tmp_path, monkeypatch):
    """Run the above with the real package, and resume it; return the output, and the id of the run."""

    def run(name, **environment):
        pytest.importorskip(LOGGERS[name], reason=f"{name} is not installed (extra: trackers)", exc_type=ImportError)
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        said = ""
        for first_step in ("0", "2"):
            process = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", RUN, name, str(tmp_path), first_step],
                cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
            )  # fmt: skip
            said += process.stdout + process.stderr
            assert process.returncode == 0, said
        assert not re.search(r"tracker '\w+'( failed|: not finished)", said), said
        file = tmp_path / "tracking.json"
        return said, json.loads(file.read_text())[name] if file.exists() else None

    return run


def test_tensorboard_has_numbers_tables_config_and_summary(real, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    real("tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()

    def text(tag):
        return events.Tensors(f"{tag}/text_summary")[-1].tensor_proto.string_val[0].decode()

    assert [round(scalar.value, 6) for scalar in events.Scalars("critic/score/mean")] == [0.1, 0.2, 0.3, 0.4]
    assert "1+1=?" in text("samples/train")
    assert "a.b | 1" in text("config")
    assert "summary/best/critic/score/mean | 0.4" in text("summary")


# Without wandb itself: test_a_run_without_wandbs_server_keeps_files_and_says_so_once.
@pytest.mark.long
def test_wandb_without_a_login_goes_to_the_run_folder_and_asks_nothing(real, tmp_path, monkeypatch):
    for key in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(key, raising=False)
    said, run_id = real("wandb", HOME=str(tmp_path), WANDB_BASE_URL="http://127.0.0.1:9")
    assert said.count("not logged in (run `wandb login`") == 1
    assert said.count("earlier steps of this run are not sent yet. Metrics go to") == 1  # of the resumed one
    assert said.count(f"wandb sync {tmp_path}/wandb/offline-run-*") == 2
    folders = unsent_wandb(tmp_path)
    assert [folder.name.rpartition("-")[2] for folder in folders] == [run_id, run_id]
    kept = b"".join(file.read_bytes() for folder in folders for file in folder.glob("*.wandb"))
    assert all(word in kept for word in (b"critic/score/mean", b"summary/best/critic/score/mean"))
    (table,) = folders[0].rglob("*.table.json")
    assert json.loads(table.read_text())["data"][0] == ["1+1=?", "2 | ü\n", 1.0]


@pytest.mark.filterwarnings("ignore")  # of sqlalchemy, about mlflow's own code
@pytest.mark.parametrize(
    ("name", "environment", "words"),
    [
        ("mlflow", {"MLFLOW_TRACKING_URI": "sqlite:///{}/mlflow.db"}, ["critic/score/mean", "mean_at_1", "1+1=?"]),
        ("swanlab", {"SWANLAB_MODE": "offline"}, ["critic/score/mean", "mean@1", "1+1=?"]),
        ("clearml", {"CLEARML_OFFLINE_MODE": "1", "CLEARML_CACHE_DIR": "{}/cache"}, ["score/mean", "1+1=?"]),
        ("trackio", {"TRACKIO_DIR": "{}/trackio"}, ["critic/score/mean", "samples/train"]),
    ],
)
def test_other_trackers_keep_metrics_and_tables_on_this_machine(real, tmp_path, name, environment, words):
    for package in ("sqlalchemy", "alembic") if name == "mlflow" else ():
        pytest.importorskip(package, reason=f"mlflow's database needs {package} (extra: trackers)")
    real(name, HOME=str(tmp_path), **{key: value.format(tmp_path) for key, value in environment.items()})
    kept = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert [word for word in words if word.encode() not in kept] == []
