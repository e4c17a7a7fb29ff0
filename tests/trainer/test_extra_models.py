"""Additional models (a reference, a teacher, a judge), as they are checked before anything starts."""

import json
import shutil

import pytest
from transformers import AutoModelForCausalLM

from rltrain.config.load import load_config
from rltrain.config.memory_keys import memory_keys
from rltrain.config.notes import without_effect
from rltrain.config.step_passes import make_step_passes, offloads
from rltrain.data.rows import read_rows
from rltrain.main_ppo import main
from rltrain.run.preflight.judge import check_judge_messages
from rltrain.run.preflight.memory import forecast
from rltrain.run.preflight.models import PreflightResult, check_models
from rltrain.run.report.plan import describe
from rltrain.trainer.plan import make_plan
from tests.tiny import CHARACTERS, SPECIALS, save_scripted_judge, save_tiny_model, small_run
from tests.trainer.steps import ACTOR, DISTILLATION, NO_KL, TEACHER

REFERENCE, MODE = "actor_rollout_ref__ref__model__path", DISTILLATION + "loss_mode"
ALONE = {"distillation__enabled": True, DISTILLATION + "use_task_rewards": False, MODE: "reverse_kl", **NO_KL}
# Role -> the key of its model, and the settings that give a run the role.
ROLES = {"reference": (REFERENCE, {}), "teacher": (TEACHER, ALONE)}
OFFLOAD = "reward_model.model.fsdp_config.param_offload"


@pytest.fixture(scope="module")
def another(tmp_path_factory):
    """A model with the same tokens, other weights and twice the width."""
    return save_tiny_model(tmp_path_factory.mktemp("another") / "model", seed=7, width=64)


@pytest.fixture
def settings(tiny_model, arithmetic_files, tmp_path):
    return lambda **changes: load_config(small_run(tiny_model, arithmetic_files, tmp_path / "run", **changes))


@pytest.fixture
def dry(tiny_model, arithmetic_files, tmp_path, capsys):
    def run(**changes):
        code = main([*small_run(tiny_model, arithmetic_files, tmp_path / "run", **changes), "--dry-run"])
        return code, capsys.readouterr().out

    return run


@pytest.mark.parametrize("role", ROLES)
def test_a_dry_run_looks_at_the_model(dry, another, role):
    path, changes = ROLES[role]
    code, text = dry(**changes, **{path: another})
    assert code == 0
    assert f"{role} {another}" in " ".join(text.split())
    code, text = dry(**changes, **{path: "/no/model"})
    assert code == 2
    assert f"{path.replace('__', '.')}=/no/model" in text


@pytest.mark.parametrize(
    ("role", "lacks", "said"),
    [
        *((role, "tokenizer", "but the policy's is '3' (2 differ), so a KL to it is meaningless") for role in ROLES),
        ("reference", "tokens", f"has 10 tokens, but the policy can generate {len(CHARACTERS) + len(SPECIALS)}"),
        ("teacher", "tokens", "Use a model with the policy's tokenizer."),  # without the key there is no teacher
        ("reference", "weights", ""),
    ],
)
def test_a_model_that_does_not_fit_is_refused(dry, another, tmp_path, role, lacks, said):
    folder = shutil.copytree(another, tmp_path / "copy")
    if lacks == "weights":
        (folder / "model.safetensors").unlink()
    else:
        file = folder / ("tokenizer.json" if lacks == "tokenizer" else "config.json")
        content = json.loads(file.read_text())
        if lacks == "tokenizer":
            words = content["model"]["vocab"]
            words["3"], words["4"] = words["4"], words["3"]
        else:
            content["vocab_size"] = 10
        file.write_text(json.dumps(content))
    path, changes = ROLES[role]
    code, text = dry(**changes, **{path: folder})
    assert code == 2
    assert f"{path.replace('__', '.')}={folder}" in text
    assert said in text


def test_a_distance_over_all_tokens_needs_as_many_of_them(dry, another, tmp_path):
    padded = save_tiny_model(tmp_path / "padded", seed=3)
    model = AutoModelForCausalLM.from_pretrained(padded)
    model.resize_token_embeddings(64)
    model.save_pretrained(padded)
    policy = {TEACHER: another, "actor_rollout_ref__model__path": padded}
    estimates = {REFERENCE: padded}, ALONE | policy | {MODE: "k3"}
    exact = {REFERENCE: padded, ACTOR + "kl_loss_type": "full"}, ALONE | policy
    said = "and a full KL compares all", "Use distillation.distillation_loss.loss_mode=k3"
    for estimate, whole, words in zip(estimates, exact, said, strict=True):
        assert dry(**estimate)[0] == 0
        code, text = dry(**whole)
        assert code == 2
        assert words in text
    smaller = {"actor_rollout_ref__model__path": padded, REFERENCE: another}
    for kl, size in (("low_var_kl", "at least as many"), ("full", "the same number")):
        code, text = dry(**smaller, **{ACTOR + "kl_loss_type": kl})
        assert f"and the policy 64. Use a reference with {size}." in text.replace(
            ", and a full KL compares all of them", ""
        )
        assert code == 2


