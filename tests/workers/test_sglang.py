"""The SGLang adapter beyond the contract of all engines: what it passes exists in the real API, and how it fails."""

import importlib.util
import sys

import pytest
import torch
from torch import nn

from rltrain.config.rollout_schema import RolloutConfig
from rltrain.device import get_device
from rltrain.errors import ConfigError, SyncError
from rltrain.workers.rollout import rows, sglang
from rltrain.workers.rollout.base import Sampling, WeightPiece, fingerprint_of
from rltrain.workers.rollout.queue import Replica
from rltrain.workers.rollout.rows import header_of, load_rows, report_rows
from tests.workers import sglang_double
from tests.workers.engines import ALONE, generate
from tests.workers.record_sglang_api import record
from tests.workers.test_engine_contract import PROMPTS, fingerprint_of_model, load, pieces_of, plain  # noqa: F401


@pytest.fixture
def make(tiny_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", sglang_double)
    made = []

    def make(device="cpu", replica=ALONE, **changes):
        rollout = RolloutConfig()
        rollout.max_num_seqs = 6
        for name, value in changes.items():
            setattr(rollout, name, value)
        engine = sglang.SGLangRollout(
            str(tiny_model), rollout, dtype=torch.float32, device=get_device(device), replica=replica, eos_token_ids=[1],
            max_model_len=64,
        )  # fmt: skip
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


if importlib.util.find_spec("sglang"):

    @pytest.mark.filterwarnings("ignore")
    def test_the_recorded_api_is_that_of_the_installed_version():
        assert record() == sglang_double.API


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_every_setting_is_one_that_sglang_has(device, make):
    engine = make(device)._engine
    assert set(engine.settings) <= set(sglang_double.API["ServerArgs"])
    # What the contract needs, and what cannot be had on the CPU.
    assert (
        engine.settings["enable_deterministic_inference"] == engine.settings["enable_memory_saver"] == (device != "cpu")
    )
    assert engine.settings["json_model_override_args"] == '{"eos_token_id": [1]}'


def test_settings_of_the_user_win_and_wrong_ones_are_named(make):
    assert make(engine_kwargs={"sglang": {"attention_backend": "fa3"}})._engine.settings["attention_backend"] == "fa3"
    with pytest.raises(ConfigError, match=r"engine_kwargs.sglang: .*atention_backend"):
        make(engine_kwargs={"sglang": {"atention_backend": "fa3"}})


def test_without_sglang_the_error_says_what_to_install(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(ConfigError, match=r"pip install rltrain\[sglang\]"):
        make()


def test_tensor_parallel_replicas_are_refused(make):
    with pytest.raises(ConfigError, match="tensor_model_parallel_size=2"):
        make(replica=Replica(number=0, count=1, member=0, size=2))


def test_memory_is_given_back_and_taken_in_stages(make, plain):  # noqa: F811
    engine = make()
    calls = engine._engine.calls
    assert calls == ["flush_cache", "release_memory_occupation"]
    calls.clear()
    load(engine, pieces_of(plain))
    assert calls[:2] == ["resume_memory_occupation", "begin_weight_update"]
    assert calls[-3:] == ["end_weight_update", "resume_memory_occupation", "flush_cache"]
    engine.sleep()
    engine.sleep()
    assert calls.count("release_memory_occupation") == 1


def test_an_engine_that_keeps_its_memory_never_sleeps(make, plain):  # noqa: F811
    engine = make(free_cache_engine=False)
    for _ in range(2):
        assert load(engine, pieces_of(plain)) == fingerprint_of_model(plain)
        engine.sleep()
    assert not {"release_memory_occupation", "resume_memory_occupation"} & set(engine._engine.calls)


def test_a_cache_that_is_not_reset_is_an_error(make, monkeypatch):
    engine = make()
    monkeypatch.setattr(sglang, "_IDLE_WITHIN_S", 0.0)
    engine._engine._running.add("a request")
    with pytest.raises(SyncError, match="did not reset its cache"):
        engine.wake_cache()


def test_an_update_that_sglang_refuses_is_an_error(make, plain):  # noqa: F811
    engine = make()
    engine.wake_weights()
    engine._engine.begin_weight_update()
    with pytest.raises(SyncError, match="a session is open"):
        engine.load_weights(pieces_of(plain))


def test_the_engine_is_full_but_never_over_full(make, plain):  # noqa: F811
    engine = make()
    load(engine, pieces_of(plain))
    generate(engine, Sampling(12), PROMPTS * 2, 2)
    assert engine._engine.most_running == 6


def test_what_the_engine_raises_is_raised(make, plain, monkeypatch):  # noqa: F811
    engine = make()
    load(engine, pieces_of(plain))

    async def fail(**arguments):
        raise ValueError("the input is too long")

    monkeypatch.setattr(engine._engine, "async_generate", fail)
    with pytest.raises(ValueError, match="too long"):
        generate(engine, Sampling(4), PROMPTS, 1)


def piece(name, values, start=0, shape=None):
    return WeightPiece(name, shape or tuple(values.shape), start, values)


def sync(model, pieces, file):
    for one in pieces:
        load_rows(model, [(header_of(one), one.values)])
    report_rows(model, [(str(file), torch.zeros(1))])
    return rows.json.loads(file.read_text())


class Odd(nn.Module):
    """Two weights in one, the first of them twice; and one that is turned."""

    def __init__(self):
        super().__init__()
        self.fused, self.copy, self.turned = torch.zeros(5, 3), torch.zeros(2, 3), torch.zeros(3, 2)

    def load_weights(self, weights):
        for name, weight in weights:
            {"a": self._load_a, "b": self.fused[2:].copy_, "turned": self._turn}[name](weight)

    def _load_a(self, weight):
        self.fused[:2].copy_(weight)
        self.copy.copy_(weight)

    def _turn(self, weight):
        self.turned.copy_(weight.t())


def test_rows_land_where_the_engines_loader_would_put_them(tmp_path):
    model, a, b = Odd(), torch.randn(2, 3), torch.randn(3, 3)
    cut = [piece("a", a[1:], 1, (2, 3)), piece("b", b), piece("a", a[:1], 0, (2, 3))]
    report = sync(model, cut, tmp_path / "report")
    assert torch.equal(model.fused, torch.cat([a, b]))
    assert torch.equal(model.copy, a)
    assert report["fingerprint"] == (fingerprint_of("a", 0, a) + fingerprint_of("b", 0, b)) % 2**64
    assert report["refused"] == {}


def test_the_fingerprint_is_of_what_the_engine_holds(tmp_path, monkeypatch):
    """Not of what was sent: a weight that was overwritten, or a copy that was not written, is seen."""
    a, b = torch.randn(2, 3), torch.randn(3, 3)
    right = sync(Odd(), [piece("a", a), piece("b", b)], tmp_path / "report")["fingerprint"]
    for spoil in (lambda model: model.fused[1, 2].add_(1), lambda model: model.copy[0, 0].add_(1)):
        model = Odd()
        load_rows(model, [(header_of(one), one.values) for one in (piece("a", a), piece("b", b))])
        spoil(model)
        assert sync(model, [], tmp_path / "report")["fingerprint"] != right


def test_a_weight_that_cannot_be_followed_is_named(tmp_path, make, plain):  # noqa: F811
    report = sync(Odd(), [piece("turned", torch.randn(2, 3)), piece("c", torch.randn(2))], tmp_path / "report")
    assert set(report["refused"]) == {"turned", "c"}
    engine = make()
    engine.wake_weights()
    with pytest.raises(ConfigError, match="takes 1 weights in a way that rltrain cannot follow, experts"):
        engine.load_weights(iter([*pieces_of(plain), piece("experts", torch.randn(2, 2))]))


def test_a_buffer_is_loaded_but_not_counted(tmp_path):
    model, a = Odd(), torch.randn(2, 3)
    buffer = WeightPiece("b", (3, 3), 0, torch.ones(3, 3), buffer=True)
    assert sync(model, [piece("a", a), buffer], tmp_path / "report")["fingerprint"] == fingerprint_of("a", 0, a) % 2**64
    assert torch.equal(model.fused[2:], torch.ones(3, 3))
