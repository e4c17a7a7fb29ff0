"""Models with a vision tower that are trained on texts: as transformers computes them, and whole when they leave."""

import importlib.util
from dataclasses import replace

import pytest
import torch

if not importlib.util.find_spec("torchvision"):
    pytest.skip("torchvision is not installed (scripts/test.sh installs it)", allow_module_level=True)

from transformers import AutoModel, AutoModelForImageTextToText, AutoProcessor

from rltrain.base.columns.batch import Batch
from rltrain.base.device import get_device
from rltrain.data.chat import ChatEncoder
from rltrain.models.attention.packing import pack
from rltrain.models.forward import PolicyModel, ScalarModel, model_numbers
from rltrain.models.load import load_config, split_by_owner, without_dropout
from rltrain.models.vision import placeholder_ids, tower
from rltrain.models.weights.lora import Lora, lora_layers
from rltrain.models.weights.names import whole_weights
from rltrain.models.weights.shard import sharded_model
from rltrain.models.weights.spec import ModelSpec
from rltrain.workers.rollout.contract import Sampling
from tests.batches import batch_of_rows, rows_of
from tests.distance import distance
from tests.exported import export_huggingface
from tests.tiny_vision import FAMILIES, TOKENS, save_tiny_families
from tests.workers.engines import engine_of, generate

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")
LORA = Lora("actor_rollout_ref.model", 2, 4.0, "all-linear", None, None, torch.float32, 1)
# (prompt, answers): two share a prompt, one answer is empty.
GROUPS = [(5, [7, 3]), (4, [0]), (9, [6])]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return save_tiny_families(tmp_path_factory)


@pytest.fixture(params=FAMILIES)
def folder(request, folders) -> str:
    return folders[request.param]


def make(folder: str, kind=PolicyModel, **changes):
    return sharded_model(kind, ModelSpec(folder, gradient_checkpointing=True, **changes), get_device("cpu"))


def plain(folder: str):
    return AutoModelForImageTextToText.from_pretrained(folder).eval()


def texts() -> Batch:
    generator = torch.Generator().manual_seed(1)
    rows, prompts = [], []
    for length, answers in GROUPS:
        prompt = torch.randint(6, len(TOKENS), (length,), generator=generator, dtype=torch.int32)
        for answer in answers:
            new = torch.randint(6, len(TOKENS), (answer,), generator=generator, dtype=torch.int32)
            rows.append(torch.cat([prompt, new]))
            prompts.append(length)
    return batch_of_rows(rows, prompts)


def by_transformers(model, batch: Batch) -> torch.Tensor:
    """Log-probs of the answers' tokens, sample by sample."""
    found = []
    for row, answer in zip(rows_of(batch), batch.ragged("response").lengths.tolist(), strict=True):
        log_pi = torch.log_softmax(model(input_ids=row.long()[None], use_cache=False).logits[0], -1)[:-1]
        found.append(log_pi.gather(-1, row[1:, None].long())[len(row) - 1 - answer :, 0])
    return torch.cat(found)


def gradients(model) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("model."): each.grad.full_tensor()
        for name, each in model.named_parameters()
        if each.grad is not None
    }


def test_log_probs_and_gradients_equal_transformers(folder):
    policy, reference, batch = make(folder).train(), plain(folder), texts()
    log_probs, expected = policy(pack(batch, CPU)).log_probs, by_transformers(reference, batch)
    assert distance(log_probs, expected) < 5e-6
    log_probs.sum().backward()
    expected.sum().backward()
    theirs = {name: each.grad for name, each in reference.named_parameters() if each.grad is not None}
    assert distance(gradients(policy), theirs) < 1e-5


def test_the_tower_rests_and_costs_a_text_nothing(folder):
    policy = make(folder)
    resting = [parameter for part in tower(policy.model) for parameter in part.parameters()]
    numbers = model_numbers(policy)
    size = sum(each.numel() for each in resting)
    assert not any(each.requires_grad for each in resting)
    assert numbers["trained_parameters"] == numbers["num_parameters"] - size
    assert numbers["matmul_parameters"] <= numbers["num_parameters"] - size


