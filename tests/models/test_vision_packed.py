"""The packed forward with images, compared with transformers one sample at a time."""

import importlib.util
import re
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

if not importlib.util.find_spec("torchvision"):
    pytest.skip("torchvision is not installed (scripts/test.sh installs it)", allow_module_level=True)

from PIL import Image
from transformers import AutoModel, AutoModelForImageTextToText

from rltrain.common.columns.batch import Batch, DictionaryColumn
from rltrain.common.columns.ragged import Ragged
from rltrain.common.device import get_device
from rltrain.config.schema.model import ShardingConfig
from rltrain.data.chat import ChatEncoder
from rltrain.data.images import EncodedPrompt, PromptImages, runs
from rltrain.models.attention.packing import pack
from rltrain.models.attention.ring import ring_of
from rltrain.models.attention.ulysses import sequence_group
from rltrain.models.forward import PolicyModel, ScalarModel
from rltrain.models.vision import tower
from rltrain.models.weights.lora import Lora
from rltrain.models.weights.shard import sharded_model
from rltrain.models.weights.spec import ModelSpec
from tests.distance import distance
from tests.models.test_forward import gradients_of
from tests.ranks import run_on_ranks
from tests.tiny_vision import FAMILIES, IMAGE, TOKENS, VIDEO, WITH_EXPERTS, picture, png_of, save_tiny_vision_model

CPU = torch.device("cpu")
FAMILIES = [*FAMILIES, *WITH_EXPERTS]
TEMPERATURE = 0.7
LORA = Lora("actor_rollout_ref.model", 2, 4.0, "all-linear", None, None, torch.float32, 1)
# Text, images, videos, lengths of the answers: a video, an image and a video with three answers; a text; one image, of
# which one answer is empty. Each video has fewer steps in time than tokens on its longer side: after longer ones
# transformers computes other positions than vLLM (`mrope_positions`).
VIDEOS = [
    {"video": [png_of(picture(120, 60, seed=number)) for number in range(3, 8)], "fps": 4.0},
    {"video": [png_of(picture(60, 90, seed=number)) for number in range(8, 10)], "fps": 1.0},
]
PROMPTS = [
    ("<video>1+<image>2<video>=?", [picture(84, 56, seed=1)], VIDEOS, [7, 1, 12]),
    ("3+4=?", [], [], [5, 3]),
    ("<image>=?", [picture(30, 90, seed=2)], [], [4, 0]),
]
ORDER = [0, 3, 5, 1, 2, 6, 4]  # answers to one prompt need not be neighbours


