"""Separate adapters (model.lora.merge=False): engines compute the same as the trainer."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from transformers import AutoConfig, DeepseekV3Config

from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch, DictionaryColumn
from rltrain.common.columns.ragged import Ragged
from rltrain.common.device import get_device
from rltrain.common.errors import ConfigError, SyncError
from rltrain.data.images import EncodedPrompt
from rltrain.models.attention.packing import pack
from rltrain.models.forward import PolicyModel
from rltrain.models.weights.lora import Lora, adapters_off, beyond_language_model, ranks_of
from rltrain.models.weights.names import Weight
from rltrain.models.weights.shard import empty_packed, sharded_model
from rltrain.models.weights.spec import ModelSpec
from rltrain.workers.rollout.contract import Sampling
from rltrain.workers.rollout.vllm.adapters import refuse_adapters, slot_rank
from rltrain.workers.state.weight_sync import WeightSync
from tests.workers.engines import generate, rollout_of, running_engine, settings_of

LORA = Lora("actor_rollout_ref.model", 4, 12.0, "all-linear", None, None, torch.float32, 1)
# Longer than a block of the cache, whose blocks are what is kept.
TEXT = np.array([2 + 3 * number % 17 for number in range(40)], dtype=np.int32)
CANARY = EncodedPrompt(TEXT[:12])
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM and what it imports warn of their own affairs


# On accelerators vLLM's weights are written in place; on the CPU it must load them anew, unless its packed kernels are
# off.
ENGINES = ["hf", "vllm as on accelerators", pytest.param("vllm", marks=pytest.mark.long)]


@pytest.fixture(scope="module", params=ENGINES)
def parts(request, tiny_model):
    """A policy whose adapters are not zero, and an engine that gets them separately."""
    name, _, accelerated = request.param.partition(" ")
    spec = ModelSpec(str(tiny_model), lora=LORA)
    adapted = ranks_of(empty_packed(PolicyModel, spec, spec.load_config()).model)
    rollout = rollout_of(name=name, max_num_seqs=8, engine_kwargs={"vllm": {"block_size": 32}})
    settings = replace(settings_of(str(tiny_model), rollout), model=spec, adapted=adapted)
    with running_engine(settings, accelerated=bool(accelerated)) as engine:
        load = engine.load_weights
        # With weights of its own, as with several processes.
        engine.load_weights = lambda weights: load(weight._replace(values=weight.values.clone()) for weight in weights)
        yield sharded_model(PolicyModel, spec, get_device("cpu")), engine


@pytest.fixture
def policy(parts):
    move(parts[0], 0)
    return parts[0]


@pytest.fixture
def engine(parts):
    parts[1].holds_base = False
    return parts[1]


@pytest.fixture
def sync(policy, engine):
    def run() -> int:
        """Run one sync, which compares the canary. Return its bytes."""
        run.version += 1
        report = weight_sync.run(run.version, lambda: None)
        assert report.canary_gap < 1e-5
        return round(report.gigabytes * 2**30)

    weight_sync = WeightSync(
        policy, engine, get_device("cpu"), torch.float32, bucket_bytes=1 << 14, gap_limit=1e-3,
        canary=CANARY, log_probs=lambda text: log_probs(policy, text), merge=False,
    )  # fmt: skip
    run.version = 0
    return run


def move(policy, seed: int) -> None:
    """Change the adapters, as an update does."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            local = parameter.detach().to_local()
            local.copy_(0.3 * torch.randn(local.shape, generator=generator))


def num_bytes(policy, *, adapters: bool) -> int:
    return sum(4 * weight.numel() for weight in policy.parameters() if weight.requires_grad is adapters)


def log_probs(policy, text: EncodedPrompt) -> torch.Tensor:
    """Return the log-probs by the trainer's packed forward."""
    tokens = torch.from_numpy(text.tokens)
    answers = Ragged.from_rows([tokens[1:]])
    mask = answers.like(torch.ones_like(answers.values, dtype=torch.bool))
    prompts = DictionaryColumn(Ragged.from_rows([tokens[:1]]), torch.zeros(1, dtype=torch.long))
    batch = Batch({c.PROMPT: prompts, c.RESPONSE: answers, c.RESPONSE_MASK: mask})
    with torch.no_grad():
        return policy(pack(batch, torch.device("cpu")), 1.0, False).log_probs


