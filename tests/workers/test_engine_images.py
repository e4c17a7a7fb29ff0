"""Images through the vLLM adapter: vision-language models, measured against transformers."""

import copy
import gc
import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rltrain.config.rollout_schema import RolloutConfig
from rltrain.errors import ConfigError
from rltrain.models.load import load_config
from rltrain.models.vision import placeholder_ids, takes_images
from rltrain.seeds import sample_seeds
from rltrain.workers.rollout.base import Job, Sampling, check_images
from tests.distance import distance
from tests.workers.engines import engine_of, queue_of
from tests.workers.test_engine_contract import answers, load, weights_of

for package in ("vllm", "torchvision"):
    if not importlib.util.find_spec(package):
        pytest.skip(f"{package} is not installed (scripts/test.sh installs it)", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore")

from tests.tiny_vision import END, IMAGE, START, VIDEO, picture, save_tiny_vision_model  # noqa: E402

LONGEST = 64
PLACEHOLDERS = [START, END, IMAGE, VIDEO]
# Family, tied embeddings, weights written in place (as on accelerators).
ENGINES = [("qwen2_5_vl", False, False), ("qwen3_vl", True, False), ("qwen2_5_vl", True, True)]
WORDS = [7, 16, 7, 18]


def with_images(count: int, words=WORDS) -> np.ndarray:
    """One placeholder an image."""
    return np.array([*[START, IMAGE, END] * count, *words], dtype=np.int32)


def jobs_of(prompts, num_samples: int = 1, step: int = 1) -> list[Job]:
    """One job a pair of prompt and images."""
    seeds = sample_seeds(7, step, range(len(prompts)), num_samples).reshape(-1, num_samples)
    return [
        Job(place, np.arange(num_samples), prompt, seeds[place], images=tuple(images))
        for place, (prompt, images) in enumerate(prompts)
    ]


# A text, images of several sizes, two in one prompt.
SMALL, WIDE, TALL = picture(60, 60), picture(160, 60, seed=1), picture(60, 120, seed=2)
PROMPTS = [
    (with_images(1), [SMALL]),
    (with_images(1), [WIDE]),
    (with_images(0), []),
    (with_images(2, [9, 18]), [TALL, SMALL]),
]


class Reference:
    """The same model by transformers; its weights can be changed."""

    def __init__(self, path):
        from transformers import AutoImageProcessor, AutoModelForImageTextToText

        self.model = AutoModelForImageTextToText.from_pretrained(path).eval()
        self._processor = AutoImageProcessor.from_pretrained(path)

    def inputs(self, prompt, images, answer=()):
        """What the trainer would compute: as many placeholders as the image takes, and which tokens they are."""
        pixels = dict(self._processor(images=list(images), return_tensors="pt")) if images else {}
        counts = [int(grid.prod()) // 4 for grid in pixels.get("image_grid_thw", [])]
        ids: list[int] = []
        for token in prompt.tolist():
            ids += [token] * (counts.pop(0) if token == IMAGE else 1)
        self.prompt_length = len(ids)
        tokens = torch.tensor([ids + list(answer)])
        kinds = (tokens == IMAGE).int()
        kinds[:, self.prompt_length :] = 0
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "mm_token_type_ids": kinds} | pixels

    def greedy(self, prompt, images, length=12):
        found = self.model.generate(
            **self.inputs(prompt, images), max_new_tokens=length, do_sample=False, suppress_tokens=PLACEHOLDERS
        )
        return found[0, self.prompt_length :].tolist()

    @torch.no_grad()
    def log_probs(self, prompt, images, answer, temperature=1.0):
        logits = self.model(**self.inputs(prompt, images, answer), use_cache=False).logits[0]
        logits = logits[self.prompt_length - 1 : -1] / temperature
        return torch.log_softmax(logits, -1).gather(-1, torch.tensor(answer)[:, None])[:, 0]


@pytest.fixture(scope="module", params=ENGINES, ids=lambda param: "-".join(map(str, param)))
def made(request, tmp_path_factory):
    """(engine, reference)."""
    import vllm._custom_ops as kernels
    from vllm.distributed import cleanup_dist_env_and_memory

    family, tied, in_place = request.param
    path = save_tiny_vision_model(tmp_path_factory.mktemp(family), family, tied=tied)
    rollout = RolloutConfig()
    rollout.max_num_seqs = 8
    rollout.engine_kwargs = {"vllm": {"block_size": 32}}
    packed, kernels._supports_onednn = kernels._supports_onednn, kernels._supports_onednn and not in_place
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine = engine_of("vllm", str(path), rollout)
    engine._reload = not in_place
    yield engine, Reference(path)
    kernels._supports_onednn = packed
    del engine
    gc.collect()
    cleanup_dist_env_and_memory()


@pytest.fixture
def ready(made):
    engine, reference = made
    reference = copy.copy(reference)
    load(engine, weights_of(reference.model))
    yield engine, reference
    engine.sleep()


def run(engine, prompts, sampling, num_samples=1, step=1):
    return engine.generate(queue_of(jobs_of(prompts, num_samples, step)), sampling)


def test_greedy_answers_and_log_probs_are_those_of_transformers(ready):
    """Images of different sizes, two in a prompt and none, in one batch; placeholders would win some steps."""
    engine, reference = ready
    found = run(engine, PROMPTS, Sampling(12, greedy=True))
    assert answers(found) == [reference.greedy(*prompt) for prompt in PROMPTS]
    for prompt, answer, log_probs in zip(PROMPTS, answers(found), found.log_probs.rows(), strict=True):
        assert distance(log_probs, reference.log_probs(*prompt, answer)) < 1e-4


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_placeholders_are_never_drawn_and_stay_in_the_softmax(ready, temperature):
    engine, reference = ready
    found = run(engine, PROMPTS, Sampling(20, temperature=temperature, ignore_eos=True), num_samples=4)
    assert not set(found.tokens.values.tolist()) & set(PLACEHOLDERS)
    for number, (answer, log_probs) in enumerate(zip(answers(found), found.log_probs.rows(), strict=True)):
        expected = reference.log_probs(*PROMPTS[number // 4], answer, temperature)
        assert distance(log_probs, expected) < 1e-4


def test_samples_differ_and_repeat_however_they_are_spread(ready):
    engine, _ = ready
    together = answers(run(engine, PROMPTS, Sampling(12), num_samples=4))
    assert len({tuple(answer) for answer in together[:4]}) > 2
    assert answers(run(engine, PROMPTS, Sampling(12), num_samples=4)) == together
    assert answers(run(engine, PROMPTS, Sampling(12), num_samples=4, step=2)) != together
    jobs = jobs_of(PROMPTS, 4)
    for share in ([3, 1], [2, 0]):
        found = answers(engine.generate(queue_of([jobs[place] for place in share]), Sampling(12)))
        assert found == [together[4 * place + number] for place in share for number in range(4)]


def test_the_image_counts_and_may_come_as_a_file(ready):
    engine, _ = ready
    file = io.BytesIO()
    SMALL.save(file, "PNG")
    prompt = with_images(1)
    images = [SMALL, file.getvalue(), picture(60, 60, seed=3)]
    same, read, other = run(engine, [(prompt, [image]) for image in images], Sampling(1, greedy=True)).log_probs.values
    assert same == read != other


def test_new_weights_count_from_the_next_token_on(ready):
    """Those of the vision tower too: nothing that was computed of the same images is left."""
    engine, reference = ready
    before = answers(run(engine, PROMPTS, Sampling(8, greedy=True)))
    reference.model = copy.deepcopy(reference.model)
    for part in (reference.model.model.visual, reference.model):
        randomize_part(part)
        engine.sleep()
        load(engine, weights_of(reference.model))
        found = run(engine, PROMPTS, Sampling(8, greedy=True))
        after = answers(found)
        assert after == [reference.greedy(*prompt, 8) for prompt in PROMPTS] != before
        for prompt, answer, log_probs in zip(PROMPTS, after, found.log_probs.rows(), strict=True):
            assert distance(log_probs, reference.log_probs(*prompt, answer)) < 1e-4


def randomize_part(part):
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


def test_the_longest_sequence_counts_what_images_take(ready):
    engine, reference = ready
    prompt = (with_images(1, [6 + number % 10 for number in range(40)]), [WIDE])
    reference.inputs(*prompt)
    found = run(engine, [prompt], Sampling(100, ignore_eos=True))
    assert found.tokens.lengths.tolist() == [LONGEST - reference.prompt_length]
    assert found.truncated.tolist() == [True]
    with pytest.raises(Exception, match="multimodal tokens"):
        run(engine, [(with_images(1, [6] * 60), [WIDE])], Sampling(4))


def test_a_text_is_scored_as_by_the_trainer(ready):
    engine, reference = ready
    tokens = [7, 16, 7, 18, 8, 1]
    expected = reference.log_probs(np.array(tokens[:1], dtype=np.int32), [], tokens[1:])
    assert distance(engine.log_probs(tokens), expected) < 1e-5


def test_what_a_model_says_of_images(tiny_model, tmp_path):
    path = save_tiny_vision_model(tmp_path, "qwen3_vl", tied=True)
    vision, text = load_config(str(path)), load_config(str(tiny_model))
    assert (takes_images(vision), placeholder_ids(vision)) == (True, sorted(PLACEHOLDERS))
    assert (takes_images(text), placeholder_ids(text)) == (False, [])


def test_an_engine_for_text_refuses_images():
    jobs = jobs_of(PROMPTS)
    check_images("vllm", jobs)
    check_images("sglang", [job for job in jobs if not job.images])
    with pytest.raises(ConfigError, match="takes text alone"):
        check_images("sglang", jobs)


def test_letting_torchvision_in_costs_other_programs_nothing():
    """The hook of scripts/torchvision_cpu.py imports PyTorch with torchvision, not before."""
    code = """import sys, importlib.util, torchvision_cpu
assert importlib.util.find_spec('torchvision')
assert 'torch' not in sys.modules"""
    scripts = Path(__file__).parents[2] / "scripts"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(scripts)}, check=True, timeout=60)
