"""The mean of models: weights, tied or not, files and errors."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rltrain.run.checkpoints.folder import RunFolder
from rltrain.tools.average import main, search
from tests.tiny import save_tiny_adapter, save_tiny_model

_WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    made = [save_tiny_model(folder / f"model_{seed}", seed) for seed in range(3)]
    for model in made:
        (model / "additional_chat_templates").mkdir()
        (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}{{ messages }}")
    return made


@pytest.fixture
def other(models, tmp_path) -> Path:
    """A copy of the second model that tests may change."""
    return Path(shutil.copytree(models[1], tmp_path / "other"))


def changed(folder: Path, file: str, **values) -> None:
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | values))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: weight for file in sorted(folder.glob("*.safetensors")) for name, weight in load_file(file).items()}


def refused(capsys, *words) -> str:
    """Return the error message, and check that nothing was written."""
    out = Path(words[0])
    assert main([str(word) for word in words]) == 2
    assert not out.exists()
    assert not list(out.parent.glob(".tmp_*"))
    # transformers shows a bar while it loads.
    *_, said = capsys.readouterr().err.splitlines()
    assert said.startswith("error: ")
    return said


@pytest.mark.parametrize(("words", "shares"), [((), (1 / 3, 1 / 3, 1 / 3)), (("--weights", "5,3,2"), (0.5, 0.3, 0.2))])
def test_the_average_is_the_weighted_mean(models, tmp_path, words, shares):
    out = tmp_path / "out"
    assert main([str(out), *map(str, models), *words]) == 0
    inputs, result = [weights_of(model) for model in models], weights_of(out)
    assert result.keys() == inputs[0].keys()
    for name, weight in result.items():
        mean = sum(share * weights[name].double() for share, weights in zip(shares, inputs, strict=True))
        torch.testing.assert_close(weight.double(), mean, rtol=1e-6, atol=1e-8)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for file in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (out / file).read_bytes() == (models[0] / file).read_bytes()
    manifest = json.loads((out / "average.json").read_text())
    assert [model["share"] for model in manifest["models"]] == pytest.approx(shares)
    assert all(model["files"] for model in manifest["models"])
    assert manifest["files"].keys() == {_WEIGHTS}


def test_a_tied_weight_may_stand_under_either_name(models, other, tmp_path):
    weights = load_file(other / _WEIGHTS)
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, other / _WEIGHTS, {"format": "pt"})
    for number, second in enumerate((other, models[1])):
        assert main([str(tmp_path / str(number)), str(models[0]), str(second)]) == 0
    one, two = weights_of(tmp_path / "0"), weights_of(tmp_path / "1")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_other_models_are_refused_by_what_differs(models, other, tmp_path, capsys):
    out = tmp_path / "out"
    deeper = save_tiny_model(tmp_path / "wider", width=64)
    assert "hidden_size is 32 and 64" in refused(capsys, out, models[0], deeper)
    changed(other, "config.json", rms_norm_eps=1e-3)
    assert "rms_norm_eps is 1e-06 and 0.001" in refused(capsys, out, models[0], other)
    changed(other, "config.json", rms_norm_eps=1e-6, use_cache=False, transformers_version="4.40.0")
    (other / "chat_template.jinja").write_text("another")
    assert main([str(out), str(models[0]), str(other), "--dtype", "bfloat16"]) == 0
    assert "note: chat_template.jinja of" in capsys.readouterr().err
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert main([str(out), str(models[0]), str(other)]) == 2
    assert "already exists" in capsys.readouterr().err
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {"0": 6, "1": 5}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "different tokenizers: 0 is 5 and 6; 1 is 6 and 5" in refused(capsys, tmp_path / "again", models[0], other)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda weights: weights["model.norm.weight"].fill_(float("nan")),
            "model.norm.weight has numbers that are not",
        ),
        (lambda weights: weights.pop("model.norm.weight"), "missing in model.safetensors: model.norm.weight"),
        (
            lambda weights: weights.update({"score.weight": torch.ones(1, 32)}),
            "different weights: score.weight is None and floating point [1, 32]",
        ),
        (lambda weights: weights.update({"model.norm.weight": torch.ones(8)}), "do not have the sizes of config.json"),
        (lambda weights: weights["model.norm.weight"].fill_(1e6), "the average in float16: model.norm.weight"),
    ],
)
def test_weights_that_cannot_be_averaged_are_named(models, other, tmp_path, capsys, change, said):
    weights = load_file(other / _WEIGHTS)
    change(weights)
    save_file(weights, other / _WEIGHTS, {"format": "pt"})
    assert said in refused(capsys, tmp_path / "out", models[0], other, "--dtype", "float16")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{0}"], "nothing to average with"),
        (["{0}", "{0}/nothing"], "the folder does not exist"),
        (["{0}", "{1}", "--weights", "1"], "give 2 numbers above 0"),
        (["{0}", "{1}", "--weights", "1,x"], "give 2 numbers above 0"),
        (["{0}", "{1}", "--weights", "1,-1"], "give 2 numbers above 0"),
        (["{0}", "{1}", "trainer.device=cpu"], "is for the validations of --greedy"),
        (["{0}", "{1}", "--greedy", "x.parquet", "--weights", "1,1"], "contradict each other"),
        (["{0}", "{1}", "--greedy", "x.parquet", "data.val_files=y"], "data.val_files=y: with --greedy"),
    ],
)
def test_words_that_make_no_sense_are_refused(models, tmp_path, capsys, words, said):
    assert said in refused(capsys, tmp_path / "out", *(word.format(*models) for word in words))


@pytest.fixture
def run(models, tmp_path) -> RunFolder:
    """Two checkpoints with exported models."""
    folder = RunFolder(str(tmp_path / "run"))
    for step in (1, 2):
        temporary = folder.begin_save(step, {"progress.json": json.dumps({"global_step": step}).encode()})
        shutil.copytree(models[step], temporary / "huggingface")
        folder.commit(temporary, step)
    folder.release()
    return folder


def test_runs_and_checkpoints_are_averaged_by_their_exports(models, run, tmp_path):
    assert main([str(tmp_path / "one"), str(run.path), str(run.step_folder(1))]) == 0
    assert main([str(tmp_path / "two"), str(models[2]), str(models[1])]) == 0
    assert (tmp_path / "one" / _WEIGHTS).read_bytes() == (tmp_path / "two" / _WEIGHTS).read_bytes()


def test_a_checkpoint_that_is_damaged_or_exported_nothing_is_refused(models, run, tmp_path, capsys):
    (run.step_folder(2) / "huggingface" / "config.json").write_text("{}")
    assert "is damaged: huggingface/config.json has 2 bytes" in refused(
        capsys, tmp_path / "out", models[0], run.step_folder(2)
    )
    again = RunFolder(str(run.path))
    again.commit(again.begin_save(3, {"progress.json": b'{"global_step": 3}'}), 3)
    again.release()
    assert "holds no model folder" in refused(capsys, tmp_path / "out", models[0], run.step_folder(3))


def adapter(folder: Path, model: Path, seed: int, **config) -> Path:
    """Save an adapter whose B is not 0."""
    save_tiny_adapter(folder, model)
    torch.manual_seed(seed)
    weights = {
        name: torch.randn(weight.shape) for name, weight in load_file(folder / "adapter_model.safetensors").items()
    }
    save_file(weights, folder / "adapter_model.safetensors")
    changed(folder, "adapter_config.json", **config)
    return folder


def merged(model: Path, folder: Path) -> dict[str, torch.Tensor]:
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder)
    return loaded.merge_and_unload().state_dict()


def test_the_mean_of_adapters_adds_the_mean_of_what_they_add(models, tmp_path):
    """The means of A and B would not."""
    one = adapter(tmp_path / "one", models[0], 1)
    two = adapter(tmp_path / "two", models[0], 2, lora_alpha=3, use_rslora=True)
    assert main([str(tmp_path / "out"), str(one), str(two), "--weights", "3,1"]) == 0
    first, second, mean = (merged(models[0], folder) for folder in (one, two, tmp_path / "out"))
    for name, weight in mean.items():
        torch.testing.assert_close(weight, 0.75 * first[name] + 0.25 * second[name], rtol=1e-4, atol=1e-5)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 4)


def test_adapters_that_have_no_mean_are_refused(models, tmp_path, capsys):
    one, two = (adapter(tmp_path / name, models[0], 1) for name in ("one", "two"))
    assert "is an adapter and" in refused(capsys, tmp_path / "out", one, models[0])
    changed(two, "adapter_config.json", base_model_name_or_path="another")
    assert "have different base models: base_model_name_or_path is " in refused(capsys, tmp_path / "out", one, two)
    changed(two, "adapter_config.json", use_dora=True)
    assert "is not plain LoRA with finite numbers (it has use_dora=True)" in refused(capsys, tmp_path / "out", one, two)


def test_a_greedy_soup_keeps_what_does_not_harm():
    values = {(0,): 0.4, (1,): 0.6, (2,): 0.5, (1, 2): 0.6, (1, 2, 0): 0.55}
    chosen, found = search(3, lambda numbers: values[tuple(numbers)])
    assert (chosen, found["score"]) == ([1, 2], 0.6)
    assert [trial.get("stays") for trial in found["trials"]] == [None, None, None, True, False]
