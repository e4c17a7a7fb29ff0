import importlib
import json
import logging
import re
import subprocess
import sys
import threading
import time
import types

import pytest

from rltrain.config.check import broken_rules
from rltrain.config.load import load_config
from rltrain.config.schema.trainer import LOGGERS
from rltrain.run.report import tracking
from rltrain.run.report.trackers import TRACKERS, RunInfo, Sink, markdown_table, unsent_wandb, wandb_login_lacks
from rltrain.run.report.tracking import Sender, Tracker, tracker_notes

METRICS = {"critic/score/mean": 0.5, "val-core/openai/gsm8k/acc/mean@1": 0.25, "odd: name": float("nan")}


def tracker(folder, loggers, first_step=0, config=None):
    run = RunInfo("project", "run", config or {"a": {"b": 1}, "files": ["x"]}, folder, first_step)
    return Tracker(loggers, run, total_steps=4)


def test_a_table_with_any_text_stays_one_line_a_row():
    text = markdown_table(["answer", "score"], [["a|b\nc", 0.123456], ["", 1]])
    assert text.splitlines() == ["| answer | score |", "| --- | --- |", "| a\\|b<br>c | 0.1235 |", "|  | 1 |"]


class Recorder(Sink):
    """Fails as ``fails`` (called with the number of the call) says."""

    def __init__(self, fails=lambda call: False):
        self.run_id = "id-1"
        self.calls, self.arrived, self._fails = 0, [], fails

    def _take(self, what):
        self.calls += 1
        if self._fails(what):
            raise ConnectionError("no route")
        self.arrived.append(what)

    def log(self, step, metrics):
        self._take(step)

    def log_table(self, step, name, columns, rows):
        self._take((name, columns, rows))

    def finish(self, summary, failed):
        self._take("failed" if failed else "finished")


def test_a_resumed_run_tells_the_best_of_all_its_steps(tmp_path, monkeypatch):
    """The tracker goes on with its run, whose summary is replaced at the end."""
    told, name = [], "critic/score/mean"
    sink = types.SimpleNamespace(run_id="1", log=lambda *_: None, finish=lambda summary, failed: told.append(summary))
    monkeypatch.setitem(TRACKERS, "tensorboard", lambda run: sink)
    scores = {1: 0.2, 2: 0.9, 3: 0.3}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": at, name: scores[at]}) + "\n" for at in scores))
    with tracker(tmp_path, ["tensorboard"], first_step=3) as resumed:
        for step, score in ((4, 0.5), (5, float("nan"))):
            resumed.on_metrics(step, {name: score})
    assert told == [{"summary/steps": 5, f"summary/best/{name}": 0.9, f"summary/last/{name}": 0.5}]


def finish(sender, limit_s=10):
    sender.ask_to_finish(lambda sink: sink.finish({}, False))
    sender.wait_until_finished(time.monotonic() + limit_s)


def until(holds, limit_s=10):
    deadline = time.monotonic() + limit_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert holds()


def test_after_a_failure_all_arrives_and_one_line_told(caplog):
    down = [True]
    sink = Recorder(lambda what: down[0])
    sender = Sender("far", lambda: sink, pauses_s=(0.01, 0.02))
    for step in range(1, 6):
        sender.put(lambda sink, step=step: sink.log(step, {}))
    until(lambda: sink.calls > 20)
    down[0] = False
    finish(sender)
    assert sink.arrived == [1, 2, 3, 4, 5, "finished"]
    told = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1
    assert "tracker 'far' failed (ConnectionError: no route). Training goes on" in told[0].getMessage()


def test_a_tracker_that_cannot_start_is_tried_again():
    attempts = []

    def make():
        attempts.append(1)
        if len(attempts) < 4:
            raise OSError("not yet")
        return Recorder()

    sender = Sender("late", make, pauses_s=(0.01, 0.02))
    sender.put(lambda sink: sink.log(1, {}))
    finish(sender)
    assert sender._sink.arrived == [1, "finished"]


def test_one_entry_that_is_refused_does_not_hold_up_the_others(caplog):
    sink = Recorder(lambda what: what == 2)
    sender = Sender("picky", lambda: sink, pauses_s=(0.001, 0.002))
    for step in range(1, 10):
        sender.put(lambda sink, step=step: sink.log(step, {}))
        until(lambda step=step: step == 2 or step in sink.arrived)
    finish(sender)
    assert sink.arrived == [1, 3, 4, 5, 6, 7, 8, 9, "finished"]
    assert "1 entries did not arrive" in caplog.text


