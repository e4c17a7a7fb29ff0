"""The real command on a tiny model: real Ray, real FSDP2 workers, real reward processes."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import rltrain
from rltrain.main_ppo import main
from rltrain.run.report.samples import read_samples
from rltrain.run.report.table import read_metrics
from tests.distance import distance
from tests.tiny import save_tiny_model, small_run

pytestmark = pytest.mark.usefixtures("joined")

R = "actor_rollout_ref__rollout__"
TIMERS = {
    "gen",
    "reshard",
    "generate_sequences",
    "reward",
    "old_log_prob",
    "ref",
    "adv",
    "update_actor",
    "step",
    "other",
}
CALLBACK = """
class Watch:
    def on_step(self, step, metrics, samples):
        return {"watch/answers": len(samples["reward"])}

    def on_validation(self, step, metrics):
        return {"watch/validated": any(name.startswith("val-core/") for name in metrics)}

    def on_save(self, step, folder):
        return {"watch/whole": (folder / "manifest.json").is_file() and folder.name == f"global_step_{step}"}
"""


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"global_step_{step}" / "huggingface" / "model.safetensors")


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def moved(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    assert one.keys() == other.keys()
    return {name: other[name] - one[name] for name in one}


@pytest.fixture(scope="module")
def reference_run(tiny_model, arithmetic_files, tmp_path_factory):
    """A run from Python: one process, token budget 64, validation and a save after step 1, a callback with
    all methods."""
    folder = tmp_path_factory.mktemp("reference")
    (folder / "callback.py").write_text(CALLBACK)
    changes = {
        "trainer__callbacks": folder / "callback.py:Watch",
        "trainer__val_before_train": True,
        "trainer__test_freq": 1,
        "trainer__save_freq": 1,
        "trainer__logger": "tensorboard",
        "trainer__report": True,
    }
    loaded = rltrain.load_config(small_run(tiny_model, arithmetic_files, folder, **changes))
    assert rltrain.train(loaded) == rltrain.RunResult(folder, 0)
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer__n_gpus_per_node": 2},
        pytest.param(
            {
                "trainer__n_gpus_per_node": 2,
                "actor_rollout_ref__actor__ulysses_sequence_parallel_size": 2,
                "actor_rollout_ref__ref__ulysses_sequence_parallel_size": 1,
            },
            marks=pytest.mark.long,
        ),
        # Replicas that serve one queue: tests/workers/test_replicas.py has them in every run.
        pytest.param({"trainer__n_gpus_per_node": 2, R + "name": "vllm"}, marks=pytest.mark.long),
        pytest.param(
            {"trainer__n_gpus_per_node": 2, R + "name": "vllm", R + "tensor_model_parallel_size": 2},
            marks=pytest.mark.long,
        ),
    ],
    ids=[
        "two_processes",
        "shared_sequences",
        "two_replicas_of_vllm",
        "one_replica_of_vllm_over_two",
    ],
)
def test_loss_gradient_and_weights_do_not_depend_on_the_cut(
    reference_run, tiny_model, arithmetic_files, tmp_path, changes
):
    assert main(small_run(tiny_model, arithmetic_files, tmp_path, **changes)) == 0
    start = load_file(tiny_model / "model.safetensors")
    assert distance(*(moved(start, weights(folder, 2)) for folder in (tmp_path, reference_run))) < 1e-4
    same_losses(reference_run, tmp_path)


def same_losses(one: Path, other: Path) -> None:
    lines = ([line for line in read_metrics(folder) if line["step"]] for folder in (one, other))
    names = ("loss", "pg_loss", "kl_loss", "entropy_loss", "grad_norm", "ppo_kl", "entropy")
    for before, after in zip(*lines, strict=True):
        for name in names:
            assert before[f"actor/{name}"] == pytest.approx(after[f"actor/{name}"], abs=1e-5), name


A, ONE, FOUR = "actor_rollout_ref__actor__", {"trainer__n_gpus_per_node": 1}, {"trainer__n_gpus_per_node": 4}
ULYSSES, RINGS, TENSOR = (
    {A + "ulysses_sequence_parallel_size": 2}, {A + "ring_attention_size": 2}, A + "fsdp_config__tensor_parallel_size",
)  # fmt: skip
# The last step of a run, and its layout.
STAGES = {
    "sequences in rings": [(5, FOUR | ULYSSES | RINGS | {"actor_rollout_ref__ref__ulysses_sequence_parallel_size": 1})],
    "matrices of two, FSDP of two": [(5, FOUR | {TENSOR: 2})],
    "matrices of two, sequences of two": [(5, FOUR | ULYSSES | {TENSOR: 2})],
    "matrices of four": [(5, FOUR | {TENSOR: 4, "actor_rollout_ref__ref__fsdp_config__tensor_parallel_size": 1})],
    "matrices of two, resumed on one": [(3, FOUR | {TENSOR: 2}), (5, ONE)],
}


@pytest.fixture(scope="module")
def five_steps(arithmetic_files, tmp_path_factory):
    """Return a model with four heads, and a five-step run of one process."""
    folder = tmp_path_factory.mktemp("five_steps")
    model = save_tiny_model(folder / "model", heads=4, kv_heads=2)
    changes = ONE | {"trainer__total_training_steps": 5}
    assert main(small_run(model, arithmetic_files, folder / "run", **changes)) == 0
    return model, folder / "run"


@pytest.mark.long
@pytest.mark.parametrize("name", STAGES)
def test_weights_of_four_ranks_after_five_steps_are_those_of_one(five_steps, arithmetic_files, tmp_path, name):
    model, one = five_steps
    for last, layout in STAGES[name]:
        changes = layout | {"trainer__total_training_steps": last}
        assert main(small_run(model, arithmetic_files, tmp_path, **changes)) == 0
    found, expected, start = weights(tmp_path, 5), weights(one, 5), load_file(model / "model.safetensors")
    assert distance(found, expected) < 1e-5
    assert distance(moved(start, found), moved(start, expected)) < 1e-4
    same_losses(one, tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "global_step_5" / "huggingface").state_dict()
    assert all(torch.equal(exported[weight], values) for weight, values in found.items())


@pytest.mark.smoke("Every phase of a step has its timer, and the phases add up")
def test_every_timer_is_there_and_the_phases_add_up(reference_run):
    lines = [line for line in read_metrics(reference_run) if line["step"]]
    assert len(lines) == 2
    for line in lines:
        assert {f"timing_s/{name}" for name in TIMERS} <= line.keys()
        assert {f"timing_s/fetch/{name}" for name in ("old_log_prob", "ref", "update_actor")} <= line.keys()
        phases = sum(
            line[f"timing_s/{name}"] for name in ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor")
        )
        assert phases + line["timing_s/other"] == pytest.approx(line["timing_s/step"])
        assert line["timing_s/other"] >= 0
        assert line["timing_s/reshard"] + line["timing_s/generate_sequences"] <= line["timing_s/gen"]
    # Both steps include work outside of phases; on a busy machine the driver may wait in either of them.
    assert any(line["timing_s/other"] < 0.03 * line["timing_s/step"] + 0.02 for line in lines)
    assert {"timing_s/testing", "timing_s/save_checkpoint"} <= lines[-1].keys()


@pytest.mark.smoke("Engine and trainer agree after every weight sync; validation runs when it was asked for")
def test_every_step_is_measured_validated_and_agrees_with_the_engine(reference_run):
    lines = read_metrics(reference_run)
    key = "val-core/rltrain/arithmetic/reward/mean@1"
    assert [line["step"] for line in lines if key in line] == [0, 1, 2]
    for line in lines[1:]:
        assert line["rollout/log_prob_gap/mean"] < 1e-5
        assert line["reward/compute_s"] > 0
        # Bytes that grow with the samples, and, per rank and step, the moments of about thirty quantities.
        assert line["perf/driver_bytes_per_sample"] < 160 + 2000 / 16


def test_the_answers_of_every_step_and_validation_are_kept(reference_run):
    files = {file.stem for file in (reference_run / "samples").iterdir()}
    assert files == {"train_000001", "train_000002", "val_000000", "val_000001", "val_000002"}
    for line in read_metrics(reference_run)[1:]:
        kept = read_samples(reference_run, line["step"])
        assert len(kept) == 16
        assert kept["prompt"].str.contains("<user>").all()
        for name, metric in (("score", "critic/score"), ("response_length", "response_length")):
            assert kept[name].mean() == pytest.approx(line[f"{metric}/mean"])
        assert kept["advantage"].abs().max() > 0 or line["critic/advantages/max"] == 0
    assert read_samples(reference_run, split="val")["row"].tolist() == list(range(6))


@pytest.mark.smoke("A run folder says what the run was")
def test_the_run_folder_says_what_the_run_was(reference_run):
    assert {"config.yaml", "plan.json", "env.json", "metrics.jsonl", "run.lock"} <= {
        file.name for file in reference_run.iterdir()
    }
    assert list((reference_run / "tensorboard").glob("events.*"))
    manifest = json.loads((reference_run / "global_step_2" / "manifest.json").read_text())
    assert {"progress.json", "actor/.metadata", "huggingface/model.safetensors"} <= manifest["files"].keys()
    env = json.loads((reference_run / "env.json").read_text())
    assert {"torch", "ray", "git", "host", "command", "cuda", "driver", "devices"} <= env.keys()
    assert env["hosts"] == [env["host"]]


@pytest.mark.smoke("A run ends with its report")
def test_a_run_ends_with_its_page(reference_run):
    assert "<h2>Learning</h2>" in (reference_run / "report.html").read_text()


def test_a_callback_is_told_of_steps_validations_and_saves(reference_run):
    lines = read_metrics(reference_run)
    found = [[line.get(name) for name in ("watch/answers", "watch/validated", "callbacks/errors")] for line in lines]
    assert found == [[None, 1.0, 0.0], [16.0, 1.0, 0.0], [16.0, 1.0, 0.0]]
    # A checkpoint is complete some time after its step has ended; the last one, before the last line is written.
    assert [lines[0].get("watch/whole"), lines[-1].get("watch/whole")] == [None, 1.0]


@pytest.mark.smoke("The exported model is one that transformers loads")
def test_the_export_is_a_model_that_transformers_loads(reference_run, tiny_model):
    folder = reference_run / "global_step_2" / "huggingface"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    start = AutoModelForCausalLM.from_pretrained(tiny_model)
    ids = torch.tensor([[2, 5, 6, 7]])
    assert not torch.allclose(model(ids).logits, start(ids).logits)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (folder / name).read_bytes() == (tiny_model / name).read_bytes()
    messages = [{"role": "user", "content": "1+2=?"}]
    rendered = [
        AutoTokenizer.from_pretrained(path).apply_chat_template(messages, return_dict=False)
        for path in (folder, tiny_model)
    ]
    assert rendered[0] == rendered[1]


@pytest.fixture(scope="module")
def straight_run(tiny_model, arithmetic_files, tmp_path_factory):
    """24 prompts, 4 per step, so an epoch has 6 steps."""
    folder = tmp_path_factory.mktemp("straight")
    changes = {"trainer__total_training_steps": 8, "trainer__save_freq": 1}
    assert main(small_run(tiny_model, arithmetic_files, folder, **changes)) == 0
    return folder


def stopped_after(step: int, straight: Path, folder: Path) -> None:
    """Create ``folder`` as a run leaves it that was stopped after ``step``."""
    shutil.copytree(straight / f"global_step_{step}", folder / f"global_step_{step}")
    lines = (straight / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:step]))


@pytest.mark.smoke("A resumed run is bit-identical to one that was never stopped")
# After every step, without Ray: tests/trainer/test_resume.py.
def test_resume_continues_bit_for_bit(tiny_model, arithmetic_files, tmp_path, straight_run):
    """The run is stopped at the end of an epoch."""
    stopped_after(6, straight_run, tmp_path)
    assert main(small_run(tiny_model, arithmetic_files, tmp_path, trainer__total_training_steps=8)) == 0
    assert largest_difference(weights(straight_run, 8), weights(tmp_path, 8)) == 0
    pairs = list(zip(read_metrics(straight_run), read_metrics(tmp_path), strict=True))
    assert len(pairs) == 8
    assert all(
        one["actor/loss"] == other["actor/loss"] and one["training/epoch"] == other["training/epoch"]
        for one, other in pairs
    )


@pytest.mark.smoke("Two ranks continue a checkpoint of one")
def test_a_checkpoint_of_one_process_resumes_on_two(straight_run, tiny_model, arithmetic_files, tmp_path):
    stopped_after(6, straight_run, tmp_path)
    changes = {"trainer__total_training_steps": 8, "trainer__n_gpus_per_node": 2}
    assert main(small_run(tiny_model, arithmetic_files, tmp_path, **changes)) == 0
    before, *after = weights(straight_run, 6), weights(straight_run, 8), weights(tmp_path, 8)
    assert distance(moved(before, after[1]), moved(before, after[0])) < 1e-4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data__seed": 2, "trainer__total_training_steps": 3}, "data.seed: 1 then, 2 now"),
        ({"algorithm__adv_estimator": "gae"}, "has no critic"),
        ({"trainer__resume_mode": "disable"}, "already holds a checkpoint of step 2"),
        ({"trainer__resume_weights_only": True}, "already holds a checkpoint of step 2"),
    ],
    ids=["another_run", "critic", "fresh", "weights_only"],
)
def test_a_run_that_does_not_fit_its_folder_is_refused_before_it_starts(
    reference_run, tiny_model, arithmetic_files, capsys, changes, words
):
    assert main(small_run(tiny_model, arithmetic_files, reference_run, **changes)) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert "loading" not in captured.out  # of models


def test_weights_alone_start_a_new_run(reference_run, tiny_model, arithmetic_files, tmp_path):
    args = small_run(
        tiny_model, arithmetic_files, tmp_path, trainer__resume_mode="resume_path", trainer__resume_weights_only=True,
        trainer__resume_from_path=reference_run / "global_step_1", trainer__total_training_steps=1, data__seed=9,
    )  # fmt: skip
    assert main(args) == 0
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
    assert largest_difference(weights(reference_run, 1), weights(tmp_path, 1)) > 0


def test_a_run_with_all_its_steps_says_so_and_starts_nothing(
    reference_run, tiny_model, arithmetic_files, caplog, capsys
):
    caplog.set_level(logging.INFO)
    before = (reference_run / "metrics.jsonl").read_text()
    assert main(small_run(tiny_model, arithmetic_files, reference_run)) == 0
    assert "nothing left to do: the run has its 2 steps" in caplog.text
    assert "update_actor" in capsys.readouterr().out, "the report"
    assert (reference_run / "metrics.jsonl").read_text() == before


def test_a_last_validation_that_was_cut_short_is_made_up(reference_run, tiny_model, arithmetic_files, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(reference_run, folder)
    *first, last = read_metrics(folder)
    cut = {name: value for name, value in last.items() if not name.startswith("val-")}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (*first, cut)))
    args = small_run(tiny_model, arithmetic_files, folder, trainer__test_freq=1)
    assert main(args) == 0
    made_up = read_metrics(folder)[-1]
    assert made_up["step"] == 2
    whole = {name: value for name, value in last.items() if name.startswith("val-core/")}
    assert whole
    assert {name: made_up[name] for name in whole} == whole
    assert main(args) == 0
    assert read_metrics(folder)[-1] == made_up, "once is enough"


def test_a_reward_outage_saves_what_was_learned_before(tiny_model, arithmetic_files, tmp_path):
    scorer = tmp_path / "reward.py"
    scorer.write_text(
        "import pathlib\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info, folder):\n"
        "    if '\"step\": 2,' in (pathlib.Path(folder) / 'metrics.jsonl').read_text():\n"
        "        raise OSError('the scoring server is gone')\n"
        "    return float(len(solution_str) % 2)\n"
    )
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    args = small_run(
        tiny_model, arithmetic_files, folder, custom_reward_function__path=scorer,
        custom_reward_function__reward_kwargs__folder=folder,
        trainer__total_training_steps=5,
    )  # fmt: skip
    assert main(args) == 2
    assert [entry.name for entry in folder.glob("global_step_*")] == ["global_step_2"]


@pytest.mark.smoke("The model learns what is rewarded (GRPO through the command)")
def test_grpo_learns_what_is_rewarded(tiny_model, arithmetic_files, tmp_path):
    """A random model learns to begin its responses with an even digit."""
    scorer = tmp_path / "reward.py"
    scorer.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(solution_str[:1] in {'0', '2', '4', '6', '8'})\n"
    )
    args = small_run(
        tiny_model, arithmetic_files, tmp_path / "run", custom_reward_function__path=scorer,
        trainer__total_training_steps=12, data__train_batch_size=8, actor_rollout_ref__actor__ppo_mini_batch_size=8,
        actor_rollout_ref__rollout__n=8, actor_rollout_ref__actor__entropy_coeff=0,
        actor_rollout_ref__actor__optim__lr=5e-3, actor_rollout_ref__actor__kl_loss_coef=0,
        actor_rollout_ref__actor__optim__eps=1e-8,
    )  # fmt: skip
    assert main(args) == 0
    scores = [line["critic/score/mean"] for line in read_metrics(tmp_path / "run")]
    assert scores[0] < 0.5
    assert sum(scores[-3:]) / 3 > scores[0] + 0.4
