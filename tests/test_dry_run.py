"""--dry-run: its findings, and an exit code that tells whether a run would start."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoConfig, AutoModelForCausalLM, BloomConfig, DeepseekV2Config

from rltrain.common.env import installed
from rltrain.config.load import load_config
from rltrain.data import chat
from rltrain.main_ppo import main
from rltrain.run.checkpoints.folder import RunFolder
from rltrain.workers.hybrid import HybridWorker
from tests.config.commands import words
from tests.doubles.judge import JudgeDouble
from tests.tiny import save_tiny_model, save_tiny_tokenizer, small_run, write_arithmetic

M = "actor_rollout_ref__model__"
R = "actor_rollout_ref__rollout__"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dry")
    files = (write_arithmetic(folder / "train.parquet", range(20)), write_arithmetic(folder / "val.parquet", range(4)))
    return save_tiny_model(folder / "model"), files


@pytest.fixture
def dry(made, tmp_path, capsys, monkeypatch):
    """Run it with changes; return exit code and text."""
    # Templates end here (tests/data/test_chat.py has some that do not): a fork that tries each takes most of the time.
    monkeypatch.setattr(chat, "problem_in_fork", lambda *_: "")

    def run(*more, **changes):
        code = main([*small_run(*made, tmp_path / "run", **changes), *more, "--dry-run"])
        return code, capsys.readouterr().out

    return run


def refused(dry, *more, **changes):
    code, text = dry(*more, **changes)
    assert code == 2, text
    return text[text.index("a run would refuse") :]


def own(folder, body):
    (folder / "reward.py").write_text(
        f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    {body}\n"
    )
    return str(folder / "reward.py")


@pytest.mark.smoke("--dry-run says what a run would do")
def test_a_command_that_would_run_ends_with_zero(dry, tmp_path):
    code, text = dry()
    assert (code, text.splitlines()[-1]) == (0, "a run would start")
    assert "5 per epoch of 20 prompts" in text
    assert re.search(r"data: checked (\d+) of \1 train and (\d+) of \2 val rows", text)
    assert "'rltrain/arithmetic', the ground truth as the response: 1" in text
    assert not (tmp_path / "run").exists()


SEVERAL = "trainer.n_gpus_per_node=4 algorithm.adv_estimator=gae"


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("data.train_files=/no/such.parquet", "/no/such.parquet does not exist"),
        ("data.train_files=openai/gsm8k", "`rltrain data gsm8k --output data/gsm8k` makes them"),
        ("data.max_prompt_length=4", "prompts are longer than data.max_prompt_length=4"),
        ("data.train_batch_size=64", "train_batch_size=64 is more than the 20 training prompts"),
        ("trainer.device=npu", "this machine has 0 NPU devices (torch "),
        ("trainer.device=cuda trainer.n_gpus_per_node=99", "CUDA devices (torch "),
        ("ray_kwargs.ray_init.num_cpus=1 trainer.n_gpus_per_node=2", "num_cpus=1 is too few"),
        ("ray_kwargs.ray_init.num_cpu=1", "ray.init has no such argument"),
        ("model.path={model}l", "the folder does not exist. Did you mean {model}?"),
        ("reward.reward_model.enable=True reward.reward_model.model_path=/no", "reward.reward_model.model_path=/no"),
        (
            "model.lora_rank=4 model.target_modules=[q_prj]",
            "no linear layer below the head matches 'q_prj'. Did you mean q_proj",
        ),
        ("algorithm.gdpo_reward_keys=[style] algorithm.adv_estimator=gdpo", "does not return a number of that name"),
        ("model.override_config.layer_types=[full_attention,conv]", "has layers of kind conv"),
        ("model.enable_gradient_checkpointing=99", "gradient_checkpointing=99: the model has"),
        ("model.override_config.mine=1", "mine: Qwen3Config has no such"),
        (f"{SEVERAL} critic.model.override_config.mine=1", "critic.model.override_config.mine: Qwen3Config has no"),
        (f"{SEVERAL} critic.model.path=/no/critic", "critic.model.path=/no/critic: the folder does not exist"),
        (f"{SEVERAL} actor.ulysses_sequence_parallel_size=4", "actor.ulysses_sequence_parallel_size=4"),
        (f"{SEVERAL} actor.ulysses_sequence_parallel_size=4", "share sequences further by ring_attention_size"),
        (f"{SEVERAL} ref.ulysses_sequence_parallel_size=4", "ref.ulysses_sequence_parallel_size=4"),
        (f"{SEVERAL} critic.ulysses_sequence_parallel_size=4", "critic.ulysses_sequence_parallel_size=4"),
        (f"{SEVERAL} rollout.name=vllm rollout.tensor_model_parallel_size=4", "size=4 does not divide"),
        (
            "rollout.name=vllm rollout.enable_chunked_prefill=False rollout.max_num_batched_tokens=8",
            "Remove it, or set max_num_batched_tokens=24.",
        ),
        ("reward_model.enable=True reward_model.model.path={model}", "has no classification head"),
        ("model.lora_adapter_path={model}", "is not a peft adapter"),
        (f"{SEVERAL} critic.model.lora_rank=2 critic.model.target_modules=[q_prj]", "Did you mean q_proj"),
        ("model.external_lib=nobody_has_this_library", "external_lib=nobody_has_this_library cannot be imported"),
        (
            "rollout.name=vllm data.max_response_length=200 actor.ppo_max_token_len_per_gpu=512",
            "which vllm refuses",
        ),
    ],
)
def test_what_a_run_refuses_ends_with_two(dry, made, command, message):
    assert message.replace("{model}", str(made[0])) in refused(dry, *words(command.replace("{model}", str(made[0]))))


@pytest.mark.long
def test_a_hub_that_cannot_be_reached_is_asked_once(made, tmp_path):
    words = small_run(*made, tmp_path / "run", actor_rollout_ref__model__path="nobody/has-this", trainer__device="npu")
    environment = os.environ | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}  # nobody listens there
    command = [sys.executable, "-m", "rltrain.main_ppo", *words, "--dry-run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "http://127.0.0.1:9 cannot be reached" in done.stdout
    assert "Retrying" not in done.stdout + done.stderr


def test_a_model_whose_numbers_cannot_be_checked_needs_a_key(dry, tmp_path):
    sizes = {"num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 32, "moe_intermediate_size": 8}
    config = DeepseekV2Config(**sizes, n_routed_experts=4, num_experts_per_tok=None, intermediate_size=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    save_tiny_tokenizer(tmp_path / "model")
    path = {"actor_rollout_ref__model__path": str(tmp_path / "model")}
    untried = "its outputs could not be checked: a small copy of it does not run (TypeError: topk"
    message = refused(dry, **path)
    assert untried in message
    assert "or set trainer.allow_unchecked_models=True and compare its log-probs yourself." in message
    _, text = dry(**path, trainer__allow_unchecked_models=True)
    assert untried in text[text.index("worth a look") :].split("a run would refuse")[0]
    assert "trainer.allow_unchecked_models" not in text.split("a run would refuse")[-1]


@pytest.mark.fault("A tokenizer that is larger than the model is refused before anything starts, exit 2")
def test_a_tokenizer_that_is_not_the_model_s_is_known(dry, made, tmp_path):
    def small_model(name, **changes):
        config = AutoConfig.from_pretrained(made[0])
        config.update({"vocab_size": 8, "bos_token_id": None, **changes})
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        save_tiny_tokenizer(tmp_path / name)
        return {M + "path": tmp_path / name}

    few = small_model("few", pad_token_id=None)
    found = refused(dry, **few)
    assert "20 of 20 prompts have tokens that the model in" in found
    assert "its vocabulary has 8, its tokenizer 20. Use the tokenizer that belongs to it" in found
    assert "row 0: token " in found
    config = json.loads((tmp_path / "few/config.json").read_text())
    (tmp_path / "few/config.json").write_text(json.dumps(config | {"pad_token_id": 15}))
    assert "config.json has pad_token_id=15, but the model has 8 tokens" in refused(dry, **few)
    critic = {"algorithm__adv_estimator": "gae", "critic__model__path": tmp_path / "few"}
    (tmp_path / "few/config.json").write_text(json.dumps(config))
    assert "has 8 tokens, but the policy can generate 20. Use a model" in refused(dry, **critic)


def test_data_that_cannot_be_read_are_a_problem_and_the_other_split_is_looked_at(dry, made, tmp_path):
    train, _ = made[1]
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(pathlib.Path(train).read_bytes()[:-100])
    (tmp_path / "pointer.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")
    wrong = write_arithmetic(tmp_path / "wrong.parquet", range(4), "nobody/knows")
    for files, message in (
        ((cut, wrong), "cannot be read as parquet"),
        ((wrong, tmp_path / "pointer.parquet"), "git lfs pull"),
    ):
        found = refused(dry, data__train_files=files[0], data__val_files=files[1])
        assert message in found
        assert "no scorer for data_source='nobody/knows'" in found


def test_each_kind_of_bad_row_is_shown_at_once(dry, made, tmp_path):
    rows = pq.read_table(made[1][0]).to_pylist()
    rows[3]["data_source"] = None
    rows[5]["prompt"] = rows[9]["prompt"] = [{"role": "user", "content": "x" * 400}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "bad.parquet")
    found = refused(dry, data__train_files=tmp_path / "bad.parquet")
    assert "row 3: field 'data_source' is null" in found
    assert "2 of 19 prompts are longer than" in found
    assert "row 5: " in found
    assert "row 9: " in found


def test_a_run_folder_that_cannot_be_had_is_known(dry, tmp_path):
    (tmp_path / "file").write_text("")
    assert "is not a writable folder" in refused(dry, trainer__default_local_dir=tmp_path / "file" / "run")
    other = RunFolder(str(tmp_path / "run"))
    found = refused(dry)
    other.release()
    assert f"{tmp_path}/run is in use by pid" in found
    assert dry()[0] == 0


def test_a_checkpoint_that_a_run_refuses_is_known(dry, tmp_path):
    folder = RunFolder(str(tmp_path / "run"))
    temporary = folder.begin_save(2)
    (temporary / "progress.json").write_text('{"global_step": 2}')
    folder.commit(temporary, 2)
    folder.release()
    assert "already holds a checkpoint of step 2" in refused(dry, trainer__resume_mode="disable")
    (tmp_path / "empty").mkdir()
    path = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": tmp_path / "empty"}
    assert "cannot be resumed from" in refused(dry, **path)


@pytest.mark.skipif(not installed("vllm"), reason="vLLM is not installed")
def test_arguments_that_an_engine_does_not_have_are_named(dry):
    vllm, given = {R + "name": "vllm"}, "+actor_rollout_ref.rollout.engine_kwargs.vllm."
    found = refused(dry, f"{given}block_sise=32", f"{given}quite_other=1", **vllm)
    assert "vllm.block_sise: vllm, as installed here, has no such argument. Did you mean block_size?" in found
    assert "vllm.quite_other: vllm, as installed here, has no such argument. Leave it out." in found
    code, text = dry(f"{given}swap_space=8", f"{given}block_size=32", f"{given}compilation_config.level=0", **vllm)
    assert code == 0
    assert "engine_kwargs.vllm.swap_space: vllm has no such argument any more" in text


def test_an_engine_that_nobody_named_is_told_on_accelerators(dry, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # counts as not installed
    assert "rollout.name is not set: hf, a plain decode loop, is used, because vLLM" in dry(trainer__device="npu")[1]
    assert "rollout.name is not set" not in dry()[1]
    monkeypatch.setitem(sys.modules, "sglang", None)
    assert "rltrain[sglang]" in refused(dry, **{R + "name": "sglang"})


@pytest.mark.parametrize(
    ("command", "note"),
    [
        ("data.max_response_length=200 actor.ppo_max_token_len_per_gpu=512", "the model has 128 positions"),
        ("rollout.max_model_len=200", "rollout.max_model_len = 200 tokens, but the model has 128 positions"),
        ("model.custom_chat_template={{messages[0].content}}", "the same with and without add_generation_prompt"),
        ("model.lora_rank=2 model.exclude_modules=DONT_EXCLUDE", "DONT_EXCLUDE matches no linear layer"),
        ("trainer.logger=[console,wandb]", "trainer.logger=wandb: not installed here"),
    ],
)
def test_what_does_not_stop_a_run_is_noted(dry, monkeypatch, command, note):
    monkeypatch.setitem(sys.modules, "wandb", None)  # counts as not installed
    code, text = dry(*words(command))
    assert code == 0
    assert note in text
    assert "a critic is trained" not in text


def test_a_reward_of_ones_own_is_called_once_a_source(dry, tmp_path):
    calls = tmp_path / "calls"
    path = own(tmp_path, f"open({str(calls)!r}, 'a').write('x'); print('hello'); return {{'score': 0.5, 'acc': 1}}")
    code, text = dry(custom_reward_function__path=path)
    assert code == 0
    assert "the ground truth as the response: 0.5 with acc=1.0" in text
    assert "printed: hello" in text
    assert calls.read_text() == "x"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", "ZeroDivisionError"),
        ("return None", "returned NoneType None"),
        ("return float('nan')", "returned nan"),
        ("return {'acc': 1}", "a dict without 'score'"),
    ],
)
def test_what_is_wrong_with_a_reward_is_shown(dry, tmp_path, body, message):
    code, text = dry(custom_reward_function__path=own(tmp_path, body))
    assert code == 2
    assert message in text


def test_a_judge_is_looked_for_and_judges_nothing(dry, tmp_path):
    judge = JudgeDouble(lambda *_: "\\boxed{yes}")
    keys = {"reward__judge__url": judge.url, "reward__judge__model": "grader"}
    try:
        code, text = dry(**keys, reward__judge__rule="first")
        assert code == 0
        assert f"judge: {judge.url} responds and has grader; no response was judged" in text
        assert f"with the judge grader at {judge.url} if the scorer does not accept the response, 32 requests" in text
        assert "the ground truth as the response" in text
        assert judge.paths == ["/v1/models"]
        assert "reward.judge.model=other is not among the models" in dry(**keys | {"reward__judge__model": "other"})[1]
    finally:
        judge.close()
    code, text = dry(**keys)
    assert code == 0
    assert f"{judge.url}/models does not respond now: ConnectError" in text
    (tmp_path / "ask.txt").write_text("{{ anwser }}")
    assert "{{ anwser }} is unknown" in refused(dry, **keys, reward__judge__prompt=str(tmp_path / "ask.txt"))


def cut(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def split(folder):
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (cut, "model.safetensors has"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"abc"), "no readable safetensors header (3 bytes)"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (split, "lacks 1 of the 2 files with weights that model.safetensors.index.json names: model-2.safetensors"),
    ],
    ids=["cut", "garbage", "none", "config", "split"],
)
def test_a_model_that_is_not_whole_is_named_by_file(dry, made, tmp_path, change, words):
    folder = shutil.copytree(made[0], tmp_path / "model")
    change(folder)
    found = refused(dry, **{M + "path": folder})
    assert words in found
    assert str(folder) in found
    assert ".parquet" not in found


def test_a_run_refuses_what_the_dry_run_refuses(made, tmp_path, capsys):
    assert main(small_run(*made, tmp_path / "run", **{M + "path": f"{made[0]}l"})) == 2
    assert "the folder does not exist. Did you mean" in capsys.readouterr().err
    assert main(small_run(*made, tmp_path / "run", trainer__device="npu")) == 2
    assert "this machine has 0 NPU devices" in capsys.readouterr().err


CLASSES = """
class Sums:
    def __init__(self, data_files, tokenizer, config, processor=None):
        self.number, self.word = len(data_files) - len(data_files) + config.number, tokenizer.eos_token

    def __len__(self):
        return self.number

    def __getitem__(self, item):
        messages = [{"role": "user", "content": f"{item} + 1 = ?"}]
        truth = {"style": "rule", "ground_truth": str(item + 1)}
        return {"data_source": "rltrain/arithmetic", "raw_prompt": messages, "reward_model": truth}