def test_a_tracker_that_hangs_neither_slows_nor_holds_up_the_end(tmp_path, monkeypatch, caplog):
    release = threading.Event()

    class Hanging(Recorder):
        def __init__(self, run):
            super().__init__()

        def log(self, step, metrics):
            release.wait()

    monkeypatch.setitem(TRACKERS, "wandb", Hanging)
    monkeypatch.setattr(tracking, "missing_package", lambda name: None)
    monkeypatch.setattr(tracking, "CLOSE_S", 0.2)
    track = tracker(tmp_path, ["wandb"])
    started = time.monotonic()
    for step in range(1, 4):
        track.on_metrics(step, METRICS)
    track.close()
    assert time.monotonic() - started < 10  # what hangs is never released
    assert "tracker 'wandb': not finished" in caplog.text
    assert tracking.hanging()
    release.set()
    until(lambda: not tracking.hanging())
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_the_queue_is_bounded_and_the_oldest_go_first(monkeypatch):
    monkeypatch.setattr(tracking, "MOST_KEPT", 3)
    down = [True]
    sink = Recorder(lambda what: down[0])
    sender = Sender("full", lambda: sink, pauses_s=(0.01, 0.01))
    for step in range(1, 8):
        sender.put(lambda sink, step=step: sink.log(step, {}))
    down[0] = False
    finish(sender)
    assert sink.arrived == [5, 6, 7, "finished"]


@pytest.fixture
def recorded(monkeypatch):
    """wandb is a recorder; returns what it was made with."""
    made = []

    class Made(Recorder):
        def __init__(self, run):
            super().__init__()
            made.append((run, self))

    monkeypatch.setitem(TRACKERS, "wandb", Made)
    monkeypatch.setattr(tracking, "missing_package", lambda name: None)
    return made


def test_a_resumed_run_goes_on_in_the_same_tracker_run(tmp_path, recorded):
    for first_step in (0, 2, 0):
        with tracker(tmp_path, ["wandb"], first_step):
            pass
    assert [run.run_id for run, _ in recorded] == [None, "id-1", None]
    assert json.loads((tmp_path / "tracking.json").read_text()) == {"wandb": "id-1"}


def test_a_damaged_list_of_tracker_runs_begins_new_ones(tmp_path, recorded, caplog):
    for damage in ("", "[1]", "\ufffd{"):
        (tmp_path / "tracking.json").write_text(damage)
        with tracker(tmp_path, ["wandb"], 2):
            pass
    assert [run.run_id for run, _ in recorded] == [None] * 3
    assert caplog.text.count("so trackers begin new runs") == 3


@pytest.mark.fault("A tracker that cannot write is told once, and the run and its metrics.jsonl go on")
def test_trackers_that_cannot_write_are_told_once(tmp_path, recorded, caplog, monkeypatch):
    """A file is in the place of TensorBoard's folder, and a folder in that of the list of ids."""
    (tmp_path / "tensorboard").write_text("")
    (tmp_path / "tracking.tmp").mkdir()
    with tracker(tmp_path, ["tensorboard", "wandb"]) as track:
        for step in range(1, 4):
            track.on_metrics(step, METRICS)
        until(lambda: caplog.text.count("tracker 'tensorboard' failed (") == 1 and len(recorded) == 1)
        monkeypatch.setattr(tracking, "CLOSE_S", 0.2)
    assert [sink.arrived for _, sink in recorded] == [[1, 2, 3, "finished"]]
    assert caplog.text.count("so a resumed run begins new tracker runs") == 1
    assert "tracker 'tensorboard': not finished, 3 entries did not arrive" in caplog.text
    (tmp_path / "tensorboard").unlink()
    until(lambda: not tracking.hanging())  # it is still tried
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_tracker_that_ends_its_thread_is_tried_again(caplog):
    calls = []

    def log(step):
        calls.append(step)
        if len(calls) < 3:
            raise SystemExit("no account")

    sender = Sender("rude", Recorder, pauses_s=(0.01, 0.02))
    sender.put(lambda sink: log(1))
    finish(sender)
    assert calls == [1, 1, 1]
    assert "tracker 'rude' failed (SystemExit: no account)" in caplog.text


def test_a_run_that_fails_is_not_marked_as_finished(tmp_path, recorded):
    with pytest.raises(ZeroDivisionError), tracker(tmp_path, ["wandb"]):
        raise ZeroDivisionError
    with tracker(tmp_path, ["wandb"]):
        pass
    assert [sink.arrived for _, sink in recorded] == [["failed"], ["finished"]]


