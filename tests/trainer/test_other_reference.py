"""`ref.model.path`: another model as the reference of the KL."""

import json
import re
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from rltrain.config.load import load_config
from rltrain.config.notes import without_effect
from rltrain.main_ppo import main
from rltrain.run.preflight import health
from tests.tiny import CHARACTERS, SPECIALS, save_tiny_model, small_run

OTHER = "actor_rollout_ref__ref__model__path"
KEY = OTHER.replace("__", ".")


@pytest.fixture(scope="module")
def another(tmp_path_factory):
    """A model of the same tokens, with other weights and twice the width."""
    return save_tiny_model(tmp_path_factory.mktemp("another") / "model", seed=7, width=64)


@pytest.fixture
def dry(tiny_model, arithmetic_files, tmp_path, capsys):
    def run(**changes):
        code = main([*small_run(tiny_model, arithmetic_files, tmp_path / "run", **changes), "--dry-run"])
        return code, capsys.readouterr().out

    return run


@pytest.mark.parametrize("kind", ["k1", "full"])
def test_the_kl_is_to_the_model_that_is_named(process_group, tiny_trainer, another, tiny_model, kind):
    def trainer(**changes):
        return tiny_trainer(actor_rollout_ref__actor__kl_loss_type=kind, **changes)

    def kl(**changes):
        return trainer(**changes).step(1).metrics["actor/kl_loss"]

    loaded = trainer(**{OTHER: another}).worker.actor.reference.model.state_dict()
    saved = AutoModelForCausalLM.from_pretrained(another).state_dict()
    assert any(name in loaded for name in saved)
    assert all(torch.equal(loaded[name].full_tensor(), saved[name]) for name in saved if name in loaded)
    assert abs(kl()) < 0.05 < abs(kl(**{OTHER: another}))
    assert kl(**{OTHER: tiny_model}) == kl()


def test_every_node_looks_for_the_other_reference(tiny_model, arithmetic_files, tmp_path, another):
    def models(**changes):
        found = health._models(load_config(small_run(tiny_model, arithmetic_files, tmp_path, **changes)).config)
        return {path: key for key, path in found}

    policy = {str(tiny_model): "actor_rollout_ref.model.path"}
    assert models() == policy
    assert models(**{OTHER: another}) == policy | {str(another): KEY}


def test_with_adapters_or_without_a_kl_it_has_no_effect(tiny_model, arithmetic_files, tmp_path, another):
    def notes(**changes):
        return without_effect(
            load_config(small_run(tiny_model, arithmetic_files, tmp_path, **{OTHER: another}, **changes))
        )

    assert f"{KEY}: no effect: with LoRA the reference is the actor without its adapters, as in verl" in notes(
        actor_rollout_ref__model__lora_rank=2
    )
    assert any(note.startswith(f"{KEY}: no effect") for note in notes(actor_rollout_ref__actor__use_kl_loss=False))
    assert not any(note.startswith(KEY) for note in notes())


def test_a_dry_run_looks_at_the_other_reference(dry, another, tmp_path):
    code, text = dry(**{OTHER: another})
    assert code == 0
    assert re.search(rf"^  reference +{another}$", text, re.MULTILINE)
    assert "\n  reference " not in dry()[1]
    code, text = dry(**{OTHER: "/no/reference"})
    assert code == 2
    assert f"{KEY}=/no/reference" in text
    # Without a use for a reference nobody looks.
    assert dry(**{OTHER: "/no/reference"}, actor_rollout_ref__actor__use_kl_loss=False)[0] == 0


@pytest.mark.parametrize("lacks", ["tokenizer", "tokens", "weights"])
def test_a_reference_that_does_not_fit_is_refused(dry, another, tmp_path, lacks):
    folder = shutil.copytree(another, tmp_path / "copy")
    if lacks == "tokenizer":
        file = folder / "tokenizer.json"
        tokens = json.loads(file.read_text())
        words = tokens["model"]["vocab"]
        words["3"], words["4"] = words["4"], words["3"]
        file.write_text(json.dumps(tokens))
        expected = "that of the policy '3'; 2 are others, so a KL to it means nothing"
    elif lacks == "tokens":
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 10}))
        expected = f"knows 10 tokens, and the policy writes {len(CHARACTERS) + len(SPECIALS)}"
    else:
        (folder / "model.safetensors").unlink()
        expected = ""
    code, text = dry(**{OTHER: folder})
    assert code == 2
    assert f"{KEY}={folder}" in text
    assert expected in text


def test_a_full_kl_needs_as_many_tokens(dry, tmp_path):
    folder = save_tiny_model(tmp_path / "wider", seed=3)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(64)
    model.save_pretrained(folder)
    assert dry(**{OTHER: folder})[0] == 0
    code, text = dry(**{OTHER: folder}, actor_rollout_ref__actor__kl_loss_type="full")
    assert code == 2
    assert f"knows 64 tokens and the policy {len(CHARACTERS) + len(SPECIALS)}, and a full KL compares all" in text