class Backwards:
    def __init__(self, data_source, data_config):
        self.number, self.step = len(data_source), data_config.sampler.step

    def __iter__(self):
        return iter(range(self.number - 1, -1, -self.step))

    def __len__(self):
        return len(range(0, self.number, self.step))
"""


def of_verl(folder, *more, **changes):
    """Return the classes by verl's keys."""
    (folder / "mine.py").write_text(CLASSES)
    keys = {"data.custom_cls.path": folder / "mine.py", "data.custom_cls.name": "Sums", "+data.number": 12}
    keys |= {"data.sampler.class_path": f"file://{folder}/mine.py", "data.sampler.class_name": "Backwards"}
    keys |= {"+data.sampler.step": 1} | changes
    return [*(f"{key}={value}" for key, value in keys.items()), *more]


def test_classes_that_verl_would_load_are_tried(dry, tmp_path):
    code, text = dry(*of_verl(tmp_path, "data.train_files=[anything]"))
    assert (code, text.splitlines()[-1]) == (0, "a run would start")
    assert "3 per epoch of 12 prompts" in text
    assert f"data.custom_cls.path and data.custom_cls.name are data.custom_cls={tmp_path}/mine.py:Sums here" in text
    assert "data.sampler.step: passed to your own class only" in text
    code, text = dry(*of_verl(tmp_path, "data.val_files=[anything]", "trainer.val_only=True"))
    assert (code, text.splitlines()[-1]) == (0, "a run would start")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.custom_cls.name": "Summs"}, "the file has no function 'Summs'; it defines Sums, Backwards"),
        ({"data.custom_cls.path": "/no/such.py"}, "/no/such.py does not exist"),
        ({"data.custom_cls.path": "pkg://no.such"}, "No module named 'no'"),
        ({"+data.number": 0}, "no usable row in data.custom_cls"),
        ({"+data.sampler.step": 2}, "an epoch of it has 1 batches, and one of the data 3"),
        ({"+data.sampler.step": 5}, "an epoch yields 3 different rows, fewer than data.train_batch_size=4"),
    ],
)
def test_what_is_wrong_with_such_classes_is_shown(dry, tmp_path, changes, words):
    more = ["trainer.total_training_steps=null"] if "one of the data" in words else []
    found = refused(dry, *of_verl(tmp_path, *more, **changes))
    assert found.count(words) == 1


