"""What is known of a teacher before anything starts: its files, its tokens, its memory."""

import json
import shutil

import pytest
from transformers import AutoModelForCausalLM

from rltrain.config.load import load_config
from rltrain.main_ppo import main
from rltrain.run.preflight.memory import forecast
from rltrain.trainer.plan import make_plan
from tests.tiny import save_tiny_model, small_run
from tests.trainer.steps import DISTILLATION, NO_KL, TEACHER

ALONE = {"distillation__enabled": True, DISTILLATION + "use_task_rewards": False, **NO_KL}
MODE = DISTILLATION + "loss_mode"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A model of the same tokens, with other weights and twice the width."""
    return save_tiny_model(tmp_path_factory.mktemp("teacher") / "model", seed=7, width=64)


@pytest.fixture
def dry(tiny_model, arithmetic_files, tmp_path, capsys, teacher):
    def run(**changes):
        keys = {**ALONE, TEACHER: teacher, MODE: "reverse_kl", **changes}
        code = main([*small_run(tiny_model, arithmetic_files, tmp_path / "run", **keys), "--dry-run"])
        return code, capsys.readouterr().out

    return run


def test_a_dry_run_looks_at_the_teacher_and_foretells_its_memory(dry, teacher):
    code, text = dry()
    assert code == 0
    assert f"teacher {teacher}" in " ".join(text.split())
    assert "reverse_kl to the teacher alone, token-mean" in text
    code, text = dry(**{TEACHER: "/no/teacher"})
    assert code == 2
    assert "distillation.teacher.model.path=/no/teacher" in text


def test_the_update_holds_the_teacher_where_it_runs_it(tiny_model, arithmetic_files, tmp_path, teacher):
    def bytes_of(mode):
        keys = {**ALONE, TEACHER: teacher, MODE: mode, "distillation__teacher__fsdp_config__param_offload": True}
        cfg = load_config(small_run(tiny_model, arithmetic_files, tmp_path / "run", **keys)).config
        found = forecast(cfg, make_plan(cfg, 100), None, ("teacher", "update_actor"))
        assert ("teacher" in found) == (mode == "k3")
        return found["update_actor"]

    exact, estimate = bytes_of("jsd"), bytes_of("k3")
    assert exact["weights"] > estimate["weights"]
    assert exact["gathered"] > estimate["gathered"]


@pytest.mark.parametrize("lacks", ["tokenizer", "rows"])
def test_a_teacher_that_does_not_fit_is_refused(dry, tiny_model, tmp_path, lacks, teacher):
    folder = shutil.copytree(teacher, tmp_path / "copy")
    if lacks == "tokenizer":
        file = folder / "tokenizer.json"
        words = (tokens := json.loads(file.read_text()))["model"]["vocab"]
        words["3"], words["4"] = words["4"], words["3"]
        file.write_text(json.dumps(tokens))
        code, text = dry(**{TEACHER: folder})
        assert "that of the policy '3'; 2 are others, so a KL to it means nothing" in text
    else:
        policy = shutil.copytree(tiny_model, tmp_path / "padded")
        model = AutoModelForCausalLM.from_pretrained(policy)
        model.resize_token_embeddings(64)
        model.save_pretrained(policy)
        padded = {"actor_rollout_ref__model__path": policy}
        assert dry(**padded, **{MODE: "k3"})[0] == 0
        code, text = dry(**padded)
        assert "compares all of the policy's. Use distillation.distillation_loss.loss_mode=k3" in text
    assert code == 2
