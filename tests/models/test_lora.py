"""LoRA: frozen weights, trained adapters, and merged weights in everything that leaves the trainer."""

import json
from dataclasses import replace

import pytest
import torch
from peft import IA3Config, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig

from rltrain.common.device import get_device
from rltrain.common.errors import ConfigError
from rltrain.data.chat import ChatEncoder
from rltrain.models.attention.packing import pack
from rltrain.models.forward import PolicyModel, ScalarModel
from rltrain.models.load import load_config
from rltrain.models.weights.lora import Lora, adapted_weights, adapters_off, lora_layers
from rltrain.models.weights.names import gathered_weights, huggingface_name
from rltrain.models.weights.shard import sharded_model
from rltrain.models.weights.spec import ModelSpec
from tests.distance import distance
from tests.exported import export_huggingface, save_adapter
from tests.models.test_forward import (
    FAMILIES,
    SIZES,
    TEMPERATURE,
    by_transformers,
    gradients_of,
    make_batch,
    make_policy,
)

pytestmark = pytest.mark.usefixtures("process_group")

LORA = Lora("actor_rollout_ref.model", 4, 12.0, "all-linear", None, None, torch.float32, 1)


@pytest.fixture(params=["qwen2_tied", "llama", "granite_logits_scaling", "qwen3_moe"])
def model_folder(request, tmp_path):
    return save(request.param, tmp_path / "base")


@pytest.fixture
def qwen2(tmp_path):
    return save("qwen2_tied", tmp_path / "base")


def save(family, folder) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config((FAMILIES | EXPERTS)[family]).save_pretrained(folder)
    return str(folder)


def make(
    folder: str, lora: Lora = LORA, kind=PolicyModel, dtype=torch.float32, gradient_checkpointing=False, **changes
):
    config = load_config(folder)
    if config.model_type == "qwen3_moe" and not lora.path and "path" not in changes:
        changes.setdefault("target_modules", ["q_proj", "k_proj", "v_proj", "o_proj"])
    spec = ModelSpec(
        folder, master_dtype=dtype, compute_dtype=dtype, gradient_checkpointing=gradient_checkpointing,
        lora=replace(lora, **changes),
    )  # fmt: skip
    return sharded_model(kind, spec, get_device("cpu"))


def train_by_chance(policy, size: float = 0.3) -> None:
    """Change every adapter randomly, as if it had been trained."""
    generator = torch.Generator().manual_seed(7)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            local = parameter.detach().to_local()
            local.copy_(size * torch.randn(local.shape, generator=generator))


def weights_of(policy) -> dict[str, torch.Tensor]:
    return {weight.name: weight.values for weight in gathered_weights(policy, torch.float32)}


def scores(policy, with_entropy=True) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs, entropy, *_ = policy(pack(make_batch(), torch.device("cpu")), TEMPERATURE, with_entropy)
    return log_probs.detach(), entropy.detach()


def gradients(policy) -> dict[str, torch.Tensor]:
    policy.train()
    log_probs, *_ = policy(pack(make_batch(), torch.device("cpu")), TEMPERATURE)
    (log_probs * torch.linspace(-1, 1, len(log_probs))).sum().backward()
    return {f"model.{name}": each for name, each in gradients_of(policy).items()}


def test_fresh_adapters_change_nothing_and_the_rest_is_frozen(model_folder):
    plain, policy = make_policy(model_folder), make(model_folder)
    assert torch.equal(scores(plain)[0], scores(policy)[0])
    expected, found = weights_of(plain), weights_of(policy)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    layers = list(lora_layers(policy))
    assert not any("lm_head" in name for name, _ in layers)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * len(layers) >= 2 * 2 * 4
    assert gradients(policy).keys() == {name for name, p in policy.named_parameters() if p.requires_grad}


