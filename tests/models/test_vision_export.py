"""What is exported of a model that was trained on images, and what its checkpoint brings into another run."""

import gc
import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

if not importlib.util.find_spec("torchvision"):
    pytest.skip("torchvision is not installed (scripts/test.sh installs it)", allow_module_level=True)

from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from rltrain.base.columns.batch import Batch, DictionaryColumn
from rltrain.base.columns.ragged import Ragged
from rltrain.base.errors import CheckpointError
from rltrain.data.chat import ChatEncoder
from rltrain.models.attention.packing import pack
from rltrain.models.load import load_config, source_dtype
from rltrain.models.vision import tower
from rltrain.models.weights.names import CheckpointNames
from rltrain.models.weights.state import load_training_state, save_training_state
from tests.distance import distance
from tests.exported import export_huggingface, save_adapter
from tests.models.test_vision_packed import CPU, LORA, TEMPERATURE, loss_of, make, make_batch
from tests.tiny_vision import FAMILIES, TOKENS, WITH_EXPERTS, picture, save_tiny_families

pytestmark = pytest.mark.usefixtures("process_group")

MODES = {"trained": {}, "frozen": {"tower": "frozen"}, "adapters": {"lora": LORA}}
ANSWERS = [*range(6, 20)]
QUESTION = [{"role": "user", "content": "1+<image>2<image>=?"}]
# The same in parts; None is an image.
QUESTION_PARTS = [text and {"type": "text", "text": text} for text in ("1+", None, "2", None, "=?")]
PICTURES = [picture(60, 30), picture(84, 56, seed=1)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return save_tiny_families(tmp_path_factory)


@pytest.fixture(params=[*FAMILIES, WITH_EXPERTS])
def folder(request, folders) -> str:
    return folders[request.param]


def learn(policy, folder: str, step: float = 0.02) -> torch.optim.AdamW:
    """An optimizer step that every trained weight feels."""
    optimizer = torch.optim.AdamW([parameter for parameter in policy.parameters() if parameter.requires_grad], lr=step)
    for _ in range(2):  # the first moves of LoRA only B
        loss_of(*policy(pack(make_batch(folder), CPU), TEMPERATURE, True)[:2]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def whole(policy) -> dict[str, torch.Tensor]:
    return {name: each.full_tensor().detach().clone() for name, each in policy.named_parameters()}


def tower_names(policy) -> set[str]:
    inside = {id(parameter) for part in tower(policy.model) for parameter in part.parameters()}
    return {name for name, each in policy.named_parameters() if id(each) in inside}


def export(policy, folder: str, out: Path) -> list[str]:
    return export_huggingface(policy, load_config(folder), ChatEncoder(folder), str(out), "tags: []\n---\n")


def served(folder: str) -> torch.Tensor:
    """Log-probs [tokens, vocabulary] of QUESTION, as a user of transformers gets them: no code of ours."""
    model, processor = AutoModelForImageTextToText.from_pretrained(folder).eval(), AutoProcessor.from_pretrained(folder)
    content = [part or {"type": "image"} for part in QUESTION_PARTS]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=[text], images=PICTURES, return_tensors="pt")
    with torch.no_grad():
        return torch.log_softmax(model(**inputs).logits[0].float(), -1)


def trained(policy, encoder: ChatEncoder) -> torch.Tensor:
    """Log-prob of each ANSWER token alone behind QUESTION, by the packed forward."""
    asked = encoder.encode_prompt(QUESTION, PICTURES)
    answers = Ragged.from_rows([torch.tensor([token], dtype=torch.int32) for token in ANSWERS])
    index = torch.zeros(len(ANSWERS), dtype=torch.long)
    batch = Batch({
        "prompt": DictionaryColumn(Ragged.from_rows([torch.from_numpy(asked.tokens)]), index),
        "images": DictionaryColumn([asked.images], index),
        "response": answers,
        "response_mask": answers.like(torch.ones(len(ANSWERS), dtype=torch.bool)),
    })  # fmt: skip
    with torch.no_grad():
        return policy.eval()(pack(batch, CPU), 1.0).log_probs


@pytest.mark.few(5)
@pytest.mark.parametrize("mode", MODES)
def test_an_export_says_of_images_what_was_trained(folder, mode, tmp_path):
    policy, out = make(folder, **MODES[mode]), tmp_path / "out"
    start, names = whole(policy), tower_names(policy)
    learn(policy, folder)
    moved = {name for name, values in whole(policy).items() if not torch.equal(values, start[name])}
    assert moved
    assert bool(moved & names) == (mode == "trained")
    assert export(policy, folder, out) == []
    expected = trained(policy, ChatEncoder(folder))
    assert distance(served(str(out))[-1, ANSWERS], expected) < 1e-5
    assert distance(served(folder)[-1, ANSWERS], expected) > 1e-3
    assert "pipeline_tag: image-text-to-text\ntags" in (out / "README.md").read_text()
    one, other = (AutoProcessor.from_pretrained(path).to_json_string() for path in (folder, out))
    assert one == other


def test_peft_reads_the_adapters_as_they_were_trained(folder, tmp_path):
    from peft import PeftModel

    policy = make(folder, lora=LORA)
    learn(policy, folder)
    save_adapter(policy.model, folder, str(tmp_path))
    plain = AutoModelForImageTextToText.from_pretrained(folder)
    merged = PeftModel.from_pretrained(plain, str(tmp_path)).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    AutoProcessor.from_pretrained(folder).save_pretrained(tmp_path / "merged")
    expected = trained(policy, ChatEncoder(folder))
    assert distance(served(str(tmp_path / "merged"))[-1, ANSWERS], expected) < 1e-5
    again = make(folder, lora=replace(LORA, rank=0, path=str(tmp_path)))
    assert torch.equal(trained(again, ChatEncoder(folder)), expected)


@pytest.mark.parametrize("width", [24, 32])
def test_experts_have_the_layout_of_published_files_where_it_can_be_told(folders, width, tmp_path):
    """Of published ones rows are inputs; transformers turns a weight only where its shape says that it must."""
    config = load_config(folders[WITH_EXPERTS], override={"moe_intermediate_size": width})
    model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(tmp_path, state_dict={})
    weights = CheckpointNames(model)(model.state_dict())
    name = next(name for name in weights if name.endswith("experts.gate_up_proj"))
    # Twice 32 are the 64 numbers of a hidden state.
    assert weights[name].shape == (8, 64, 2 * width)
    assert torch.equal(weights[name], model.state_dict()[name]) == (width == 32)
    save_file({name: each.contiguous() for name, each in weights.items()}, tmp_path / "model.safetensors")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[name], each) for name, each in model.state_dict().items())


