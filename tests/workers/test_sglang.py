"""The SGLang adapter beyond the contract of all engines: its arguments exist in the real API, and its failures."""

import importlib.util
import multiprocessing
import os
import sys
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForImageTextToText

from rltrain.common.clock import SYSTEM
from rltrain.common.device import Device, get_device
from rltrain.common.errors import ConfigError, SyncError
from rltrain.config.schema.engines import ENGINES
from rltrain.data.chat import ChatEncoder
from rltrain.models.vision import placeholder_ids
from rltrain.models.weights.names import CheckpointNames, Weight, gathered_weights
from rltrain.workers.rollout.contract import Sampling
from rltrain.workers.rollout.queue import Replica
from rltrain.workers.rollout.settings import make_engine
from rltrain.workers.rollout.sglang.engine import SGLangRollout
from tests.clock import VirtualClock
from tests.distance import distance
from tests.models.test_vision_packed import batch_of, encoded_prompts, make_folder, one_by_one
from tests.models.test_vision_packed import make as make_policy
from tests.workers import sglang_double
from tests.workers.engines import generate, queue_of, rollout_of, serve, settings_of
from tests.workers.sglang_double import sglang_engine
from tests.workers.test_engine_contract import PROMPTS, answers, load, plain, weights_of  # noqa: F401
from tests.workers.test_engine_images import jobs_of

VISIBLE = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


@pytest.fixture
def make(tiny_model, monkeypatch):
    for name, module in sglang_double.MODULES.items():
        monkeypatch.setitem(sys.modules, name, module)
    made = []

    def make(device="cpu", clock=SYSTEM, **keys):
        rollout = rollout_of(name="sglang", max_num_seqs=6, **keys)
        engine = SGLangRollout(settings_of(str(tiny_model), rollout, device=device), clock)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_settings_of_the_contract_follow_the_device(device, make):
    settings = make(device).engine.settings
    # What the contract needs, and what cannot be had on the CPU.
    assert settings["enable_deterministic_inference"] == settings["enable_memory_saver"] == (device != "cpu")
    assert settings["json_model_override_args"] == '{"eos_token_id": [1]}'


def test_settings_of_the_user_win_and_wrong_ones_are_named(make, monkeypatch):
    assert make(engine_kwargs={"sglang": {"attention_backend": "fa3"}}).engine.settings["attention_backend"] == "fa3"
    with pytest.raises(ConfigError, match=r"engine_kwargs.sglang: .*atention_backend"):
        make(engine_kwargs={"sglang": {"atention_backend": "fa3"}})
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(ConfigError, match=r"pip install rltrain\[sglang\]"):
        make()


def test_memory_is_given_back_and_taken_in_stages(make, plain):  # noqa: F811
    engine = make()
    calls = engine.engine.calls
    assert calls == ["flush_cache", "release_memory_occupation"]
    calls.clear()
    load(engine, weights_of(plain))
    assert calls[:2] == ["resume_memory_occupation", "begin_weight_update"]
    assert calls[-3:] == ["end_weight_update", "resume_memory_occupation", "flush_cache"]
    engine.sleep()
    engine.sleep()
    assert calls.count("release_memory_occupation") == 1
    assert not {"release_memory_occupation", "resume_memory_occupation"} & {*make(free_cache_engine=False).engine.calls}


def test_failures_of_the_engine_are_errors(make, plain):  # noqa: F811
    engine = make(clock=VirtualClock())
    engine.wake_weights()
    weights = [*weights_of(plain), Weight("experts", torch.randn(2, 2))]
    with pytest.raises(ConfigError, match=r"does not accept 1 of the trainer's weights, such as experts .*KeyError"):
        engine.load_weights(iter(weights))
    engine.engine.begin_weight_update()
    with pytest.raises(SyncError, match="a session is open"):
        engine.load_weights(weights_of(plain))
    engine.engine.flush_cache = lambda: SimpleNamespace(success=False)  # a request is still running
    with pytest.raises(SyncError, match="did not reset its cache within 60 s"):
        engine.wake_cache()

    async def fail(**arguments):
        raise ValueError("the input is too long")

    engine.engine.async_generate = fail
    with pytest.raises(ValueError, match="too long"):
        generate(engine, Sampling(4), PROMPTS, 1)


def test_the_engine_is_full_but_never_over_full(make, plain):  # noqa: F811
    engine = make()
    load(engine, weights_of(plain))
    generate(engine, Sampling(12), PROMPTS * 2, 2)
    assert engine.engine.most_running == 6


def test_tokens_of_images_are_never_drawn(make, plain, monkeypatch):  # noqa: F811
    def drawn() -> set[int]:
        load(engine := make(), weights_of(plain))
        return set(generate(engine, Sampling(30, greedy=True), PROMPTS, 1).tokens.values.tolist())

    often = drawn()
    monkeypatch.setattr("rltrain.workers.rollout.sglang.engine.placeholder_ids", lambda config: sorted(often))
    assert not often & drawn()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("engine", ["double", *(["sglang"] if importlib.util.find_spec("sglang") else [])])
