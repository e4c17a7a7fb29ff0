"""Images through the embedded engine: four families, measured against transformers and the trainer's forward."""

import importlib.util

import numpy as np
import pytest
import torch

if not importlib.util.find_spec("torchvision"):
    pytest.skip("torchvision is not installed (scripts/test.sh installs it)", allow_module_level=True)

from transformers import AutoModelForImageTextToText

from rltrain.data.chat import ChatEncoder
from rltrain.models.vision import placeholder_ids
from rltrain.models.weights import Weight
from rltrain.seeds import sample_seeds
from rltrain.workers.rollout.base import Job, Sampling
from tests.distance import distance
from tests.models.test_vision_packed import PROMPTS, make_folder
from tests.tiny_vision import FAMILIES, IMAGE
from tests.workers.engines import engine_of, queue_of, rollout_of
from tests.workers.test_engine_contract import answers


@pytest.fixture(scope="module", params=FAMILIES)
def made(request, tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp(request.param), request.param)
    encoder = ChatEncoder(folder)
    asked = [encoder.encode_prompt([{"role": "user", "content": text}], images) for text, images, _ in PROMPTS]
    return folder, AutoModelForImageTextToText.from_pretrained(folder).eval(), asked


def make_engine(made, **rollout):
    folder, model, _ = made
    engine = engine_of("hf", folder, rollout_of(**rollout), max_model_len=128)
    engine.load_weights(Weight(name, each.data) for name, each in model.named_parameters())
    engine.load_weights(Weight(name, each, False) for name, each in model.named_buffers())
    engine.wake_cache()
    return engine


def jobs_of(asked, num_samples: int, given=None) -> list[Job]:
    seeds = sample_seeds(7, 1, range(len(asked)), num_samples).reshape(-1, num_samples)
    return [
        Job(place, np.arange(num_samples), each.short, seeds[place], encoded=each, given=given and given[place])
        for place, each in enumerate(asked)
    ]


@torch.no_grad()
def log_probs(model, asked, answer) -> torch.Tensor:
    """By transformers, of the whole at once."""
    tokens = torch.tensor([[*asked.tokens.tolist(), *answer]])
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if asked.images is not None:
        inputs["pixel_values"] = torch.from_numpy(asked.images.pixel_values)
        if asked.images.grids is not None:
            grids = torch.from_numpy(asked.images.grids)
            inputs |= {"image_grid_thw": grids, "mm_token_type_ids": (tokens == IMAGE).int()}
    found = torch.log_softmax(model(**inputs, use_cache=False).logits[0], -1)[len(asked.tokens) - 1 : -1]
    return found.gather(-1, torch.tensor(answer)[:, None])[:, 0]


# All prompts in one row; parts of 10 tokens, which cut images; two answers at once, so others enter later.
ROLLOUTS = {"together": {}, "in parts": {"max_num_batched_tokens": 10}, "one by one": {"max_num_seqs": 2}}


@pytest.mark.parametrize("rollout", ROLLOUTS)
def test_answers_to_images_have_the_log_probs_of_transformers(made, rollout):
    (_, model, asked), engine = made, make_engine(made, **ROLLOUTS[rollout])
    found = engine.generate(queue_of(jobs_of(asked, 2)), Sampling(12, ignore_eos=True))
    assert not set(found.tokens.values.tolist()) & set(placeholder_ids(model.config))
    for number, (answer, own) in enumerate(zip(answers(found), found.log_probs.rows(), strict=True)):
        assert distance(own, log_probs(model, asked[number // 2], answer)) < 1e-4


def test_answers_go_on_where_they_were_left(made):
    _, _, asked = made
    engine = make_engine(made)
    whole = answers(engine.generate(queue_of(jobs_of(asked, 2)), Sampling(12, ignore_eos=True)))
    given = [tuple(np.array(whole[2 * place + k][:5], dtype=np.int32) for k in (0, 1)) for place in range(len(asked))]
    rest = answers(engine.generate(queue_of(jobs_of(asked, 2, given)), Sampling(12, ignore_eos=True)))
    assert [[*part, *more] for part, more in zip([one for pair in given for one in pair], rest, strict=True)] == whole


def test_placeholders_count_for_the_longest_sequence(made):
    _, _, asked = made
    engine = make_engine(made)
    engine._max_model_len = len(asked[0].tokens) + 3
    found = engine.generate(queue_of(jobs_of(asked[:1], 2)), Sampling(12, ignore_eos=True))
    assert found.tokens.lengths.tolist() == [3, 3]