def test_a_tracker_that_is_not_installed_is_named_and_left_out(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with tracker(tmp_path, ["vemlp_wandb", "file"]) as track:
        track.on_metrics(1, METRICS)
    assert "trainer.logger=vemlp_wandb needs 'pip install volcengine_ml_platform'" in caplog.text
    assert (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", ["evil_tracker", "evil_tracker:Tracker", "evil_tracker.py:Tracker", "../evil_tracker"])
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
        "main_ppo._main = lambda *_: 75\n"
        "sys.exit(main_ppo.main([]))"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60, check=False)
    assert process.returncode == 75


def test_volcengine_is_called_as_its_documentation_says(tmp_path, monkeypatch):
    calls = []
    package, module = types.ModuleType("volcengine_ml_platform"), types.ModuleType("volcengine_ml_platform.wandb")
    package.init = lambda **given: calls.append(given)
    module.init = module.log = lambda *given, **named: calls.append((*given, *named.items()))
    module.finish, module.Table = lambda: calls.append("finish"), lambda columns, data: (columns, data)
    package.wandb = module
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("VOLC_ACCESS_KEY_ID", "VOLC_SECRET_ACCESS_KEY", "MLP_TRACKING_REGION"):
        monkeypatch.setenv(name, name.lower())
    sink = TRACKERS["vemlp_wandb"](RunInfo("p", "n", {}, tmp_path))
    sink.log(1, {"x": 1.0})
    sink.finish({"y": 2.0}, False)
    account = {"ak": "volc_access_key_id", "sk": "volc_secret_access_key", "region": "mlp_tracking_region"}
    assert calls == [
        account,
        (("project", "p"), ("name", "n"), ("config", {})),
        ({"x": 1.0}, ("step", 1)),
        ({"y": 2.0},),
        "finish",
    ]


class StandInOfWandb(types.ModuleType):
    """wandb as far as a run's start uses it. ``refuses``: which call raises, as wandb does without its server."""

    def __init__(self, mode="online", api_key="key", refuses=""):
        super().__init__("wandb")
        self.modes, self._refuses = [], refuses
        self.errors = types.SimpleNamespace(Error=type("CommError", (Exception,), {}))
        self.settings = types.SimpleNamespace(mode=mode, api_key=api_key, base_url="https://wandb.example")
        self.setup, self.Settings = lambda: self, lambda **given: given

    def login(self, prompt=True, verify=False):
        assert (prompt, verify) == (False, True)
        return not self._fail("login")

    def init(self, mode=None, **_):
        self._fail("init" if mode != "offline" else "")
        self.modes.append(mode)
        return types.SimpleNamespace(id="abc", define_metric=lambda *_, **__: None)

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


@pytest.mark.parametrize(("mark", "mode"), [("run-abc.wandb", "offline"), ("run-abc.wandb.synced", None)])
def test_a_resumed_run_goes_online_once_its_earlier_steps_are_sent(tmp_path, monkeypatch, mark, mode):
    wandb = StandInOfWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    folder = tmp_path / "wandb" / "offline-run-20260101_000000-abc"
    folder.mkdir(parents=True)
    for name in ("run-abc.wandb", mark):
        (folder / name).touch()
    TRACKERS["wandb"](RunInfo("p", "n", {}, tmp_path, 2, "abc"))
    TRACKERS["wandb"](RunInfo("p", "n", {}, tmp_path))
    assert wandb.modes == [mode, None]  # another run need not wait


@pytest.mark.parametrize(
    ("mode", "key", "netrc", "lacks"),
    [
        ("online", None, "", True),
        ("online", "key", "", False),
        ("online", None, "machine wandb.example login user password key\n", False),
        ("offline", None, "", False),
    ],
)
def test_a_dry_run_says_whether_there_is_a_login(tmp_path, monkeypatch, mode, key, netrc, lacks):
    monkeypatch.setitem(sys.modules, "wandb", StandInOfWandb(mode, key))
    monkeypatch.setattr(tracking, "missing_package", lambda name: None)
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
    """Runs the above with the real package, and resumes it; returns what was said, and the id of the run."""

    def run(name, **environment):
        pytest.importorskip(LOGGERS[name], reason=f"{name} is not installed (extra: trackers)", exc_type=ImportError)
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        said = ""
        for first_step in ("0", "2"):
            process = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", RUN, name, str(tmp_path), first_step],
                cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
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


# What is sent to it, without wandb itself: the tests above.
@pytest.mark.long
def test_wandb_offline(real, tmp_path):
    _, run_id = real("wandb", WANDB_MODE="offline")
    folders = sorted((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))
    assert len(folders) == 2  # of one run: synced, they are one
    kept = b"".join(file.read_bytes() for folder in folders for file in folder.glob("*.wandb"))
    for word in (b"critic/score/mean", b"summary/best/critic/score/mean"):
        assert word in kept
    (table,) = folders[0].rglob("*.table.json")
    assert json.loads(table.read_text())["data"][0] == ["1+1=?", "2 | ü\n", 1.0]


def test_wandb_loses_no_step_that_is_made_again(tmp_path, monkeypatch):
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="wandb is not installed (extra: trackers)")
    monkeypatch.setenv("WANDB_MODE", "offline")
    code = (
        f"from rltrain.run.report.trackers import *; sink = WandB(RunInfo('p', 'n', {{}}, Path({str(tmp_path)!r})))\n"
        "for step in (1, 4, 3, 4): sink.log(step, {'x': step})\n"
        "sink.log_table(2, 'answers', ['a'], [['1']]); sink.finish({}, False)"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=100, check=True, cwd=tmp_path)
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    found, metrics, data, place = [], {}, file.read_bytes(), 7
    while place < len(data):  # one block of a LevelDB log: checksum, length and kind before each record
        size = int.from_bytes(data[place + 4 : place + 6], "little")
        record = pb.Record.FromString(data[place + 7 : place + 7 + size])
        place += 7 + size
        if record.metric.step_metric:
            metrics[record.metric.glob_name] = record.metric.step_metric
        row = {item.nested_key[0] if item.nested_key else item.key: item.value_json for item in record.history.item}
        if row:
            found.append((row["training/global_step"], row.get("x"), "answers" in row))
    assert found == [(step, step, False) for step in ("1", "4", "3", "4")] + [("2", None, True)]
    assert metrics == {"*": "training/global_step"}


