"""The benchmarks run, give both sides the same work, and compute exact lower bounds."""

import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from bench import gpu, scale, workload
from bench.floor import Floor, Group
from bench.idle_worker import IdleWorker
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
        log_probs = floor.log_probs(Group(prompts, answers), shared)
        assert torch.allclose(log_probs, expected, atol=1e-5)
        gradients.append(torch.autograd.grad(log_probs.square().sum(), list(floor.weights.values())))
    assert all(torch.allclose(one, other, atol=1e-3) for one, other in zip(*gradients, strict=True))


def test_the_drivers_part_of_a_step_needs_no_model():
    trainer = scale.make_trainer(LocalGroup(IdleWorker(prompt_tokens=10)), 1, 64, 100)
    metrics = trainer.step(1).metrics
    assert metrics["response_length/mean"] == pytest.approx(100, rel=0.2)
    assert math.isfinite(metrics["timing_s/other"])


TINY = {
    "shape": "tiny", "prompts": 2, "answers": 2, "prompt-tokens": 40, "response-tokens": 6, "steps": 1,
}  # fmt: skip


def rows_in(folder: Path) -> dict[str, list[str]]:
    """Return the rows of each stage."""
    found: dict[str, list[str]] = {}
    for line in (folder / "gpu.md").read_text().splitlines():
        if line.startswith("| ") and not line.startswith("| stage"):
            found.setdefault(line.split("|")[1].strip(), []).append(line)
    return found


def test_the_first_hour_runs_on_a_cpu_and_says_what_does_not(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # counts as not installed
    options = TINY | {"device": "cpu", "work": tmp_path, "out": tmp_path / "gpu.md"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    gpu.main([*words, "--here", "--stages", "kernels", "step", "eager", "graphs"])
    found = rows_in(tmp_path)
    not_run = [name for name, rows in found.items() if "**not run**" in rows[0]]
    assert not_run == ["eager", "graphs", "devices", "reshard"]
    assert "vLLM is not installed here" in found["eager"][0]
    assert "a CPU captures no graphs" in found["graphs"][0]
    assert "not requested" in found["devices"][0]
    for what in ("generate_sequences", "old_log_prob", "update_actor", "step"):
        (value,) = [line.split("|")[3] for line in found["step"] if line.split("|")[2].strip() == what]
        assert float(value.split()[0]) > 0
