"""The benches measure what they say: the same work on both sides, exact floors, and they run."""

import math
from pathlib import Path

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen3ForCausalLM

from bench import gpu, phases, pictures, scale, step, vision, workload
from bench.floor import Floor, Group
from bench.idle_worker import IdleWorker
from rltrain.data.chat import ChatEncoder
from rltrain.data.rows import read_rows
from rltrain.models.attention.packing import pack
from scripts.make_small_model import END
from tests.local import LocalGroup
from tests.npu import standin

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
        log_probs = floor.log_probs(Group(prompts, answers), shared)
        assert torch.allclose(log_probs, expected, atol=1e-5)
        gradients.append(torch.autograd.grad(log_probs.square().sum(), list(floor.weights.values())))
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
    metrics = trainer.step(1).metrics
    assert metrics["response_length/mean"] == pytest.approx(100, rel=0.2)
    assert math.isfinite(metrics["timing_s/other"])


def test_a_row_compares_by_tokens_a_second():
    none = dict.fromkeys(step.PHASES, 0.0)
    ours = none | {"step": 2.0, "response_length": 100.0, "prompt_length": 60.0}
    peers = none | {"step": 3.0, "response_length": 50.0, "prompt_length": 60.0}
    one, other = step.rows_of("long_tail", {"TRL": [peers], step.OURS: [ours]})
    assert one.endswith(f"| {160 / 2 / (110 / 3):.2f} |")
    assert other.endswith("| 1.00 |")


def test_only_the_published_shape_is_compared_with_its_step():
    assert scale.share_of_published(64, 2048, 4.474) == "1.000 %"
    assert scale.share_of_published(384, 4096, 4.474) == scale.share_of_published(64, 4096, 4.474) == "-"


def test_passes_over_unequal_lengths_compare_per_token():
    equal = dict.fromkeys(phases.PASSES, 2.0) | {"tokens": 1000.0}
    short = dict.fromkeys(phases.PASSES, 2.5) | {"tokens": 1000.0}
    tail = dict.fromkeys(phases.PASSES, 1.5) | {"tokens": 500.0, "response_length": 64.4}
    title, *_, update = phases.lengths_table({128: [equal], 64: [short]}, [tail]).splitlines()
    assert update == "| update_actor | 3000.0 | 2000.0 | 1.50 | 2500.0 | 1.20 |"
    assert "64 tokens on average" in title


TINY = {
    "shape": "tiny", "prompts": 2, "answers": 2, "prompt-tokens": 40, "response-tokens": 6, "steps": 1,
}  # fmt: skip


def accelerator_bench(device: str, folder: Path, *more: str) -> list[str]:
    options = TINY | {"device": device, "work": folder, "out": folder / "gpu.md"}
    return [*(word for name, value in options.items() for word in (f"--{name}", str(value))), *more]


def rows_in(folder: Path) -> dict[str, list[str]]:
    """Of each stage, its rows."""
    found: dict[str, list[str]] = {}
    for line in (folder / "gpu.md").read_text().splitlines():
        if line.startswith("| ") and not line.startswith("| stage"):
            found.setdefault(line.split("|")[1].strip(), []).append(line)
    return found


def test_the_first_hour_runs_on_a_cpu_and_says_what_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "installed", lambda package: False)
    gpu.main(accelerator_bench("cpu", tmp_path, "--here", "--stages", "kernels", "step", "eager", "graphs"))
    found = rows_in(tmp_path)
    assert [name for name, rows in found.items() if "**not run**" in rows[0]] == [
        "eager",
        "graphs",
        "devices",
        "reshard",
    ]
    assert "vLLM is not installed here" in found["eager"][0]
    assert "a CPU captures no graphs" in found["graphs"][0]
    assert "not asked for" in found["devices"][0]
    for what in ("generate_sequences", "old_log_prob", "update_actor", "step"):
        (value,) = [line.split("|")[3] for line in found["step"] if line.split("|")[2].strip() == what]
        assert float(value.split()[0]) > 0


@pytest.mark.long
def test_a_stage_that_crashes_leaves_its_reason_and_the_others(tmp_path):
    argv = accelerator_bench("cpu", tmp_path, "--stages", "step", "--set", "trainer.no_such_key=1")
    gpu.main(argv)
    (row,) = rows_in(tmp_path)["step"]
    assert "**not run**" in row
    assert "unknown key 'trainer.no_such_key'" in row


@pytest.mark.long
def test_the_first_hour_runs_on_the_stand_in(tmp_path):
    argv = accelerator_bench("npu", tmp_path, "--here", "--stages", "kernels", "step")
    standin.run(f"import torch_npu\nfrom bench import gpu\ngpu.main({argv!r})")
    found = rows_in(tmp_path)
    (row,) = [line for line in found["step"] if "max_memory_reserved_gb" in line]
    assert float(row.split("|")[3].split()[0]) > 0
    assert "kernels" in found


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_the_three_ways_to_see_compute_the_same(tmp_path, family):
    vision.make_model(family, tmp_path, 128, 2)
    case = vision.Case(family, 3, tmp_path, edge=168)
    assert vision.differences(case) < 1e-5
    rows = [pack(each, vision.CPU).images.pixel_values for each in (case.batch, vision.brought_along(case.batch))]
    assert len(rows[1]) == vision.ANSWERS * len(rows[0])