def make_folder(folder: Path, family: str) -> str:
    return str(save_tiny_vision_model(folder / family, family, tied=family == "qwen3_vl"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: make_folder(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def folder(request, folders) -> str:
    return folders[request.param]


def batch_of(asked, index, answers) -> Batch:
    """Return responses to encoded prompts with images; ``index`` has the prompt of each."""
    response = Ragged.from_rows([torch.as_tensor(answer, dtype=torch.int32) for answer in answers])
    prompts = Ragged.from_rows([torch.from_numpy(each.tokens) for each in asked])
    return Batch({
        "prompt": DictionaryColumn(prompts, index),
        "images": DictionaryColumn([each.images for each in asked], index),
        "response": response,
        "response_mask": response.like(torch.ones(len(response.values), dtype=torch.bool)),
    })  # fmt: skip


def encoded_prompts(encoder: ChatEncoder, *, with_videos: bool = True, blank: bool = False) -> list[EncodedPrompt]:
    """Return the encoded PROMPTS, with the first frame of a video in a family without videos. blank: black images."""
    found = []
    for text, images, videos, _ in PROMPTS:
        if blank or not with_videos or VIDEO not in encoder.media.placeholders:
            media = {"<image>": iter(images)}
            media["<video>"] = iter([Image.open(BytesIO(video["video"][0])) for video in videos])
            images = [next(media[slot]) for slot in re.findall("<video>|<image>", text)]
            images = [Image.new("RGB", image.size) for image in images] if blank else images
            text, videos = text.replace("<video>", "<image>"), []
        found.append(encoder.encode_prompt([{"role": "user", "content": text}], images, videos))
    return found


def make_batch(folder: str) -> Batch:
    """Return responses to the prompts, in ORDER."""
    encoder, generator = ChatEncoder(folder), torch.Generator().manual_seed(3)
    asked = encoded_prompts(encoder)
    index = torch.tensor([number for number, each in enumerate(PROMPTS) for _ in each[-1]])
    lengths = [length for *_, answers in PROMPTS for length in answers]
    # No placeholders in answers: those are never drawn.
    answers = [torch.randint(6, len(TOKENS), (length,), generator=generator, dtype=torch.int32) for length in lengths]
    return batch_of(asked, index, answers).select(ORDER)


def one_by_one(batch: Batch):
    """Yield (inputs of transformers' forward, prompt length, response) of each sample."""
    prompts, images = batch.dictionary("prompt"), batch.dictionary("images")
    for prompt, place, answer in zip(
        prompts.index.tolist(), images.index.tolist(), batch.ragged("response").rows(), strict=True
    ):
        asked, found = prompts.values[prompt], images.values[place]
        tokens = torch.cat([asked, answer]).long()[None]
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if found is not None:
            inputs |= of_media(found, tokens)
        yield inputs, len(asked), answer.long()


def of_media(found: PromptImages, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return images and videos as transformers' models take them: apart."""
    if found.grids is None:
        return {"pixel_values": torch.from_numpy(found.pixel_values)}
    inputs = {"mm_token_type_ids": (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()}
    starts, _ = runs(tokens[0].numpy(), (IMAGE, VIDEO))
    of_videos = tokens[0].numpy()[starts] == VIDEO
    for chosen, pixels, grids in (
        (~of_videos, "pixel_values", "image_grid_thw"),
        (of_videos, "pixel_values_videos", "video_grid_thw"),
    ):
        if chosen.any():
            inputs[pixels] = torch.from_numpy(found.pixel_values[chosen.repeat(found.num_rows)])
            inputs[grids] = torch.from_numpy(found.grids[chosen])
    if found.seconds is not None:
        inputs["second_per_grid_ts"] = torch.tensor(found.seconds[of_videos])
    return inputs


def by_transformers(model, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs, entropies = [], []
    for inputs, prompt, answer in one_by_one(batch):
        logits = model(**inputs, use_cache=False).logits[0, prompt - 1 : prompt - 1 + len(answer)]
        log_pi = torch.log_softmax(logits / TEMPERATURE, -1)
        log_probs.append(log_pi.gather(-1, answer[:, None])[:, 0])
        entropies.append(-(log_pi.exp() * log_pi).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


def make(folder: str, kind=PolicyModel, **changes):
    if any(family in Path(folder).name for family in WITH_EXPERTS) and "lora" in changes:
        # Experts are no linear layers, and get no adapters.
        changes["lora"] = replace(changes["lora"], target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    spec = ModelSpec(folder, gradient_checkpointing=True, tower="trained")
    return sharded_model(kind, replace(spec, **changes), get_device("cpu")).train()


def loss_of(log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    return (log_probs * torch.linspace(-1, 1, len(log_probs))).sum() + 0.3 * entropy.sum()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("share", [True, False], ids=["shared", "apart"])
def test_log_probs_and_gradients_equal_transformers(folder, share):
    policy, batch = make(folder), make_batch(folder)
    reference = AutoModelForImageTextToText.from_pretrained(folder).eval()
    log_probs, entropy, *_ = policy(pack(batch, CPU, share=share), TEMPERATURE, True)
    expected = by_transformers(reference, batch)
    assert distance(log_probs, expected[0]) < 1e-5
    assert distance(entropy, expected[1]) < 1e-5
    loss_of(log_probs, entropy).backward()
    loss_of(*expected).backward()
    theirs = {name: each.grad for name, each in reference.named_parameters() if each.grad is not None}
    found = gradients_of(policy)
    assert distance(found, theirs) < 1e-5
    visual = [name for name in theirs if "language_model" not in name and "lm_head" not in name]
    assert len(visual) > 10
    assert distance({name: found[name] for name in visual}, {name: theirs[name] for name in visual}) < 1e-5


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("share", [True, False], ids=["shared", "apart"])
def test_an_image_is_encoded_once_a_prompt(folder, share):
    policy, batch = make(folder), make_batch(folder)
    (first, *_), rows = tower(policy.model), []
    first.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(args[0] if args else kwargs["pixel_values"])), with_kwargs=True
    )
    policy(pack(batch, CPU, share=share), TEMPERATURE)
    images = [images for images in batch.dictionary("images").values if images is not None]
    assert rows == [sum(len(image.pixel_values) for image in images)]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("changes", [{"tower": "frozen"}, {"lora": LORA, "tower": "frozen"}], ids=["plain", "adapters"])
def test_a_frozen_tower_is_used_and_gets_no_gradient(folder, changes):
    policy, batch = make(folder, **changes), make_batch(folder)
    reference = AutoModelForImageTextToText.from_pretrained(folder).eval()
    log_probs, entropy, *_ = policy(pack(batch, CPU), TEMPERATURE, True)
    assert distance(log_probs, by_transformers(reference, batch)[0]) < 1e-5
    loss_of(log_probs, entropy).backward()
    assert all(parameter.grad is None for part in tower(policy.model) for parameter in part.parameters())
    assert any(parameter.grad is not None for parameter in policy.parameters())


@pytest.mark.usefixtures("process_group")
def test_values_see_the_images(folder):
    critic, batch = make(folder, ScalarModel), make_batch(folder)
    head = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        critic.score.weight.to_local().copy_(head)
    model, expected = AutoModel.from_pretrained(folder).eval(), []
    for inputs, prompt, answer in one_by_one(batch):
        with torch.no_grad():
            states = model(**inputs, use_cache=False).last_hidden_state[0]
        expected.append((states @ head[0])[prompt - 1 : prompt - 1 + len(answer)])
    assert distance(critic(pack(batch, CPU)).detach(), torch.cat(expected)) < 1e-5


# -- two ranks ---------------------------------------------------------------------------------------------------------

# By data: which samples each rank has (ORDER mixes the prompts; 1 and 6 are texts). Or both hold every sequence.
CUTS = {"by data": [[0, 3, 4], [2, 5, 1, 6]], "texts beside images": [[0, 3, 4, 2, 5], [1, 6]],
        "one idles": [[*range(7)], []], "by sequence": None, "in a ring": None}  # fmt: skip
MODES = {"trained": {}, "frozen": {"tower": "frozen"}, "adapters": {"lora": LORA}}


def run_cut(policy: PolicyModel, batch: Batch, name: str) -> dict[str, torch.Tensor]:
    """Return the log-probs of this rank and the gradients of all ranks."""
    world, cut = dist.get_world_size(), CUTS.get(name, [[*range(7)]])
    weights = Ragged(torch.linspace(-1, 1, 32), batch.ragged("response").lengths)
    mine = [*range(7)] if cut is None else cut[dist.get_rank()]
    policy.group = sequence_group(policy.model.config, world, "key") if cut is None else None
    policy.ring = ring_of(dist.group.WORLD, 1, world) if name == "in a ring" else None
    policy.zero_grad(set_to_none=True)
    log_probs, *_ = policy(pack(batch.select(mine) if mine else Batch(), CPU), TEMPERATURE)
    loss = (log_probs * weights.select(np.array(mine)).values).sum() if mine else log_probs.sum()
    (loss * world).backward()  # FSDP takes the mean over the ranks
    return {"log_probs": log_probs.detach().clone(), **gradients_of(policy)}


def rank_main(rank: int, world: int, folder: Path) -> None:
    found = {}
    for family in FAMILIES:
        batch = make_batch(str(folder / family))
        for mode, changes in MODES.items():
            # Where ranks differ, each keeps some of the experts.
            shared = world if family in WITH_EXPERTS else 1
            policy = make(str(folder / family), **changes, fsdp=ShardingConfig(expert_parallel_size=shared))
            for name in CUTS if world > 1 else ("alone",):
                found[family, name, mode] = run_cut(policy, batch, name)
    torch.save(found, folder / f"rank_{rank}_of_{world}.pt")


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory):
    """The results of one process, and of a pair."""
    folder = tmp_path_factory.mktemp("ranks")
    for family in FAMILIES:
        make_folder(folder, family)
    for world in (1, 2):
        run_on_ranks(rank_main, world, folder)
    return [torch.load(folder / name) for name in ("rank_0_of_1.pt", "rank_0_of_2.pt", "rank_1_of_2.pt")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_compute_what_one_computes(on_ranks, family, cut, mode):
    alone, *pair = (found[family, name, mode] for found, name in zip(on_ranks, ["alone", cut, cut], strict=True))
    lengths = [length for *_, answers in PROMPTS for length in answers]
    expected = Ragged(alone["log_probs"], torch.tensor([lengths[number] for number in ORDER]))
    for found, mine in zip(pair, CUTS[cut] or [[*range(7)]] * 2, strict=True):
        wanted = expected.select(np.array(mine)).values if mine else expected.values[:0]
        assert len(found["log_probs"]) == len(wanted)
        assert not mine or distance(found["log_probs"], wanted) < 1e-5
        one, other = ({name: grad for name, grad in each.items() if name != "log_probs"} for each in (found, alone))
        assert one.keys() == other.keys()
        assert distance(one, other) < 1e-5
