"""What is known of a judge on the run's devices before anything is started: passes, plan, memory, messages."""

import pytest

from rltrain.config.load import load_config
from rltrain.config.memory_keys import memory_keys
from rltrain.config.step_passes import make_step_passes, offloads
from rltrain.data.rows import read_rows
from rltrain.run.preflight.judge import look_at_messages
from rltrain.run.preflight.memory import forecast
from rltrain.run.preflight.models import Findings, look_at_models
from rltrain.run.report.plan import describe
from rltrain.trainer.plan import make_plan
from tests.tiny import save_scripted_judge, small_run

OFFLOAD = "reward_model.model.fsdp_config.param_offload"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    return save_scripted_judge(tmp_path_factory.mktemp("judge"))


@pytest.fixture
def settings(tiny_model, arithmetic_files, tmp_path, scripted):
    def make(path=scripted, **rollout):
        keys = {f"reward_model__rollout__{name}": value for name, value in rollout.items()}
        keys |= {"reward_model__enable": True, "reward_model__model__type": "generative"}
        run = small_run(tiny_model, arithmetic_files, tmp_path, reward_model__model__path=path, **keys)
        return load_config(run).config

    return make


def test_the_plan_says_who_judges_and_how(settings, scripted):
    cfg = settings(response_length=16)
    text = " ".join(describe(make_plan(cfg, 100), cfg).split())
    assert "judging on the devices, alone: messages of up to 1,048 tokens, replies of up to 16, greedily" in text
    assert f"judge {scripted}" in text
    assert "scoring" in text, "templates and replies are read in the scoring processes"
    cfg.trainer.val_only = True
    assert "judge" in make_step_passes(cfg).roles


def test_its_phase_is_foretold_with_weights_that_may_rest_on_the_host(settings):
    cfg = settings(response_length=16, prompt_length=32)
    plan = make_plan(cfg, 100)
    here = forecast(cfg, plan, None, ("gen", "judge", "update_actor"))
    assert list(here) == ["gen", "judge", "update_actor"]
    assert here["judge"]["weights"] > 0
    more = forecast(settings(response_length=4096, prompt_length=32), plan, None, ("judge",))
    assert more["judge"]["cache"] > here["judge"]["cache"]
    assert (OFFLOAD, ("judge",)) in list(offloads(cfg))
    assert ("weights", f"{OFFLOAD}=True") in list(memory_keys(cfg, "update_actor"))
    assert ("cache", "reward_model.rollout.response_length less than 16") in list(memory_keys(cfg, "judge"))
    cfg.reward_model.model.fsdp_config.param_offload = True
    away = forecast(cfg, plan, None, ("judge", "update_actor"))
    assert away["judge"].total() <= here["judge"].total()
    assert away["update_actor"]["weights"] < here["update_actor"]["weights"]


def test_messages_that_cannot_fit_are_known_before_the_run(settings, arithmetic_files):
    rows, found = {"train": read_rows(str(arithmetic_files[0]))}, Findings()
    (line,) = look_at_messages(settings(), rows, found)
    assert "reads messages of up to 1,048 tokens; with the ground truth as the answer they have" in line
    assert not found.problems
    look_at_messages(settings(prompt_length=9), rows, found)
    (problem,) = found.problems
    assert problem.startswith("reward_model.rollout.prompt_length=9: the message about a row of 'rltrain/arithmetic'")


def test_its_files_and_positions_are_looked_at(settings):
    found = Findings()
    look_at_models(settings(prompt_length=100, response_length=157), found)
    assert not found.problems
    assert any("= 257 tokens, and the judge knows 256 positions" in note for note in found.notes)
    look_at_models(settings("/no/judge"), found)
    assert [problem.startswith("reward_model.model.path=/no/judge") for problem in found.problems] == [True]