@pytest.mark.parametrize("family", ENGINES["sglang"].images)
def test_images_are_computed_as_by_the_trainer(family, engine, tmp_path):
    """The scores of the text after an image, which the canary compares, and the log-probs of answers. Placeholders are
    left out of the latter, because SGLang gets a bias against them."""
    folder = make_folder(tmp_path, family)
    encoder, policy = ChatEncoder(folder), make_policy(folder)
    asked = encoded_prompts(encoder, with_videos=False)
    reference = AutoModelForImageTextToText.from_pretrained(folder).eval()
    with sglang_engine(folder, rollout_of(max_num_seqs=6), double=engine == "double") as rollout:
        load(rollout, gathered_weights(policy, torch.float32, names=CheckpointNames(policy.model)))
        found = serve(rollout, queue_of(jobs_of(asked, 2)), Sampling(12, ignore_eos=True))
        scores = [rollout.log_probs(each) for each in asked]
    rows = zip(asked, scores, one_by_one(batch_of(asked, torch.arange(len(asked)), [[7]] * len(asked))), strict=True)
    for text, score, (inputs, length, _) in rows:
        with torch.no_grad():
            log_pi = reference(**inputs, use_cache=False).logits[0, : length - 1].log_softmax(-1)
        of_all = log_pi.gather(-1, inputs["input_ids"][0, 1:length, None])[:, 0]
        assert distance(score[text.image_end :], of_all[text.image_end :]) < 1e-5
    expected, index = [], torch.arange(len(asked)).repeat_interleave(2)
    for inputs, length, answer in one_by_one(batch_of(asked, index, answers(found))):
        with torch.no_grad():
            logits = reference(**inputs, use_cache=False).logits[0, length - 1 : length - 1 + len(answer)]
        logits[:, placeholder_ids(reference.config)] = -torch.inf
        expected.append(logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0])
    assert distance(found.log_probs.values, torch.cat(expected)) < 1e-5


def test_weights_travel_in_buckets(make, plain):  # noqa: F811
    """With a bucket of size 0 each weight needs a call; the last call requests the weights that were refused."""
    for megabytes, expected in ((1 << 10, 2), (0, len(list(plain.parameters())) + 1)):
        engine = make(update_weights_bucket_megabytes=megabytes)
        load(engine, weights_of(plain))
        assert engine.engine.calls.count("update_weights_from_tensor") == expected
        assert generate(engine, Sampling(4, greedy=True), PROMPTS, 1).tokens.lengths.sum() > 0


class Pair(Replica):
    """A replica of two members that do not run; the other member's device is the one before."""

    def agree(self, found):
        return found

    def gather(self, found):
        return [found, str(int(found) - 1)] if found else [found, found]


@dataclass(frozen=True)
class OfOne(Device):
    """A device of a worker that sees one."""

    count = 1


@pytest.fixture
def pair(make, tiny_model, monkeypatch):
    """pair(member, device): the adapter of a member; it sees one device, whose number is 3. seen: by its engines."""
    seen = []

    class Recorder(sglang_double.Engine):
        def __init__(self, **settings) -> None:
            seen.append({name: os.environ.get(name) for name in VISIBLE})
            assert settings.pop("tp_size") == 2
            super().__init__(tp_size=1, **settings)

    # The key of this process is that of the tests that follow, too.
    monkeypatch.setattr(multiprocessing.current_process(), "authkey", b"a key")
    monkeypatch.setattr(sglang_double, "Engine", Recorder)
    for name in VISIBLE:
        monkeypatch.setenv(name, "3")
    monkeypatch.delenv("NCCL_ALGO", raising=False)

    def pair(member: int, kind: str):
        device = OfOne(**asdict(get_device(kind)))
        settings = settings_of(str(tiny_model), rollout_of(name="sglang"), device=device)
        return make_engine(replace(settings, replica=Pair(0, 1, member, 2)))

    pair.seen = seen
    return pair


@pytest.mark.parametrize(("device", "variable"), [("cuda", VISIBLE[0]), ("npu", VISIBLE[1])])
def test_an_engine_sees_the_devices_of_all_members(device, variable, pair):
    engine = pair(0, device)
    assert pair.seen == [dict.fromkeys(VISIBLE, "3") | {variable: "3,2"}], "in the order of its processes"
    assert os.environ[variable] == "3", "the worker goes on with its own"
    assert "NCCL_ALGO" not in os.environ, "the trainer's communicators are set up alike on all ranks"
    engine.close()


def test_a_member_that_does_not_lead_starts_no_engine(pair):
    engine = pair(1, "cuda")
    assert pair.seen == []
    assert len(generate(engine, Sampling(4), PROMPTS, 1).tokens.lengths) == 0
    assert engine.sleep()


@pytest.mark.parametrize("chosen", ["0,1", ""])
def test_a_worker_that_sees_several_devices_is_told(chosen, pair, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    with pytest.raises(ConfigError, match="needs workers that see one device each"):
        pair(0, "cuda")