def test_the_merged_model_computes_what_adapters_compute(model_folder, tmp_path):
    policy = make(model_folder)
    base = scores(policy)
    train_by_chance(policy)
    log_probs, entropy = scores(policy)
    assert float((log_probs - base[0]).abs().max()) > 0.01
    export_huggingface(policy, load_config(model_folder), ChatEncoder(model_folder), str(tmp_path / "merged"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    with torch.no_grad():
        expected = by_transformers(merged, make_batch())
    assert distance(log_probs, expected[0]) < 1e-5
    assert distance(entropy, expected[1]) < 1e-5
    again = make_policy(str(tmp_path / "merged"))
    assert distance(scores(again)[0], log_probs) < 1e-5


@pytest.mark.parametrize(("family", "targets"), [("qwen2_tied", "all-linear"), ("qwen2_tied", ["q_proj", "down_proj"]),
                                                 ("qwen3_moe", ["q_proj", "o_proj"])], ids=str)  # fmt: skip
def test_the_adapter_folder_is_one_that_peft_loads(tmp_path, family, targets):
    check_peft_loads(save(family, tmp_path / "base"), tmp_path, targets)


EXPERTS = {
    "qwen3_moe": FAMILIES["qwen3_moe"],
    # Weights that rest [experts, inputs, outputs], biases, experts whose layout differs in the file.
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=16),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("targets", [["q_proj", "experts"], ["experts.down_proj"]], ids=str)
def test_experts_have_adapters_that_merge_and_that_peft_loads(tmp_path, family, targets):
    folder = save(family, tmp_path / "base")
    fresh, plain = make(folder, target_modules=targets), make_policy(folder)
    assert distance(scores(fresh)[0], scores(plain)[0]) < 1e-6
    assert gradients(fresh).keys() == {name for name, p in fresh.named_parameters() if p.requires_grad}
    check_peft_loads(folder, tmp_path, targets)
    policy = make(folder, target_modules=targets, path=str(tmp_path / "adapter"))
    with adapters_off(policy):
        assert torch.equal(scores(policy)[0], scores(plain)[0])
    export_huggingface(policy, load_config(folder), ChatEncoder(folder), str(tmp_path / "merged"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    with torch.no_grad():
        assert distance(scores(policy)[0], by_transformers(merged, make_batch())[0]) < 1e-5


@pytest.mark.parametrize("family", EXPERTS)
def test_gradients_of_adapters_of_experts_are_those_of_the_merged_weights(tmp_path, family):
    """The expected gradients follow by the chain rule from a float64 model of merged weights, without peft."""
    folder = save(family, tmp_path / "base")
    policy = make(folder, target_modules=["experts"], gradient_checkpointing=True)
    train_by_chance(policy, 0.1)
    found = gradients(policy)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()
    model.set_experts_implementation("eager")
    missing = model.load_state_dict(weights_of(policy), strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"])  # a tied one comes under its first name
    log_probs, _ = by_transformers(model, make_batch())
    (log_probs.double() * torch.linspace(-1, 1, len(log_probs))).sum().backward()
    names = {id(parameter): name for name, parameter in policy.named_parameters()}
    mine, expected = {}, {}
    for name, layer in adapted_weights(policy).items():
        adapters = [part["default"].weight for part in (layer.lora_A, layer.lora_B)]
        gradient = layer.scaling["default"] * model.get_parameter(huggingface_name(name)).grad
        gradient = gradient.mT if policy.get_submodule(name.rpartition(".")[0]).is_transposed else gradient
        first, second = (adapter.full_tensor().double() for adapter in adapters)
        own_first, own_second = (found[names[id(adapter)]] for adapter in adapters)
        for expert in range(4):  # A has neighbouring rows of it, and B every fourth column
            rows, columns = slice(4 * expert, 4 * expert + 4), slice(expert, None, 4)
            expected |= {(name, "A", expert): second[:, columns].T @ gradient[expert]}
            expected |= {(name, "B", expert): gradient[expert] @ first[rows].T}
            mine |= {(name, "A", expert): own_first[rows], (name, "B", expert): own_second[:, columns]}
    assert distance(mine, expected) < 1e-5


def check_peft_loads(folder, tmp_path, targets):
    policy = make(folder, target_modules=targets)
    train_by_chance(policy)
    save_adapter(policy.model, folder, str(tmp_path / "adapter"))
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == folder
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        expected = by_transformers(PeftModel.from_pretrained(base, tmp_path / "adapter").eval(), make_batch())
    assert distance(scores(policy)[0], expected[0]) < 1e-5
    # What the file says counts, not what the keys beside it say.
    resumed = make(folder, path=str(tmp_path / "adapter"), rank=2, alpha=1.0, seed=9)
    assert torch.equal(scores(resumed)[0], scores(policy)[0])
    assert len(gradients(resumed)) == 2 * len(list(lora_layers(policy)))


def test_gradients_are_those_of_peft(qwen2, tmp_path):
    policy = make(qwen2)
    train_by_chance(policy, 0.05)
    save_adapter(policy.model, qwen2, str(tmp_path))
    base = AutoModelForCausalLM.from_pretrained(qwen2, attn_implementation="eager")
    theirs = PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    log_probs, _ = by_transformers(theirs, make_batch())
    (log_probs * torch.linspace(-1, 1, len(log_probs))).sum().backward()
    expected = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    found = gradients(policy)
    assert {f"base_model.{name}" for name in found} == expected.keys()
    assert distance(found, {name: expected[f"base_model.{name}"] for name in found}) < 1e-5


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"target_modules": "q_proj"}, {"q_proj"}),
        ({"target_modules": r".*layers\.1\.mlp\..*_proj"}, {"gate_proj", "up_proj", "down_proj"}),
        ({"exclude_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}, {"gate_proj", "up_proj", "down_proj"}),
        ({"target_modules": ["up_proj", "q_proj"], "exclude_modules": r".*\.self_attn\..*"}, {"up_proj"}),
    ],
)  # fmt: skip
def test_layers_are_chosen_by_name_or_pattern(qwen2, changes, layers):
    assert {name.rpartition(".")[2] for name, _ in lora_layers(make(qwen2, **changes))} == layers


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_modules": ["q_porj", "v_proj"]}, "no linear layer below the head matches 'q_porj'. Did you mean q_"),
        ({"target_modules": "zzz"}, "There are down_proj, gate_proj, k_proj"),
        ({"target_modules": r"decoder\..*"}, r"no linear layer below the head matches 'decoder"),
        ({"target_modules": "*_proj"}, "neither a name nor a pattern"),
        ({"exclude_modules": ["self_attn"]}, "exclude_modules=.*no linear layer below the head matches 'self_attn'"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, "excludes all layers"),
        ({"path": "/nowhere"}, "lora_adapter_path=/nowhere is not a peft adapter"),
        ({"target_modules": ["lm_head", "q_proj"]}, "no linear layer below the head matches 'lm_head'"),
    ],
)  # fmt: skip
def test_what_matches_nothing_is_answered_with_the_nearest_names(qwen2, changes, words):
    with pytest.raises(ConfigError, match=words):
        make(qwen2, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "has use_dora=True: only plain LoRA"),
        ({"bias": "all"}, "has bias=all"),
        ({"r": 8}, r"lora_A.default.weight is \[8, 64\] here, and the adapter has shape \[4, 64\]"),
    ],
)  # fmt: skip
def test_adapters_of_another_kind_or_shape_are_refused(qwen2, tmp_path, changes, words):
    policy = make(qwen2)
    save_adapter(policy.model, qwen2, str(tmp_path / "adapter"))
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError, match=words):
        make(qwen2, path=str(tmp_path / "adapter"))


