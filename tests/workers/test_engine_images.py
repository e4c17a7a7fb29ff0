"""The contract of all engines for images, for every family that they run, compared with the trainer's forward."""

import importlib.util
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from rltrain.common.errors import ConfigError
from rltrain.common.seeds import sample_seeds
from rltrain.models.vision import placeholder_ids, tower
from rltrain.models.weights.names import CheckpointNames, gathered_weights
from rltrain.workers.rollout.contract import Job, Sampling
from rltrain.workers.rollout.vllm.images import image_arguments

if not importlib.util.find_spec("torchvision"):
    pytest.skip("torchvision is not installed (scripts/test.sh installs it)", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore")

from rltrain.data.chat import ChatEncoder  # noqa: E402
from rltrain.data.media.videos import VideoSettings  # noqa: E402
from rltrain.models.attention.packing import pack  # noqa: E402
from tests.distance import distance  # noqa: E402
from tests.models.test_vision_packed import batch_of, encoded_prompts, make, make_folder  # noqa: E402
from tests.tiny_vision import TOKENS, picture  # noqa: E402
from tests.workers.engines import Talk, engine_of, queue_of, rollout_of, running_engine, serve, settings_of  # noqa: E402
from tests.workers.test_engine_contract import answers, load  # noqa: E402

LONGEST = 128
# vLLM takes seconds to start, and shows a model of Qwen2-VL to the same code as one of Qwen2.5-VL.
ALWAYS = ["hf qwen2_vl", "hf internvl", "hf qwen3_5", "hf glm4v", "hf qwen3_vl in parts", "vllm qwen3_vl in place"]
SOMETIMES = [
    "hf qwen2_5_vl",
    "hf qwen3_vl_moe",
    "vllm qwen2_5_vl in place",
    "vllm internvl",
    "vllm qwen3_vl_moe",
    "hf qwen3_5_moe",
    "vllm glm4v",
]
ENGINES = [*ALWAYS, *(pytest.param(name, marks=pytest.mark.long) for name in SOMETIMES)]


@pytest.fixture(scope="module", params=ENGINES)
def made(request, tmp_path_factory):
    """(engine, policy, prompts)."""
    name, family, *how = request.param.split()
    folder = make_folder(tmp_path_factory.mktemp(family), family)
    asked = encoded_prompts(ChatEncoder(folder))
    # Prompts in parts of 10 tokens, which cut images; few answers at once, so that others enter later.
    limits = {"max_num_batched_tokens": 10, "max_num_seqs": 4} if how else {"max_num_seqs": 16}
    # Short prompts fill a block of the cache.
    rollout = rollout_of(name=name, engine_kwargs={"vllm": {"block_size": 32}}, **limits)
    settings = settings_of(folder, rollout, max_model_len=LONGEST, videos=VideoSettings())
    with running_engine(settings, accelerated="place" in how) as engine:
        yield engine, make(folder), asked


def sent(policy, engine):
    """Send the weights as a sync does."""
    return gathered_weights(
        policy, torch.float32, names=None if engine.names_in_memory else CheckpointNames(policy.model)
    )


@pytest.fixture
def ready(made):
    engine, policy, asked = made
    load(engine, sent(policy, engine))
    yield engine, policy, asked
    engine.sleep()


def jobs_of(asked, num_samples: int, given=None) -> list[Job]:
    seeds = sample_seeds(7, 1, range(len(asked)), num_samples).reshape(-1, num_samples)
    return [
        Job(
            prompt_index,
            np.arange(num_samples),
            each.tokens,
            seeds[prompt_index],
            given and given[prompt_index],
            each.images,
        )
        for prompt_index, each in enumerate(asked)
    ]


def longer(asked, tokens):
    """Return the prompt with more text at the end."""
    images = asked.images
    if images is not None and images.positions is not None:
        rest = len(asked.tokens) + asked.position_shift + np.arange(len(tokens))
        images = replace(images, positions=np.concatenate([images.positions, np.tile(rest, (3, 1))], 1))
    return replace(asked, tokens=np.append(asked.tokens, tokens).astype(np.int32), images=images)


def run(engine, asked, sampling, num_samples=1):
    return serve(engine, queue_of(jobs_of(asked, num_samples)), sampling)


@torch.no_grad()
def by_trainer(policy, asked, found: list[list[int]], temperature=1.0) -> torch.Tensor:
    """Return log pi of all tokens of the responses, with equal numbers of responses per prompt."""
    index = torch.arange(len(asked)).repeat_interleave(len(found) // len(asked))
    return policy(pack(batch_of(asked, index, found), torch.device("cpu")), temperature).log_probs


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "sampling",
    [Sampling(12), Sampling(12, temperature=1.7, ignore_eos=True), Sampling(12, greedy=True, ignore_eos=True)],
)
def test_log_probs_are_the_trainers_and_placeholders_never_drawn(ready, sampling):
    """One batch has prompts with several images and none. Placeholders would be drawn sometimes, and stay in the
    softmax."""
    engine, policy, asked = ready
    found = run(engine, asked, sampling, 4)
    assert not set(found.tokens.values.tolist()) & set(placeholder_ids(policy.model.config))
    assert sampling.greedy or len({tuple(answer) for answer in answers(found)[:4]}) > 2
    expected = by_trainer(policy, asked, answers(found), sampling.temperature)
    assert distance(found.log_probs.values, expected) < 1e-4


def test_answers_are_those_of_the_embedded_engine_however_spread(ready):
    engine, policy, asked = ready
    together = answers(run(engine, asked, Sampling(12), 4))
    embedded = engine_of("hf", policy.model.config, max_model_len=LONGEST)
    load(embedded, gathered_weights(policy, torch.float32))
    assert together == answers(run(embedded, asked, Sampling(12), 4))
    # As two replicas would serve them: other neighbours, another order; half the answers to a prompt in each of two.
    jobs = jobs_of(asked, 4)
    halves = [replace(jobs[0], samples=np.arange(k, k + 2), seeds=jobs[0].seeds[k : k + 2]) for k in (0, 2)]
    generated = answers(serve(engine, queue_of([jobs[2], *halves]), Sampling(12)))
    assert generated == [*together[8:], *together[:4]]


def test_answers_go_on_where_they_were_left(ready):
    engine, _, asked = ready
    sampling = Sampling(12, ignore_eos=True)
    whole = answers(run(engine, asked, sampling, 2))
    given = [
        tuple(np.array(whole[2 * prompt_index + k][:5], dtype=np.int32) for k in (0, 1))
        for prompt_index in range(len(asked))
    ]
    rest = answers(serve(engine, queue_of(jobs_of(asked, 2, given)), sampling))
    assert [[*part, *more] for part, more in zip([one for pair in given for one in pair], rest, strict=True)] == whole


def test_a_next_turn_is_the_same_whether_its_keys_were_kept_or_not(ready):
    engine, policy, asked = ready
    if not engine.names_in_memory:
        pytest.skip("of the embedded engine")
    engine = engine_of("hf", policy.model.config, max_model_len=LONGEST, ends=range(0, len(TOKENS), 3))
    load(engine, sent(policy, engine))
    talks = []
    for keeps in (False, True):
        talks.append(Talk(jobs_of(asked, 2), 30, keeps=keeps))
        engine.generate(talks[-1], Sampling(30, temperature=1.2))
    assert talks[0].tokens == talks[1].tokens
    turns = [[turn for key in sorted(talk.turns) for turn in talk.turns[key]] for talk in talks]
    log_probs = [torch.tensor([number for turn in of_talk for number in turn.log_probs]) for of_talk in turns]
    assert distance(*log_probs) < 1e-4
    assert sum(turn.num_reused for turn in turns[1]) > len(asked) * len(asked[0].tokens)


def test_an_image_is_encoded_once_for_all_answers(ready):
    engine, _, asked = ready
    model = engine.model if hasattr(engine, "model") else engine.worker.model_runner.get_model()
    part, rows = next(module for name, module in model.named_modules() if name.endswith(("visual", "vision_tower"))), []
    handle = part.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len([*args, *kwargs.values()][0])), with_kwargs=True
    )
    run(engine, asked, Sampling(2, ignore_eos=True), 4)
    handle.remove()
    expected = sum(len(each.images.pixel_values) for each in asked if each.images is not None)
    if "in parts" in os.environ["PYTEST_CURRENT_TEST"]:
        # Encoded again for every part in which the image has tokens, and still not for each of the four answers.
        assert expected < sum(rows) < 4 * expected
    else:
        assert sum(rows) == expected


