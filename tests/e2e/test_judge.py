"""A judge on the run's devices, by the command: Ray, two processes, training, stop and resume, evaluation."""

import json
import shutil

import pytest

import rltrain
from rltrain.main_ppo import main
from rltrain.run.report.table import read_metrics
from rltrain.tools.evaluate.__main__ import main as evaluate
from tests.e2e.test_train import largest_difference, weights
from tests.tiny import save_scripted_judge, small_run

pytestmark = [pytest.mark.usefixtures("joined"), pytest.mark.long]


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge")
    (folder / "prompt.txt").write_text("{{ question }} {{ ground_truth }} {{ answer }}")
    return {
        "reward_model__enable": True, "reward_model__model__type": "generative",
        "reward_model__model__path": save_scripted_judge(folder / "model"), "reward_model__rollout__prompt_length": 40,
        "reward_model__rollout__response_length": 8, "reward__judge__prompt": folder / "prompt.txt",
    }  # fmt: skip


def judged(answer):
    """Return the scripted judge's verdict on a response, which is at the end of its message."""
    return float(answer[-1:] in [*"56789"])


def test_a_run_with_a_judge_learns_from_its_verdicts_resumes_and_is_evaluated(
    keys, tiny_model, arithmetic_files, tmp_path, capfd
):
    more = {"trainer__n_gpus_per_node": 2, "trainer__save_freq": 1, "trainer__test_freq": 2}
    run = tmp_path / "run"
    words = small_run(tiny_model, arithmetic_files, run, **keys, **more)
    assert main(words) == 0
    lines = read_metrics(run)
    for line in lines:
        samples = rltrain.read_samples(run, line["step"])
        assert samples["score"].tolist() == [judged(answer) for answer in samples["answer"]]
        assert 0 < samples["score"].mean() < 1
        assert line["judge/calls"] == len(samples)
        assert line["judge/tokens"] > 0
        assert 0 < line["timing_s/judge"] <= line["timing_s/reward"]
        assert line["reward/error_rate"] == 0
    assert 0 <= lines[-1]["val-core/rltrain/arithmetic/reward/mean@1"] <= 1

    folder = tmp_path / "stopped"
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "global_step_2")
    assert main(small_run(tiny_model, arithmetic_files, folder, **keys, **more)) == 0
    assert largest_difference(weights(run, 2), weights(folder, 2)) == 0

    settings = [f"{name.replace('__', '.')}={value}" for name, value in keys.items()]
    settings += ["data.max_prompt_length=16", "data.max_response_length=8", "trainer.device=cpu"]
    model, data = f"model={run / 'global_step_2'}", f"data={arithmetic_files[1]}"
    assert evaluate([model, data, *settings, "trainer.n_gpus_per_node=1"]) == 0
    (found,) = (run / "evaluation").rglob("evaluation.json")
    value = json.loads(found.read_text())["average"]["avg@1"]["value"]
    assert value == pytest.approx(lines[-1]["val-core/rltrain/arithmetic/reward/mean@1"])
