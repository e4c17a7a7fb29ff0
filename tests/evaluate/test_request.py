"""The arguments of an evaluation, and the models that they name."""

import json
import shutil
from pathlib import Path

import pytest

from rltrain.common.errors import CheckpointError, ConfigError
from rltrain.config.load import load_config, to_yaml
from rltrain.run.changes import write_run_files
from rltrain.run.checkpoints.folder import RunFolder
from rltrain.run.checkpoints.model_folder import find_model
from rltrain.run.checkpoints.resume import frozen_values
from rltrain.tools.evaluate.__main__ import main
from rltrain.tools.evaluate.models import models_of
from rltrain.tools.evaluate.request import identity, read_request
from rltrain.tools.evaluate.results import ResultFolder
from rltrain.trainer.validation import sampling_of
from tests.tiny import save_tiny_model

ANSWERS = "actor_rollout_ref.rollout.val_kwargs"


def save_checkpoint(run: Path, base: Path, step: int, **frozen: object) -> Path:
    """Save the parts of a checkpoint that an evaluation reads: progress, export, manifest."""
    folder = RunFolder(str(run))
    record = {"global_step": step, "frozen": {"actor_rollout_ref.model.path": str(base), "data.seed": 1} | frozen}
    begun = folder.begin_save(step, {"progress.json": json.dumps(record).encode()})
    shutil.copytree(base, begun / "huggingface")
    (begun / "huggingface" / "large.bin").write_bytes(bytes(2**22 + 1))  # workers read such files, the driver does not
    saved = folder.commit(begun, step)
    folder.release()
    return saved


@pytest.fixture
def run(tiny_model, tmp_path):
    for step in (2, 10):
        save_checkpoint(tmp_path / "run", tiny_model, step)
    return tmp_path / "run"


def read(*words, **options):
    return read_request([str(word) for word in words], options.get("files", []), [])


def test_a_model_is_a_folder_a_run_a_checkpoint_or_a_pattern(tiny_model, run):
    (plain,) = models_of([str(tiny_model)])
    assert (plain.step, plain.settings) == (None, {"actor_rollout_ref.model.path": str(tiny_model)})
    (newest,) = models_of([str(run)])
    assert (newest.name, newest.step) == ("global_step_10", 10)
    assert newest.settings == {
        "actor_rollout_ref.model.path": str(tiny_model),
        "trainer.resume_mode": "resume_path",
        "trainer.resume_from_path": str(run / "global_step_10"),
        "trainer.resume_weights_only": False,
    }
    assert [model.step for model in models_of([str(run / "global_step_*")])] == [2, 10]
    (export,) = models_of([str(run / "global_step_2" / "huggingface")])
    assert (export.name, export.step) == ("global_step_2_huggingface", None)


def test_a_run_is_its_newest_checkpoint_whose_files_are_as_they_were_saved(run, caplog):
    file = run / "global_step_10" / "huggingface" / "large.bin"
    file.write_bytes(b"1" + bytes(2**22))
    (model,) = models_of([str(run)])
    assert model.step == 2
    assert find_model(str(run)).path == str(run / "global_step_2" / "huggingface")
    assert caplog.text.count("passing over ") == 2
    assert f"{run / 'global_step_10'}: the contents of huggingface/large.bin have changed" in caplog.text


def test_a_checkpoint_of_adapters_says_which_they_are(tiny_model, arithmetic_files, tmp_path):
    with_adapters = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=[q_proj,v_proj]"]
    frozen = frozen_values(load_config([*with_adapters, f"actor_rollout_ref.model.path={tiny_model}"]).config)
    request = read(f"model={save_checkpoint(tmp_path / 'run', tiny_model, 3, **frozen)}", f"data={arithmetic_files[1]}")
    model = request.settings(request.models[0]).config.actor_rollout_ref.model
    assert (model.lora_rank, model.target_modules) == (4, ["q_proj", "v_proj"])


def test_a_run_says_how_it_validates_unless_the_command_does(tiny_model, arithmetic_files, run, tmp_path):
    settings = ["data.max_response_length=9", "custom_reward_function.path=reward.py", f"{ANSWERS}.temperature=0.5"]
    cfg = load_config([*settings, f"{ANSWERS}.do_sample=True", "data.train_batch_size=7"]).config
    (run / "config.yaml").write_text(to_yaml(cfg))
    data = f"data={arithmetic_files[1]}"
    request = read(f"model={run}", data, "data.max_response_length=11")
    loaded = request.settings(request.models[0])
    found = loaded.config
    assert (found.data.max_response_length, found.custom_reward_function.path) == (11, "reward.py")
    assert found.actor_rollout_ref.rollout.val_kwargs.temperature == 0.5
    assert found.data.train_batch_size != 7
    assert "data.max_response_length=9" not in request.run_settings_in_use(loaded)
    assert "custom_reward_function.path=reward.py" in request.run_settings_in_use(loaded)
    # All models of a command are compared with the same settings.
    both = read(f"model={tiny_model},{run}", data)
    assert both.settings(both.models[0]).config.data.max_response_length == 9
    save_checkpoint(tmp_path / "second", tiny_model, 3)
    (tmp_path / "second" / "config.yaml").write_text("data: {max_response_length: 8}")
    words = [f"model={run},{tmp_path / 'second'}", data, "custom_reward_function.path=reward.py"]
    others = [f"{ANSWERS}.do_sample=True", f"{ANSWERS}.temperature=0.5"]
    with pytest.raises(
        ConfigError, match=r"data.max_response_length is 9 in the run of .* but 8 in the run of .*second"
    ):
        _ = read(*words, *others).run_settings
    assert "data.max_response_length" in read(*words, *others, "data.max_response_length=8").run_settings