def test_a_prompt_with_images_is_scored_as_by_the_trainer(ready):
    engine, policy, asked = ready
    for each in asked:
        expected = by_trainer(policy, [each], [[7, 16, 18, 8]])
        log_probs = engine.log_probs(longer(each, [7, 16, 18, 8]))
        assert len(log_probs) == len(each.tokens) + 3
        assert distance(log_probs[-4:], expected) < 1e-5


def test_new_weights_count_from_the_next_token_on(ready):
    """This includes the vision tower's weights: no earlier result for the same images is reused."""
    engine, policy, asked = ready
    state = {name: weight.clone() for name, weight in policy.state_dict().items()}
    before = answers(run(engine, asked, Sampling(8), 2))
    for parts in (tower(policy.model), [policy]):
        torch.manual_seed(5)
        for weight in (weight for part in parts for weight in part.parameters()):
            weight.data.add_(torch.randn_like(weight.data) * 0.1)
        engine.sleep()
        load(engine, sent(policy, engine))
        found = run(engine, asked, Sampling(8), 2)
        assert answers(found) != before
        assert distance(found.log_probs.values, by_trainer(policy, asked, answers(found))) < 1e-4
    policy.load_state_dict(state)


def test_placeholders_count_for_the_longest_sequence(ready):
    engine, _, asked = ready
    almost = longer(asked[0], [7] * (LONGEST - 3 - len(asked[0].tokens)))
    found = run(engine, [almost], Sampling(100, ignore_eos=True), 2)
    assert found.tokens.lengths.tolist() == [3, 3]
    assert found.truncated.tolist() == [True, True]