# Without wandb itself: test_a_run_without_wandbs_server_keeps_files_and_says_so_once.
@pytest.mark.long
def test_wandb_without_a_login_goes_to_the_run_folder_and_asks_nothing(real, tmp_path, monkeypatch):
    for key in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(key, raising=False)
    said, run_id = real("wandb", HOME=str(tmp_path), WANDB_BASE_URL="http://127.0.0.1:9")
    assert said.count("not logged in (run `wandb login`") == 1
    assert said.count("earlier steps of this run are not sent yet. Metrics go to") == 1  # of the resumed one
    assert said.count(f"wandb sync {tmp_path}/wandb/offline-run-*") == 2
    assert [folder.name.rpartition("-")[2] for folder in unsent_wandb(tmp_path)] == [run_id, run_id]


@pytest.mark.filterwarnings("ignore")  # of sqlalchemy, about mlflow's own code
def test_mlflow_in_a_database_of_its_own(real, tmp_path):
    pytest.importorskip("sqlalchemy", reason="mlflow's database needs sqlalchemy (extra: trackers)")
    pytest.importorskip("alembic", reason="mlflow's database needs alembic (extra: trackers)")
    _, run_id = real("mlflow", MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/mlflow.db")
    client = importlib.import_module("mlflow").MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["a.b"] == "1"
    assert run.data.metrics["val-core/openai/gsm8k/acc/mean_at_1"] == 0.25
    assert [each.step for each in client.get_metric_history(run_id, "critic/score/mean")] == [1, 2, 3, 4]
    table = tmp_path / "mlruns"
    assert [file.name for file in sorted(table.rglob("step_*.json"))] == ["step_000002.json", "step_000004.json"]


def test_swanlab_offline(real, tmp_path):
    _, run_id = real("swanlab", SWANLAB_MODE="offline", HOME=str(tmp_path))
    folders = sorted((tmp_path / "swanlog").glob(f"run-*-{run_id}"))
    assert len(folders) == 2
    kept = b"".join(file.read_bytes() for file in (tmp_path / "swanlog").rglob("*") if file.is_file())
    for word in (b"critic/score/mean", b"mean@1", b"1+1=?"):
        assert word in kept


def test_clearml_offline(real, tmp_path):
    _, run_id = real("clearml", CLEARML_OFFLINE_MODE="1", CLEARML_CACHE_DIR=str(tmp_path / "cache"), HOME=str(tmp_path))
    assert run_id.startswith("offline-")
    assert len(list((tmp_path / "cache" / "offline").glob("*.zip"))) == 2  # an offline task cannot go on
    kept = b"".join(file.read_bytes() for file in tmp_path.rglob("*.jsonl") if run_id in str(file))
    assert b"score/mean" in kept
    assert b"1+1=?" in kept


def test_trackio_on_this_machine(real, tmp_path):
    said, run_id = real("trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    assert run_id == "run"
    assert "Resumed existing run: run" in said
    code = (
        "import json, trackio; run, = trackio.Api().runs('project');"
        "print(json.dumps(trackio.sqlite_storage.SQLiteStorage.get_logs('project', 'run'), default=str))"
    )
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    lines = json.loads(process.stdout.splitlines()[-1])
    assert [line["critic/score/mean"] for line in lines if "critic/score/mean" in line] == [0.1, 0.2, 0.3, 0.4]
    assert any("samples/train" in line for line in lines)