def test_relative_paths_of_a_run_start_at_the_folder_where_it_was_started(
    tiny_model, arithmetic_files, tmp_path, monkeypatch
):
    shutil.copytree(tiny_model, tmp_path / "start" / "models" / "small")
    (tmp_path / "start" / "world.py").write_text("")
    (tmp_path / "start" / "prompt").write_text("")  # also a word of a key that names no file
    save_checkpoint(tmp_path / "run", tiny_model, 3, **{"actor_rollout_ref.model.path": "models/small"})
    settings = ["actor_rollout_ref.rollout.multi_turn.environment=world.py:World", "data.image_key=prompt"]
    loaded = load_config(settings)
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(loaded.config))
    with pytest.raises(CheckpointError, match=r"models/small.* evaluate the exported weights"):
        models_of([str(tmp_path / "run")])
    with monkeypatch.context() as patched:
        patched.chdir(tmp_path / "start")
        folder = RunFolder(str(tmp_path / "run"))
        write_run_files(folder, loaded, plan=loaded.config, hosts=[])
        folder.release()
    request = read(f"model={tmp_path / 'run'}", f"data={arithmetic_files[1]}")
    cfg = request.settings(request.models[0]).config
    assert cfg.actor_rollout_ref.model.path == str(tmp_path / "start" / "models" / "small")
    assert cfg.actor_rollout_ref.rollout.multi_turn.environment == f"{tmp_path / 'start' / 'world.py'}:World"
    assert cfg.data.image_key == "prompt"


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("template.jinja", "actor_rollout_ref.model.custom_chat_template={}"),
        ("tools.py", "actor_rollout_ref.rollout.multi_turn.function_tool_path={}"),
        ("reward.py", "custom_reward_function.path={}"),
        ("world.py", "actor_rollout_ref.rollout.multi_turn.environment={}:World"),
        ("judge.txt", "reward.judge.prompt={}"),
        ("test.parquet", "data.val_files={}"),
    ],
)
def test_another_content_of_a_file_is_another_evaluation(tiny_model, arithmetic_files, tmp_path, file, key):
    path = tmp_path / file
    path.write_text("{{ answer }}")
    data = path if key.startswith("data.") else arithmetic_files[1]
    words = [] if key.startswith("data.") else [key.format(path)]
    judge = ["reward.judge.url=http://localhost:1/v1", "reward.judge.model=m"] if "judge" in key else []
    request = read(f"model={tiny_model}", f"data={data}", *words, *judge)
    (model,) = request.models
    before = identity(model, request.settings(model))
    path.write_text("{{ answer }}!")
    assert identity(model, request.settings(model)) != before


def test_models_of_equal_names_are_told_apart(tiny_model, run, tmp_path):
    save_checkpoint(tmp_path / "other", tiny_model, 10)
    models = models_of([str(run), str(tmp_path / "other")])
    assert [model.name for model in models] == ["run_global_step_10", "other_global_step_10"]
    exports = [save_checkpoint(tmp_path / name / "x", tiny_model, 10) / "huggingface" for name in ("one", "two")]
    told_apart = models_of([str(export) for export in exports])
    assert [model.name for model in told_apart] == [f"{name}_x_global_step_10_huggingface" for name in ("one", "two")]
    # Results inside of the checkpoint would be removed with it.
    assert told_apart[0].output_folder == tmp_path / "one" / "x" / "evaluation"
    with pytest.raises(ConfigError, match=r"names .*global_step_10 twice"):
        models_of([str(run), str(run / "global_step_10")])