def as_on_the_hub(folder: str, out: Path, family: str) -> str:
    """As the real ones are: the bounds under older names, in a file of the image processor alone."""
    shutil.copytree(folder, out)
    content = json.loads((out / "processor_config.json").read_text())
    part = content.pop("image_processor")
    if family != "qwen3_vl":
        size = part.pop("size")
        part |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    (out / "preprocessor_config.json").write_text(json.dumps(part))
    (out / "processor_config.json").unlink()
    return str(out)


@pytest.mark.parametrize("hub", [True, False])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_bounds_of_pixels_are_those_of_the_training(family, hub, folders, tmp_path):
    source = as_on_the_hub(folders[family], tmp_path / "source", family) if hub else folders[family]
    # The second is wider than the processor's own bounds, which then hold.
    for number, bounds in enumerate([{"min_pixels": 3000, "max_pixels": 6000}, {"min_pixels": 1, "max_pixels": 10**9}]):
        out, encoder = tmp_path / str(number), ChatEncoder(source, **bounds)
        assert export_huggingface(make(source), load_config(source), encoder, str(out)) == []
        for width, height in [(20, 20), (60, 60), (300, 200)]:
            image = picture(width, height)
            found, expected = (
                each.encode_prompt([{"role": "user", "content": "<image>"}], [image])
                for each in (ChatEncoder(str(out)), encoder)
            )
            assert found.images.grids.tolist() == expected.images.grids.tolist()
            # PIL and torchvision round otherwise, here and there by one of 255 steps.
            assert np.abs(found.images.pixel_values - expected.images.pixel_values).max() < 0.1


def test_bounds_that_a_processor_cannot_keep_are_told(folders, tmp_path):
    encoder = ChatEncoder(folders["internvl"], max_pixels=2000)
    (problem,) = export_huggingface(
        make(folders["internvl"]), load_config(folders["internvl"]), encoder, str(tmp_path / "out")
    )
    assert "tokens of an image of 640 x 480; in training it was" in problem


@pytest.mark.parametrize("damage", [{"patch_size": 28}, None], ids=["another", "none"])
def test_a_processor_that_would_not_serve_is_named(damage, folders, tmp_path):
    source = Path(as_on_the_hub(folders["qwen2_5_vl"], tmp_path / "source", "qwen2_5_vl"))
    encoder, file = ChatEncoder(str(source)), source / "preprocessor_config.json"
    _ = encoder.processor
    content = json.loads(file.read_text())
    file.unlink() if damage is None else file.write_text(json.dumps(content | damage))
    problems = export_huggingface(make(str(source)), load_config(str(source)), encoder, str(tmp_path / "out"))
    assert any("preprocessor_config.json" in problem for problem in problems)