def test_a_reference_that_moves_has_the_sizes_of_the_policy(dry, another, tmp_path):
    moves = {"actor_rollout_ref__ref__update_every_steps": 2}
    code, text = dry(**moves, **{REFERENCE: save_tiny_model(tmp_path / "like", seed=7)})
    assert code == 0
    assert "every 2 steps it becomes the policy" in text
    code, text = dry(**moves, **{REFERENCE: another})
    assert code == 2
    assert "has weights of other sizes than the policy" in text


def test_with_adapters_or_without_a_kl_another_reference_has_no_effect(settings, another):
    def notes(**changes):
        key = REFERENCE.replace("__", ".")
        return [note for note in without_effect(settings(**{REFERENCE: another}, **changes)) if note.startswith(key)]

    (note,) = notes(actor_rollout_ref__model__lora_rank=2)
    assert "no effect: with LoRA the reference is the actor without its adapters, as in verl" in note
    assert notes(actor_rollout_ref__actor__use_kl_loss=False)
    assert not notes()


def test_the_update_holds_the_teacher_where_it_runs_it(settings, another):
    def bytes_of(mode):
        keys = {**ALONE, TEACHER: another, MODE: mode, "distillation__teacher__fsdp_config__param_offload": True}
        cfg = settings(**keys).config
        found = forecast(cfg, make_plan(cfg, 100), None, ("teacher", "update_actor"))
        assert ("teacher" in found) == (mode == "k3")
        return found["update_actor"]

    exact, estimate = bytes_of("jsd"), bytes_of("k3")
    assert exact["weights"] > estimate["weights"]
    assert exact["gathered"] > estimate["gathered"]


@pytest.fixture
def judged(settings, tmp_path):
    """judged(path, **rollout): return the settings of a run with a judge."""
    scripted = save_scripted_judge(tmp_path / "judge")

    def make(path=scripted, **rollout):
        keys = {f"reward_model__rollout__{name}": value for name, value in rollout.items()}
        keys |= {"reward_model__enable": True, "reward_model__model__type": "generative"}
        return settings(reward_model__model__path=path, **keys).config

    return make


def test_the_plan_says_who_judges_and_how(judged):
    cfg = judged(response_length=16)
    text = " ".join(describe(make_plan(cfg, 100), cfg).split())
    assert "judging on the devices, alone: messages of up to 1,048 tokens, replies of up to 16, greedily" in text
    assert f"judge {cfg.reward_model.model.path}" in text
    cfg.trainer.val_only = True
    assert "judge" in make_step_passes(cfg).roles


def test_memory_of_a_judge_is_estimated_with_weights_that_may_rest_on_the_host(judged):
    cfg = judged(response_length=16, prompt_length=32)
    plan = make_plan(cfg, 100)
    here = forecast(cfg, plan, None, ("gen", "judge", "update_actor"))
    assert list(here) == ["gen", "judge", "update_actor"]
    assert here["judge"]["weights"] > 0
    more = forecast(judged(response_length=4096, prompt_length=32), plan, None, ("judge",))
    assert more["judge"]["cache"] > here["judge"]["cache"]
    assert (OFFLOAD, ("judge",)) in list(offloads(cfg))
    assert ("weights", f"{OFFLOAD}=True") in list(memory_keys(cfg, "update_actor"))
    cfg.reward_model.model.fsdp_config.param_offload = True
    away = forecast(cfg, plan, None, ("judge", "update_actor"))
    assert away["judge"].total() <= here["judge"].total()
    assert away["update_actor"]["weights"] < here["update_actor"]["weights"]


def test_messages_and_positions_of_a_judge_are_checked(judged, arithmetic_files):
    rows, found = {"train": read_rows(str(arithmetic_files[0]))}, PreflightResult()
    (line,) = check_judge_messages(judged().scoring, 1048, rows, found)
    assert "accepts messages of up to 1,048 tokens; with the ground truth as the response they have" in line
    check_models(judged(prompt_length=100, response_length=157), found)
    assert not found.problems
    assert any("= 257 tokens, but the judge has 256 positions" in note for note in found.notes)
    check_judge_messages(judged(prompt_length=9).scoring, 9, rows, found)
    check_models(judged("/no/judge"), found)
    message, model = found.problems
    assert message.startswith("reward_model.rollout.prompt_length=9: the message for a row of 'rltrain/arithmetic'")
    assert model.startswith("reward_model.model.path=/no/judge")