def test_what_is_no_model_is_refused(tiny_model, run, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty has no config.json, so it is not a Hugging Face model"):
        models_of([str(tmp_path / "empty")])
    with pytest.raises(ConfigError, match="no folder matches this pattern"):
        models_of([str(tmp_path / "step_*")])
    with open(run / "global_step_10" / "huggingface" / "config.json", "a", encoding="utf-8") as file:
        file.write(" ")
    with pytest.raises(
        CheckpointError, match=r"global_step_10 cannot be evaluated: huggingface/config.json has \d+ bytes"
    ):
        models_of([str(run / "global_step_10")])
    (newest,) = models_of([str(run)])
    assert newest.step == 2, "a damaged one is passed over, as where a run goes on"


def test_a_checkpoint_of_another_tokenizer_is_refused(tmp_path):
    base = save_tiny_model(tmp_path / "base")
    saved = save_checkpoint(tmp_path / "run", base, 1)
    text = (base / "tokenizer.json").read_text()
    (base / "tokenizer.json").write_text(text.replace('"7"', '"x"'))
    with pytest.raises(CheckpointError, match=r"its token \d+ is '7', and that of .*base.* is 'x' now; 1 differ"):
        models_of([str(saved)])
    shutil.rmtree(base)
    with pytest.raises(
        CheckpointError, match=r"was trained from .*base.* the folder does not exist.*model=.*huggingface"
    ):
        models_of([str(saved)])


def test_short_words_are_keys_of_the_trainer(tiny_model, arithmetic_files, tmp_path):
    words = ["n=4", "temperature=0.5", "max_tokens=5", "min_p=0.1", "repetition_penalty=1.2"]
    data = f"data={arithmetic_files[1]},{arithmetic_files[0]}"
    request = read(f"model={tiny_model}", data, *words, "stop=['</answer>',end]", f"out={tmp_path}")
    cfg = request.settings(request.models[0]).config
    answers = cfg.actor_rollout_ref.rollout.val_kwargs
    assert (answers.n, answers.temperature, cfg.trainer.val_only) == (4, 0.5, True)
    drawn = sampling_of(answers, cfg.actor_rollout_ref.rollout, cfg.data, greedy=False)
    assert (drawn.max_tokens, drawn.min_p, drawn.repetition_penalty) == (5, 0.1, 1.2)
    assert drawn.stop == ("</answer>", "end")
    assert cfg.data.val_files == [str(file) for file in reversed(arithmetic_files)]
    assert request.folder(request.models[0]) == tmp_path


def test_results_go_beside_the_model_and_below_out_where_there_are_several(tiny_model, run, arithmetic_files, tmp_path):
    data = f"data={arithmetic_files[1]}"
    request = read(f"model={run}", data)
    assert request.folder(request.models[0]) == run / "evaluation" / "global_step_10"
    several = read(f"model={run},{tiny_model}", data, f"out={tmp_path / 'out'}")
    assert [several.folder(model).name for model in several.models] == ["global_step_10", tiny_model.name]
    assert several.root == tmp_path / "out"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["n=0"], "n=0: it must be at least 1"),
        (["n=null"], "n=null: 'null' is not a whole number"),
        (["trainer.val_only=True"], "an evaluation does not train"),
        (["trainer.default_local_dir=x"], "out=FOLDER sets the folder of the results"),
        (["out=a,b"], "results go into one folder"),
        (["model="], "model= is not given"),
        (["modl=x"], "unknown key modl. Did you mean model=?"),
    ],
)
def test_words_that_cannot_be_meant_are_refused(tiny_model, arithmetic_files, words, told):
    with pytest.raises(ConfigError, match=told):
        read(f"model={tiny_model}", f"data={arithmetic_files[1]}", *words)


def test_several_greedy_answers_and_unknown_keys_are_refused(tiny_model, arithmetic_files):
    for words, told in ((["n=4"], "all 4 to a prompt would be equal"), (["flavour=1"], "unknown key")):
        request = read(f"model={tiny_model}", f"data={arithmetic_files[1]}", *words)
        with pytest.raises(ConfigError, match=told):
            request.settings(request.models[0])


def test_what_changes_answers_changes_the_identity_and_what_does_not_does_not(tiny_model, arithmetic_files, tmp_path):
    def asked(*words, data=arithmetic_files[1]):
        request = read(f"model={tiny_model}", f"data={data}", "temperature=1.0", *words)
        return identity(request.models[0], request.settings(request.models[0]))

    first = asked()
    assert (
        asked("trainer.device=cpu", "actor_rollout_ref.rollout.gpu_memory_utilization=0.4", f"out={tmp_path}") == first
    )
    for word in ("n=2", "max_tokens=5", "min_p=0.1", "repetition_penalty=1.2", "stop=[end]"):
        changed = {key for key, value in asked(word).items() if first.get(key) != value}
        assert changed == {f"{ANSWERS}.{word.partition('=')[0]}"}
    assert {key for key, value in asked(data=arithmetic_files[0]).items() if first[key] != value} == {"data"}
    copy = shutil.copy(arithmetic_files[1], tmp_path)
    assert asked(data=copy) == first


def test_a_folder_of_another_evaluation_is_refused_before_the_first_model(
    tiny_model, arithmetic_files, tmp_path, capsys
):
    ResultFolder(tmp_path / "b", {"model": "another"}).begin()
    for name in ("a", "b"):
        shutil.copytree(tiny_model, tmp_path / "models" / name)
    lengths = ["data.max_prompt_length=16", "data.max_response_length=8", "trainer.device=cpu"]
    words = [f"model={tmp_path}/models/a,{tmp_path}/models/b", f"data={arithmetic_files[1]}", f"out={tmp_path}"]
    assert main([*words, *lengths]) == 2
    assert f"{tmp_path / 'b'} holds another evaluation" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