def test_a_dtype_that_stands_at_the_decoder_is_the_models(folders, tmp_path):
    content = json.loads((Path(folders["qwen3_vl"]) / "config.json").read_text())
    content.pop("dtype", None)
    content["text_config"]["dtype"] = "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert source_dtype(load_config(str(tmp_path))) == torch.bfloat16


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["qwen3_vl", "internvl"])
def test_a_checkpoint_brings_back_every_weight_and_moment(family, mode, folders, tmp_path):
    folder = folders[family]
    policy = make(folder, **MODES[mode])
    optimizer = learn(policy, folder)
    save_training_state(policy, optimizer, str(tmp_path))
    again = make(folder, **MODES[mode])
    fresh = torch.optim.AdamW([parameter for parameter in again.parameters() if parameter.requires_grad], lr=0.02)
    load_training_state(again, fresh, str(tmp_path))
    for one, other in ((policy, optimizer), (again, fresh)):
        loss_of(*one.train()(pack(make_batch(folder), CPU), TEMPERATURE, True)[:2]).backward()
        other.step()
    expected = whole(policy)
    assert all(torch.equal(values, expected[name]) for name, values in whole(again).items())


@pytest.fixture
def saved(folders, tmp_path):
    """saved(mode): the checkpoint of a policy whose tower is in that mode, and its weights."""

    def save(mode: str):
        policy = make(folders["qwen2_5_vl"], tower=mode)
        folder = str(tmp_path / mode / "actor")
        save_training_state(policy, learn(policy, folders["qwen2_5_vl"]) if mode != "rests" else new(policy), folder)
        return folder, whole(policy)

    return save


def new(policy) -> torch.optim.AdamW:
    return torch.optim.AdamW([parameter for parameter in policy.parameters() if parameter.requires_grad])


@pytest.mark.parametrize("mode", ["rests", "frozen"])
def test_weights_without_a_tower_start_a_run_that_trains_it(mode, saved, folders):
    folder, expected = saved(mode)
    policy = make(folders["qwen2_5_vl"])
    (note,) = load_training_state(policy, None, folder)
    assert "has no vision tower" in note
    assert all(torch.equal(values, expected[name]) for name, values in whole(policy).items())
    with pytest.raises(CheckpointError, match="freeze_vision_tower=True, or start a new run from these weights"):
        load_training_state(policy, new(policy), folder)


@pytest.mark.parametrize("mode", ["rests", "frozen"])
def test_a_trained_tower_is_not_left_behind_without_a_word(mode, saved, folders):
    folder, _ = saved("trained")
    policy = make(folders["qwen2_5_vl"], tower=mode)
    with pytest.raises(CheckpointError, match=r"model\.path=.*/trained/huggingface"):
        load_training_state(policy, None, folder)


def test_a_trained_tower_may_stay_where_texts_are_answered_alone(saved, folders):
    folder, expected = saved("trained")
    policy = make(folders["qwen2_5_vl"], tower="rests")
    assert load_training_state(policy, None, folder, texts_alone=True) == []
    learnt = {name: values for name, values in whole(policy).items() if ".visual." not in name}
    assert learnt
    assert all(torch.equal(values, expected[name]) for name, values in learnt.items())


def test_texts_and_a_frozen_tower_share_checkpoints(saved, folders):
    folder, expected = saved("frozen")
    policy = make(folders["qwen2_5_vl"], tower="rests")
    assert load_training_state(policy, new(policy), folder) == []
    assert all(torch.equal(values, expected[name]) for name, values in whole(policy).items())


# -- vLLM --------------------------------------------------------------------------------------------------------------


def served_by_vllm(folder: str) -> tuple[list[int], torch.Tensor]:
    """Tokens of QUESTION as vLLM makes them, and the log-probs [vocabulary] behind it."""
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory

    server = vllm.LLM(
        folder, dtype="float32", enforce_eager=True, max_model_len=256, block_size=32, max_logprobs=len(TOKENS),
        limit_mm_per_prompt={"image": 2, "video": 0}, gpu_memory_utilization=0.1,
    )  # fmt: skip
    images = iter(PICTURES)
    content = [part or {"type": "image_pil", "image_pil": next(images)} for part in QUESTION_PARTS]
    sampling = vllm.SamplingParams(max_tokens=1, temperature=0, logprobs=-1)
    (found,) = server.chat([{"role": "user", "content": content}], sampling, chat_template_content_format="openai")
    del server
    gc.collect()
    cleanup_dist_env_and_memory()
    # vLLM takes the group of this process with it.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    log_probs = found.outputs[0].logprobs[0]
    return list(found.prompt_token_ids), torch.tensor([log_probs[token].logprob for token in range(len(TOKENS))])


@pytest.mark.long
@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM is not installed (scripts/test.sh installs it)")
@pytest.mark.filterwarnings("ignore")
def test_vllm_serves_an_export_as_it_was_trained(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    policy, encoder = make(folder), ChatEncoder(folder)
    learn(policy, folder)
    export(policy, folder, tmp_path)
    expected = trained(policy, encoder)
    tokens, log_probs = served_by_vllm(str(tmp_path))
    assert tokens == encoder.encode_prompt(QUESTION, PICTURES).tokens.tolist()
    assert distance(log_probs[ANSWERS], expected) < 1e-5
