"""The SGLang adapter beyond the contract of all engines: what it passes exists in the real API, and how it fails."""

import multiprocessing
import os
import sys
from dataclasses import replace

import pytest
import torch

from rltrain.base.device import Device
from rltrain.base.errors import ConfigError, SyncError
from rltrain.models.weights.names import Weight
from rltrain.workers.rollout.contract import Sampling
from rltrain.workers.rollout.queue import Replica
from rltrain.workers.rollout.settings import make_engine
from rltrain.workers.rollout.sglang import engine as sglang
from tests.workers import sglang_double
from tests.workers.engines import engine_of, generate, rollout_of, settings_of
from tests.workers.test_engine_contract import PROMPTS, load, plain, weights_of  # noqa: F401


@pytest.fixture
def make(tiny_model, monkeypatch):
    for name, module in sglang_double.MODULES.items():
        monkeypatch.setitem(sys.modules, name, module)
    made = []

    def make(device="cpu", **keys):
        engine = engine_of("sglang", str(tiny_model), rollout_of(max_num_seqs=6, **keys), device=device)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_settings_of_the_contract_follow_the_device(device, make):
    engine = make(device)._engine
    # What the contract needs, and what cannot be had on the CPU.
    assert (
        engine.settings["enable_deterministic_inference"] == engine.settings["enable_memory_saver"] == (device != "cpu")
    )
    assert engine.settings["json_model_override_args"] == '{"eos_token_id": [1]}'


def test_settings_of_the_user_win_and_wrong_ones_are_named(make):
    assert make(engine_kwargs={"sglang": {"attention_backend": "fa3"}})._engine.settings["attention_backend"] == "fa3"
    assert make(engine_kwargs={"sglang": None})
    with pytest.raises(ConfigError, match=r"engine_kwargs.sglang: .*atention_backend"):
        make(engine_kwargs={"sglang": {"atention_backend": "fa3"}})