def gap(policy, engine) -> float:
    """Return the gap on tokens that the engine samples, after prompts that it may have cached."""
    found = generate(engine, Sampling(8, greedy=True), [TEXT], 1)
    answer = found.tokens.values.numpy().astype(np.int32)
    own = log_probs(policy, EncodedPrompt(np.concatenate([TEXT, answer])))[-len(answer) :]
    return float((found.log_probs.values - own).abs().max())


@pytest.mark.few(1)
def test_each_sync_brings_the_trainers_adapters(policy, engine, sync):
    for version in range(3):
        move(policy, version)
        sync()
        assert gap(policy, engine) < 1e-5
        with adapters_off(policy):
            assert gap(policy, engine) > 1e-2, "adapters that change nothing prove nothing"


def test_after_the_first_sync_adapters_alone_travel(policy, sync):
    first, second = sync(), sync()
    adapters, base = (num_bytes(policy, adapters=which) for which in (True, False))
    assert second == adapters
    assert adapters + base <= first < adapters + base + 4096, "rotary frequencies are buffers"


@pytest.mark.parametrize("which", ["adapters", "base"])
def test_old_or_wrong_weights_are_noticed_by_the_canary(policy, engine, sync, monkeypatch, which):
    load = engine.load_weights

    def lost(weights):
        list(weights)

    def wrong(weights):
        load(weight if ".lora_" in weight.name else weight._replace(values=weight.values + 0.01) for weight in weights)

    if which == "adapters":
        sync()
        move(policy, 1)
    monkeypatch.setattr(engine, "load_weights", lost if which == "adapters" else wrong)
    with pytest.raises(SyncError, match="differs from the trainer"):
        sync()


def test_a_cached_prefix_never_outlives_its_adapters(policy, engine, sync, monkeypatch):
    """Without the reset the responses are based on half-old adapters, because the name of an adapter never changes."""
    sync()
    assert gap(policy, engine) < 1e-5
    move(policy, 1)
    if hasattr(engine, "llm"):  # hf keeps no cache between calls
        with monkeypatch.context() as patch:
            patch.setattr(engine.llm, "reset_prefix_cache", lambda: True)
            sync()
            assert gap(policy, engine) > 1e-3
    sync()
    assert gap(policy, engine) < 1e-5


def test_adapters_without_a_place_are_an_error(policy, engine, sync):
    if not hasattr(engine, "llm"):
        return
    sync()
    lost = [Weight(f"model.layers.0.mlp.router.lora_{kind}.weight", torch.ones(4, 4)) for kind in "AB"]
    with pytest.raises(SyncError, match=r"does not support the adapters of model\.layers\.0\.mlp\.router"):
        engine.load_weights(iter(lost))


def test_the_base_outlives_a_sleep_on_a_cpu(policy, engine, sync):
    sync()
    assert not engine.sleep()
    move(policy, 1)
    assert sync() == num_bytes(policy, adapters=True)
    assert gap(policy, engine) < 1e-5


def test_slots_have_the_ranks_that_vllm_knows():
    ranks = pytest.importorskip("vllm.config.lora").MaxLoRARanks
    assert [slot_rank({"a": rank}) for rank in get_args(ranks)] == list(get_args(ranks))
    assert slot_rank({"a": 1, "b": 33}) == 64
    with pytest.raises(ConfigError, match=r"merge=False: vLLM holds adapters of rank 512 at most, but these have 600"):
        slot_rank({"a": 600})


def test_what_vllm_cannot_hold_is_refused_before_a_run(tiny_model):
    packed = empty_packed(
        PolicyModel, ModelSpec(str(tiny_model), lora=LORA), config := AutoConfig.from_pretrained(tiny_model)
    )
    adapted = ranks_of(packed.model)
    assert len(adapted) == 14
    assert not beyond_language_model(packed.model)
    refuse_adapters(adapted, [], config, "cuda", torch.bfloat16)
    refuse_adapters(adapted, [], config, "cpu", torch.float32)
    for refused, match in (
        ((adapted, [], config, "npu", torch.bfloat16), "vllm-ascend"),
        ((adapted, [], config, "cuda", torch.float32), r"need half precision \(rollout.dtype=bfloat16\)"),
        ((adapted, [], DeepseekV3Config(kv_lora_rank=64), "cpu", torch.float32), "latent attention"),
        ((adapted, ["visual.a"], config, "cpu", torch.float32), "visual.a is not part of the language model"),
    ):
        with pytest.raises(ConfigError, match=match) as error:
            refuse_adapters(*refused)
        assert str(error.value).endswith("Leave it out: adapters are then merged into the weights.")