def test_a_family_with_wrong_numbers_is_refused_before_anything_starts(dry, tmp_path):
    config = BloomConfig(vocab_size=20, hidden_size=16, n_layer=1, n_head=2, eos_token_id=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "bloom")
    save_tiny_tokenizer(tmp_path / "bloom")
    said = refused(dry, **{M + "path": tmp_path / "bloom"})
    assert f"{tmp_path / 'bloom'}: Bloom computes attention outside of transformers' attention interface" in said
    assert said.rstrip().endswith("Use a supported family (docs/models.md).")


def test_a_library_of_the_user_s_own_is_imported_before_models_are_looked_at(dry, tmp_path, monkeypatch):
    monkeypatch.setenv("IMPORTED", "")
    (tmp_path / "mine.py").write_text("import os\nos.environ['IMPORTED'] = 'yes'\n")
    assert dry(**{M + "external_lib": tmp_path / "mine.py"})[0] == 0
    assert os.environ["IMPORTED"] == "yes"


def test_workers_import_the_library_before_they_load_models(tmp_path, monkeypatch):
    monkeypatch.setenv("IMPORTED", "")
    (tmp_path / "mine.py").write_text("import os\nos.environ['IMPORTED'] = 'yes'\n")
    config = load_config([f"actor_rollout_ref.model.external_lib={tmp_path}/mine.py"]).config
    HybridWorker(config, {})
    assert os.environ["IMPORTED"] == "yes"
