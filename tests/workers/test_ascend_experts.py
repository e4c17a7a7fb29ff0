"""Experts on NPUs: the layouts of vllm-ascend's releases, under the reload of the real vLLM. Not run on hardware."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config, Qwen3MoeConfig

from rltrain.common.errors import ConfigError
from rltrain.models.weights.names import Weight
from rltrain.workers.rollout.vllm.weights import WeightLoader, refuse_on_npu

reload = pytest.importorskip("vllm.model_executor.model_loader.reload", reason="vLLM is not installed")
EXPERTS, WIDTH, INNER = 2, 6, 4
CONFIG = Qwen3MoeConfig(num_experts=EXPERTS)


class _Layer(nn.Module):
    """The experts of a layer: loaded as [expert, rows, columns], computed with transposed."""

    def __init__(self, release: tuple[int, int]) -> None:
        super().__init__()
        for name, shape in {"w13_weight": (2 * INNER, WIDTH), "w2_weight": (WIDTH, INNER)}.items():
            setattr(self, name, nn.Parameter(torch.zeros(EXPERTS, *shape), requires_grad=False))
            getattr(self, name).weight_loader = lambda param, loaded: param.data.copy_(loaded)
        self.quant_method = _method(release)

    def forward(self, hidden):
        gate, up = (hidden @ self.w13_weight).chunk(2, -1)
        return (gate * up) @ self.w2_weight


def _method(release):
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    class Method(QuantizeMethodBase):
        def create_weights(self, *_, **__):
            raise NotImplementedError

        def apply(self, *_, **__):
            raise NotImplementedError

        def process_weights_after_loading(self, layer):
            for name in ("w13_weight", "w2_weight"):
                turned = getattr(layer, name).data.transpose(1, 2).contiguous()
                if release < (0, 26):
                    setattr(layer, name, nn.Parameter(turned, requires_grad=False))
                else:
                    getattr(layer, name).data = turned

    return Method()


class _Model(nn.Module):
    def __init__(self, release) -> None:
        super().__init__()
        self.experts = _Layer(release)

    def load_weights(self, weights):
        loaded = set()
        for name, values in weights:
            param = self.get_parameter(name)
            param.weight_loader(param, values)
            loaded.add(name)
        return loaded


class _Worker:
    """A worker of vllm-ascend with a loaded model."""

    def __init__(self, release) -> None:
        self.release, self.model = release, _Model(release)
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)
        reload.record_metadata_for_reloading(self.model)
        self.model.experts.quant_method.process_weights_after_loading(self.model.experts)

    def sleep_and_wake(self) -> None:
        for param in self.model.parameters():
            param.data.fill_(torch.nan)  # level 2 keeps no weights
        if self.release < (0, 26):
            for name, param in list(self.model.experts.named_parameters()):
                setattr(self.model.experts, name, nn.Parameter(param.transpose(1, 2), requires_grad=False))

    def reload_weights(self, weights_iterator) -> None:
        reload.initialize_layerwise_reload(self.model)
        self.model.load_weights(weights_iterator)
        reload.finalize_layerwise_reload(self.model, SimpleNamespace(dtype=torch.float32))


def _synced(release, *, sleeps: bool) -> bool:
    """Return True if three syncs write the weights into the memory that graphs use."""
    worker = _Worker(release)
    memory = [param.data_ptr() for param in worker.model.parameters()]
    for seed in range(3):
        torch.manual_seed(seed)
        first, second = torch.randn(EXPERTS, 2 * INNER, WIDTH), torch.randn(EXPERTS, WIDTH, INNER)
        weights = {"experts.w13_weight": first, "experts.w2_weight": second}
        if sleeps:
            worker.sleep_and_wake()
        loader = WeightLoader(worker, CONFIG, on_cpu=False)
        loader.load(Weight(name, values, True) for name, values in weights.items())
        hidden = torch.randn(EXPERTS, 3, WIDTH)
        gate, up = (hidden @ first.transpose(1, 2)).chunk(2, -1)
        expected = (gate * up) @ second.transpose(1, 2)
        assert torch.allclose(worker.model.experts(hidden), expected, atol=1e-5)
        assert [param.data_ptr() for param in worker.model.parameters()] == memory
    return True


def test_a_release_that_is_allowed_takes_over_experts():
    assert _synced((0, 24), sleeps=False)
    assert _synced((0, 26), sleeps=False)
    assert _synced((0, 26), sleeps=True)


def test_a_sleep_of_an_older_release_leaves_experts_that_cannot_be_reloaded():
    with pytest.raises(RuntimeError, match="size of tensor"):
        _synced((0, 24), sleeps=True)


@pytest.mark.parametrize(
    ("release", "sleeps", "problem"),
    [
        ("0.23.0.post1", False, "0.23.0.post1 cannot load new experts of Qwen3MoeConfig. Install vllm-ascend 0.26 or"),
        ("0.25.1rc1", True, "after its sleep mode. Install .* set actor_rollout_ref.rollout.free_cache_engine=False"),
        ("0.24.0rc1", False, ""),
        ("0.26.0rc1", True, ""),
        (None, True, ""),
    ],
)
def test_a_release_that_cannot_load_experts_is_refused_with_the_one_that_can(release, sleeps, problem):
    if not problem:
        refuse_on_npu(CONFIG, sleeps, release)
        return
    with pytest.raises(ConfigError, match=problem):
        refuse_on_npu(CONFIG, sleeps, release)


def test_latent_attention_is_refused_on_npus():
    with pytest.raises(ConfigError, match=r"latent attention only once, at startup. Use rollout.name=hf"):
        refuse_on_npu(DeepseekV3Config(), False, "0.26.0")