def test_another_method_of_peft_is_refused(qwen2, tmp_path):
    IA3Config(target_modules=["q_proj"], feedforward_modules=[]).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match="has peft_type=IA3: only plain LoRA"):
        make(qwen2, path=str(tmp_path / "adapter"))


def renamed(old: str, new: str):
    return lambda weights: {name.replace(old, new): weight for name, weight in weights.items()}


def without(part: str):
    return lambda weights: {name: weight for name, weight in weights.items() if part not in name}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (renamed("layers.1", "layers.7"), "which has no linear layer model.layers.7"),
        (without("1.self_attn.q_proj.lora_B"), "layers.1.self_attn.q_proj.lora_B.default.weight .* no such weight"),
        (without(".layers.1."), r"has no weights for \d layers that its .*, such as model.layers.1"),
        (
            renamed("base_model.", "module.base_model."),
            "it has module.base_model.model.model.layers.0.mlp.down_pr",
        ),
        (
            renamed("base_model.model.", ""),
            "which peft would call base_model.model.model.layers.0.mlp.down_pr",
        ),
        (renamed(".weight", ".default.weight"), "down_proj.lora_A.default.weight, which peft would call base_model"),
    ],
)
def test_weights_that_are_not_those_of_the_config_are_refused(qwen2, tmp_path, change, words):
    save_adapter(make(qwen2).model, qwen2, str(tmp_path))
    file = tmp_path / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(ConfigError, match=words):
        make(qwen2, path=str(tmp_path))


def test_a_critic_trains_adapters_and_its_head(qwen2):
    critic = make(qwen2, kind=ScalarModel, dtype=torch.bfloat16)
    train_by_chance(critic)
    critic(pack(make_batch(), torch.device("cpu"))).sum().backward()
    trained = {name: p for name, p in critic.named_parameters() if p.requires_grad}
    assert trained["score.weight"].dtype == torch.float32
    assert len(trained) == 1 + 2 * len(list(lora_layers(critic)))
    assert all(float(p.grad.full_tensor().abs().max()) > 0 for p in trained.values())