def test_without_sglang_the_error_says_what_to_install(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(ConfigError, match=r"pip install rltrain\[sglang\]"):
        make()


def test_memory_is_given_back_and_taken_in_stages(make, plain):  # noqa: F811
    engine = make()
    calls = engine._engine.calls
    assert calls == ["flush_cache", "release_memory_occupation"]
    calls.clear()
    load(engine, weights_of(plain))
    assert calls[:2] == ["resume_memory_occupation", "begin_weight_update"]
    assert calls[-3:] == ["end_weight_update", "resume_memory_occupation", "flush_cache"]
    engine.sleep()
    engine.sleep()
    assert calls.count("release_memory_occupation") == 1


def test_an_engine_that_keeps_its_memory_never_sleeps(make, plain):  # noqa: F811
    engine = make(free_cache_engine=False)
    for _ in range(2):
        load(engine, weights_of(plain))
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
        engine.load_weights(weights_of(plain))


def test_the_engine_is_full_but_never_over_full(make, plain):  # noqa: F811
    engine = make()
    load(engine, weights_of(plain))
    generate(engine, Sampling(12), PROMPTS * 2, 2)
    assert engine._engine.most_running == 6


def test_tokens_of_images_are_never_drawn(make, plain, monkeypatch):  # noqa: F811
    def drawn() -> list[set[int]]:
        load(engine := make(), weights_of(plain))
        ways = (Sampling(30, temperature=2.0), Sampling(30, greedy=True))
        return [set(generate(engine, sampling, PROMPTS, 4).tokens.values.tolist()) for sampling in ways]

    often = set.intersection(*drawn())
    assert often
    monkeypatch.setattr(sglang, "placeholder_ids", lambda config: sorted(often))
    assert not often & set.union(*drawn())


def test_what_the_engine_raises_is_raised(make, plain, monkeypatch):  # noqa: F811
    engine = make()
    load(engine, weights_of(plain))

    async def fail(**arguments):
        raise ValueError("the input is too long")

    monkeypatch.setattr(engine._engine, "async_generate", fail)
    with pytest.raises(ValueError, match="too long"):
        generate(engine, Sampling(4), PROMPTS, 1)


def test_a_weight_that_the_model_does_not_take_is_named(make, plain):  # noqa: F811
    engine = make()
    engine.wake_weights()
    with pytest.raises(ConfigError, match=r"does not take 1 of the trainer's weights, experts among them .*KeyError"):
        engine.load_weights(iter([*weights_of(plain), Weight("experts", torch.randn(2, 2))]))
    load(engine, weights_of(plain))  # what was refused is forgotten with its sync


def test_buffers_go_along_only_if_a_checkpoint_has_them(make, plain, monkeypatch):  # noqa: F811
    engine, names = make(), []
    take = engine._engine.model.load_weights
    monkeypatch.setattr(
        engine._engine.model, "load_weights", lambda found: names.extend(n for n, _ in found) or take(found)
    )
    load(engine, weights_of(plain))
    assert names == [name for name, _ in plain.named_parameters()]


class Pair(Replica):
    """A replica of two members that stand still: the other's device is the one before."""

    def agree(self, found):
        return found

    def gather(self, found):
        return [found, str(int(found) - 1)] if found else [found, found]


@pytest.fixture
def pair(make, tiny_model, monkeypatch):
    """pair(member, device): the adapter of a member; it sees one device, whose number is 3."""
    seen = []

    class Recorder(sglang_double.Engine):
        def __init__(self, **settings) -> None:
            seen.append({name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")})
            assert settings.pop("tp_size") == 2
            super().__init__(tp_size=1, **settings)

    # The key of this process is that of the tests that follow, too.
    monkeypatch.setattr(multiprocessing.current_process(), "authkey", b"a key")
    monkeypatch.setattr(sglang_double, "Engine", Recorder)
    monkeypatch.setattr(Device, "count", 1)
    for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "3")
    monkeypatch.delenv("NCCL_ALGO", raising=False)

    def pair(member: int, device: str):
        settings = settings_of(str(tiny_model), rollout_of(name="sglang"), device=device)
        return make_engine(replace(settings, replica=Pair(0, 1, member, 2))), seen

    return pair


@pytest.mark.parametrize(("device", "variable"), [("cuda", "CUDA_VISIBLE_"), ("npu", "ASCEND_RT_VISIBLE_")])
def test_an_engine_sees_the_devices_of_all_members(device, variable, pair):
    engine, seen = pair(0, device)
    other = ({"CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"} - {variable + "DEVICES"}).pop()
    assert seen == [{variable + "DEVICES": "3,2", other: "3"}], "in the order of its processes"
    assert os.environ[variable + "DEVICES"] == "3", "the worker goes on with its own"
    assert "NCCL_ALGO" not in os.environ, "the trainer's communicators are set up alike on all ranks"
    engine.close()


def test_a_member_that_does_not_lead_starts_no_engine(pair):
    engine, seen = pair(1, "cuda")
    assert seen == []
    assert len(generate(engine, Sampling(4), PROMPTS, 1).tokens.lengths) == 0
    assert engine.sleep()


@pytest.mark.parametrize("chosen", ["0,1", ""])
def test_a_worker_that_sees_several_devices_is_told(chosen, pair, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    with pytest.raises(ConfigError, match="needs workers that see one device each"):
        pair(0, "cuda")


def test_weights_travel_in_handfuls_and_every_one_arrives(make, plain):  # noqa: F811
    """One call each with a bucket of nothing; with a large one a single call, and a refusal keeps no other out."""
    for size, expected in ((1 << 30, 2), (0, len(list(plain.parameters())) + 1)):
        engine = make()
        engine._bucket_bytes = size
        update, calls = engine._engine.update_weights_from_tensor, []
        engine._engine.update_weights_from_tensor = lambda **how: calls.append(1) or update(**how)  # noqa: B023
        load(engine, weights_of(plain))
        assert len(calls) == expected, "the last call asks what was refused"
        assert generate(engine, Sampling(4, greedy=True), PROMPTS, 1).tokens.lengths.sum() > 0