def test_an_image_that_vllm_has_no_room_for_is_named_with_the_keys(ready):
    """Bounds are on pixels, and the short side of an image a hundred times as long as wide is rounded up to a token."""
    engine, _, asked = ready
    if "vllm qwen3_vl in place" not in os.environ["PYTEST_CURRENT_TEST"]:
        return  # others have the room, also because of videos
    thin = ChatEncoder(engine.llm.model_config.model).encode_prompt(
        [{"role": "user", "content": "<image>"}], [picture(3000, 20)]
    )
    with pytest.raises(ConfigError, match=r"Lower data\.max_pixels, or raise"):
        run(engine, [thin], Sampling(2))
    assert answers(run(engine, asked, Sampling(2)))


@pytest.mark.parametrize(("family", "frames"), [("qwen2_5_vl", 1), ("glm4v", 2)])
def test_vllm_gets_the_bound_of_pixels_in_the_unit_of_the_processor(family, frames, tmp_path):
    settings = settings_of(make_folder(tmp_path, family), rollout_of(name="vllm"))
    arguments = image_arguments(replace(settings, images=True, max_pixels=7056))
    assert arguments["mm_processor_kwargs"] == {"max_pixels": frames * 7056}


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_vllm_answers_images_with_gated_delta_nets(family, tmp_path):
    """vLLM's CPU kernel accepts only bfloat16, so blank images are the control."""
    folder = make_folder(tmp_path, family)
    encoder = ChatEncoder(folder)
    asked, blank = encoded_prompts(encoder), encoded_prompts(encoder, blank=True)
    settings = settings_of(
        folder, rollout_of(name="vllm", max_num_seqs=16), max_model_len=LONGEST, dtype=torch.bfloat16
    )
    with running_engine(settings) as engine:
        policy = make(folder)
        load(engine, gathered_weights(policy, torch.bfloat16, names=CheckpointNames(policy.model)))
        found = run(engine, asked, Sampling(12, ignore_eos=True), 4)
        policy.to(torch.bfloat16)
        expected, control = (by_trainer(policy, prompts, answers(found)).float() for prompts in (asked, blank))
    assert distance(found.log_probs.values, expected) < 0.03
    assert distance(found.log_probs.values, control) > 0.09
