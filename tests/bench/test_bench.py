"""The benches measure what they say: the same work on both sides, exact floors, and they run."""

import math

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen3ForCausalLM

from bench import gpu, phases, pictures, scale, step, vision, workload
from bench.floor import Floor, Group
from bench.idle_worker import IdleWorker
from rltrain.data.chat import ChatEncoder
from rltrain.data.rows import read_rows
from rltrain.models.packing import pack
from scripts.make_small_model import END
from tests.local import LocalGroup

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("equal", "long_tail")}
    for kind, each in folders.items():
        workload.make(each, kind, "test", 1)
    return folders


def test_the_floor_computes_what_transformers_does(folder):
    model = Qwen3ForCausalLM.from_pretrained(folder["equal"] / "model")
    floor = Floor(model, torch.float32)
    prompts = torch.randint(300, 1000, (3, 11), generator=torch.Generator().manual_seed(0))
    answers, sampled = floor.generate(prompts, 4, 9)
    rows = torch.cat([prompts[:, None].expand(-1, 4, -1), answers], -1).flatten(0, 1)
    with torch.no_grad():
        logits = model(rows).logits[:, 10:-1]
    expected = torch.log_softmax(logits, -1).gather(-1, answers.flatten(0, 1)[..., None])[..., 0].view(3, 4, 9)
    assert torch.allclose(sampled, expected, atol=1e-5)
    gradients = []
    for shared in (False, True):
        found = floor.log_probs(Group(prompts, answers), shared)
        assert torch.allclose(found, expected, atol=1e-5)
        gradients.append(torch.autograd.grad(found.square().sum(), list(floor.weights.values())))
    assert all(torch.allclose(one, other, atol=1e-3) for one, other in zip(*gradients, strict=True))


def test_the_weights_of_the_workload_decide_how_long_answers_get(folder):
    """From the first half of the vocabulary 1 in 24 ends and 1 in 60 goes over; in the second half 1 in 170 ends and
    none goes back.
    """
    tokens = torch.randint(300, 512, (64, 6), generator=torch.Generator().manual_seed(0))
    for kind, ends in (("equal", (0.0, 0.0)), ("long_tail", (1 / 24, 1 / 170))):
        model = Qwen3ForCausalLM.from_pretrained(folder[kind] / "model").eval()
        end = model.config.eos_token_id
        for place, half in enumerate((tokens, tokens + 512)):
            with torch.no_grad():
                probs = model(half).logits[:, -1].softmax(-1)
            assert float(probs[:, end].mean()) == pytest.approx(ends[place], rel=0.2, abs=1e-6)
            if kind == "long_tail":
                over = float(probs[:, 512:].sum(-1).mean())
                assert over == pytest.approx(1 / 60, rel=0.3) if not place else over > 0.98


def test_with_images_no_answer_ends_or_holds_a_placeholder(tmp_path):
    pytest.importorskip("torchvision")
    workload.make(tmp_path, "images", "test", 1)
    encoder, rows = ChatEncoder(str(tmp_path / "model")), read_rows(str(tmp_path / "train.parquet"))
    asked = encoder.encode_prompt(rows[0].prompt, rows.images(0))
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "model")
    marks = encoder.tokenizer.convert_tokens_to_ids([*pictures.MARKS, END])
    assert asked.tokens.tolist().count(model.config.image_token_id) == pictures.TOKENS
    with torch.no_grad():
        probs = model(torch.arange(300, 1000)[:, None]).logits[:, -1].softmax(-1)
    assert float(probs[:, marks].max()) < 1e-6


def test_the_drivers_part_of_a_step_needs_no_model():
    trainer = scale.make_trainer(LocalGroup(IdleWorker(prompt_tokens=10)), 1, 64, 100)
    metrics = trainer.step(1)
    assert metrics["response_length/mean"] == pytest.approx(100, rel=0.2)
    assert math.isfinite(metrics["timing_s/other"])


def test_a_row_compares_by_tokens_a_second():
    none = dict.fromkeys(step.PHASES, 0.0)
    ours = none | {"step": 2.0, "response_length": 100.0, "prompt_length": 60.0}
    peers = none | {"step": 3.0, "response_length": 50.0, "prompt_length": 60.0}
    one, other = step.rows_of("long_tail", {"TRL": [peers], step.OURS: [ours]})
    assert one.endswith(f"| {160 / 2 / (110 / 3):.2f} |")
    assert other.endswith("| 1.00 |")


def test_passes_over_unequal_lengths_compare_per_token():
    equal = dict.fromkeys(phases.PASSES, 2.0) | {"tokens": 1000.0}
    short = dict.fromkeys(phases.PASSES, 2.5) | {"tokens": 1000.0}
    tail = dict.fromkeys(phases.PASSES, 1.5) | {"tokens": 500.0, "response_length": 64.4}
    title, *_, update = phases.lengths_table({128: [equal], 64: [short]}, [tail])
    assert update == "| update_actor | 3000.0 | 2000.0 | 1.50 | 2500.0 | 1.20 |"
    assert "64 tokens on average" in title


def test_the_accelerator_bench_runs_on_a_cpu(tmp_path):
    options = {"shape": "tiny", "device": "cpu", "prompts": 2, "answers": 2, "prompt-tokens": 40, "response-tokens": 6,
               "steps": 1,
               "work": tmp_path, "out": tmp_path / "gpu.md"}  # fmt: skip
    gpu.main([word for name, value in options.items() for word in (f"--{name}", str(value))])
    text = (tmp_path / "gpu.md").read_text()
    for phase in ("generate_sequences", "old_log_prob", "update_actor", "step"):
        (row,) = [line for line in text.splitlines() if line.startswith(f"| {phase} |")]
        assert float(row.split("|")[3].replace(",", "")) > 0


def test_decode_work_is_the_weights_per_step_and_the_cache():
    class Options:
        shape, prompts, answers, response_tokens, device = "tiny", 2, 3, 10, "cpu"

    sizes = {"matmul_parameters": 1000, "attention_width": 2 * 4 * 16}
    found = gpu.work(Options, sizes, prompt=20.0)
    assert found["forward"] == 6 * (2 * 1000 * 30 + 2 * 128 * 30**2)
    kept = 2 * 2 * 2 * 16 * 4  # keys and values x key heads x layers x head size x bytes
    assert found["read"] == 10 * 1000 * 4 + 6 * kept * (10 * 20 + 10**2 / 2)


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_the_three_ways_to_see_compute_the_same(tmp_path, family):
    vision.make_model(family, tmp_path, 128, 2)
    case = vision.Case(family, 3, tmp_path, edge=168)
    assert vision.differences(case) < 1e-5
    rows = [pack(each, vision.CPU).images.pixel_values for each in (case.batch, vision.brought_along(case.batch))]
    assert len(rows[1]) == vision.ANSWERS * len(rows[0])