def test_every_weight_leaves_as_it_came(folder, tmp_path):
    policy, expected = make(folder), dict(plain(folder).named_parameters())
    found = {weight.name: weight.values for weight in whole_weights(policy, torch.float32) if weight.in_checkpoint}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    encoder = ChatEncoder(folder)
    assert export_huggingface(policy, load_config(folder), encoder, str(tmp_path / "out")) == []
    row = torch.arange(6, 16)[None]
    with torch.no_grad():
        again, before = (model(input_ids=row).logits for model in (plain(str(tmp_path / "out")), plain(folder)))
    assert torch.equal(again, before)
    one, other = (AutoProcessor.from_pretrained(path) for path in (folder, str(tmp_path / "out")))
    assert one.to_json_string() == other.to_json_string()


def test_values_are_those_of_the_decoder(folder):
    critic, batch = make(folder, ScalarModel), texts()
    head = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        critic.score.weight.to_local().copy_(head)
    model, expected = AutoModel.from_pretrained(folder).eval(), []
    for row, answer in zip(rows_of(batch), batch.ragged("response").lengths.tolist(), strict=True):
        with torch.no_grad():
            states = model(input_ids=row.long()[None], use_cache=False).last_hidden_state[0]
        expected.append((states @ head[0])[len(row) - 1 - answer : -1])
    assert distance(critic(pack(batch, CPU)).detach(), torch.cat(expected)) < 1e-5


def test_adapters_go_to_the_language_model(folders):
    """Also where a name is one of the tower's layers as well; the tower's own names reach it."""
    for family in FAMILIES:
        layers = [name for name, _ in lora_layers(make(folders[family], lora=LORA))]
        assert len(layers) == 2 * 7
        assert all("language_model.layers" in name for name in layers)
    some = make(folders["internvl"], lora=replace(LORA, target_modules=["q_proj"], exclude_modules=".*vision.*"))
    assert sum(1 for _ in lora_layers(some)) == 2
    tower_only = make(folders["internvl"], lora=replace(LORA, target_modules=r".*vision_tower.*q_proj"))
    assert all("vision_tower" in name for name, _ in lora_layers(tower_only))


def test_adapters_start_at_nothing_and_get_gradients(folder):
    policy, batch = make(folder, lora=LORA).train(), texts()
    log_probs = policy(pack(batch, CPU)).log_probs
    assert distance(log_probs, by_transformers(plain(folder), batch)) < 5e-6
    log_probs.sum().backward()
    assert all(".lora_" in name for name in gradients(policy))
    assert len(gradients(policy)) == 2 * 2 * 7


def test_no_part_of_the_model_drops_activations(folders):
    vision = without_dropout(load_config(folders["internvl"])).vision_config
    assert load_config(folders["internvl"]).vision_config.attention_dropout == 0.1
    assert vision.attention_dropout == 0


def test_a_change_of_the_config_reaches_the_decoder(folders):
    override = {"max_position_embeddings": 99, "tie_word_embeddings": True}
    config = load_config(folders["qwen3_vl"], override=override)
    assert config.get_text_config().max_position_embeddings == 99
    nested = {"tie_word_embeddings": True, "text_config": {"max_position_embeddings": 99}}
    assert split_by_owner(config, override) == nested


def test_the_embedded_engine_answers_as_transformers(folder):
    """Placeholders of images, which would win some steps, are never drawn and stay in the softmax."""
    model, engine = plain(folder), engine_of("hf", folder)
    engine.wake_weights()
    engine.load_weights(whole_weights(make(folder), torch.float32))
    engine.wake_cache()
    prompts = [prompt.numpy() for prompt in texts().dictionary("prompt").values.rows()]
    never = set(placeholder_ids(model.config))
    drawn = []
    for sampling in (Sampling(12, greedy=True, ignore_eos=True), Sampling(24, ignore_eos=True), Sampling(9, top_k=5)):
        answers = generate(engine, sampling, prompts, 4)
        rows = [
            torch.cat([torch.from_numpy(prompts[number // 4]), answer])
            for number, answer in enumerate(answers.tokens.rows())
        ]
        lengths = [len(prompts[number // 4]) for number in range(len(rows))]
        with torch.no_grad():
            expected = by_transformers(model, batch_of_rows(rows, lengths))
        assert distance(answers.log_probs.values, expected) < 1e-4
        drawn += answers.tokens.values.tolist()
    assert not set(drawn) & never
    engine._never = None
    assert set(generate(engine, Sampling(24, ignore_eos=True), prompts, 4).tokens.values.tolist()) & never
