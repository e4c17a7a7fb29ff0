"""EasyR1's configuration, read as ours."""

import pytest

from rltrain.base.errors import ConfigError
from rltrain.config.check import check
from rltrain.config.load import load_config
from rltrain.config.schema.keys import get
from rltrain.tools.port.__main__ import main as port

FILE = """\
data: {train_files: DATA, val_files: DATA, max_prompt_length: 64, max_response_length: 32, rollout_batch_size: 8,
  mini_rollout_batch_size: null, val_batch_size: -1, format_prompt: null, seed: 3, filter_overlong_prompts: true}
algorithm: {adv_estimator: grpo, disable_kl: false, use_kl_loss: true, kl_penalty: low_var_kl, kl_coef: 1.0e-2}
worker:
  actor:
    global_batch_size: 4
    micro_batch_size_per_device_for_update: 2
    micro_batch_size_per_device_for_experience: 8
    max_grad_norm: 0.5
    padding_free: true
    loss_avg_mode: seq
    clip_ratio_dual: 10.0
    model: {model_path: MODEL, trust_remote_code: false, lora: {rank: 8, alpha: 16}}
    optim: {lr: 2.0e-6, lr_warmup_ratio: 0.1, strategy: adamw}
    fsdp: {enable_full_shard: true, enable_cpu_offload: false, torch_dtype: null, mp_reduce_dtype: fp32}
    offload: {offload_params: true, offload_optimizer: true}
  rollout:
    {n: 5, temperature: 0.9, top_p: 0.99, tensor_parallel_size: 1, limit_images: 0, enforce_eager: true,
     val_override_config: {temperature: 0.5, n: 2}}
  ref: {fsdp: {enable_full_shard: true, enable_cpu_offload: true}, offload: {offload_params: false}}
trainer: {total_epochs: 2, max_steps: 6, project_name: mine, logger: [console], n_gpus_per_node: 1, val_freq: 5,
  save_freq: -1, save_limit: 2, find_last_checkpoint: false, save_model_only: false, load_checkpoint_path: null}
"""
A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
# What every key of the file is here.
MEANT = {
    "data.train_batch_size": 8, "data.seed": 3, A + "ppo_mini_batch_size": 4, A + "optim.clip_grad": 0.5,
    A + "loss_agg_mode": "seq-mean-token-mean", A + "clip_ratio_c": 10.0, "actor_rollout_ref.model.lora_rank": 8,
    A + "optim.lr": 2e-6, A + "optim.lr_warmup_steps_ratio": 0.1, A + "fsdp_config.param_offload": True,
    A + "fsdp_config.optimizer_offload": True, A + "use_kl_loss": True, A + "kl_loss_type": "low_var_kl",
    A + "kl_loss_coef": 0.01, "algorithm.use_kl_in_reward": False, R + "n": 5, R + "temperature": 0.9,
    R + "val_kwargs.do_sample": True, R + "val_kwargs.temperature": 0.5, R + "val_kwargs.top_p": 0.99,
    R + "val_kwargs.n": 2, "actor_rollout_ref.ref.fsdp_config.param_offload": True,
    # By tokens: two and eight of the longest sequences.
    A + "ppo_max_token_len_per_gpu": 192, R + "log_prob_max_token_len_per_gpu": 768,
    "trainer.total_training_steps": 6, "trainer.test_freq": 5, "trainer.max_actor_ckpt_to_keep": 2,
    "trainer.resume_mode": "disable",
    # EasyR1's defaults, which the file relies on.
    A + "clip_ratio_high": 0.3, R + "name": "vllm", "trainer.experiment_name": "demo",
    R + "max_num_batched_tokens": 8192,
}  # fmt: skip


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(FILE.replace("DATA", str(tmp_path / "d.parquet")).replace("MODEL", str(tmp_path)))
    return path


def test_a_file_of_easyr1_is_read_with_its_names_and_defaults(file):
    loaded = load_config([], [str(file)])
    check(loaded)
    assert {key: get(loaded.config, key) for key in MEANT} == MEANT
    assert any("EasyR1's defaults count" in line and "clip_ratio_high=0.3" in line for line in loaded.warnings)
    assert any("padding_free: no effect" in line for line in loaded.warnings)


def test_words_after_the_file_may_be_in_either_language(file):
    words = ["worker.rollout.n=7", f"{A}optim.lr=1e-5", "worker.actor.dynamic_batching=false"]
    loaded = load_config([*words, "data.max_response_length=64"], [str(file)])
    assert get(loaded.config, R + "n") == 7
    assert get(loaded.config, A + "optim.lr") == 1e-5
    assert get(loaded.config, A + "ppo_micro_batch_size_per_gpu") == 2
    assert get(loaded.config, "data.max_response_length") == 64


def test_without_a_kl_loss_the_kl_is_in_the_reward_as_in_easyr1(file):
    loaded = load_config(["algorithm.use_kl_loss=false", "algorithm.kl_coef=0.002"], [str(file)])
    assert loaded.config.algorithm.use_kl_in_reward
    assert loaded.config.algorithm.kl_ctrl.kl_coef == 0.002
    loaded = load_config(["algorithm.disable_kl=true"], [str(file)])
    assert not loaded.config.algorithm.use_kl_in_reward
    assert not loaded.config.actor_rollout_ref.actor.use_kl_loss


def test_online_filtering_is_dynamic_sampling(file):
    words = ["algorithm.online_filtering=true", "algorithm.filter_key=accuracy", "data.mini_rollout_batch_size=16"]
    config = load_config(words, [str(file)]).config
    groups = config.algorithm.filter_groups
    assert (groups.enable, groups.metric, groups.max_num_gen_batches) == (True, "accuracy", 20)
    assert config.data.gen_batch_size == 16


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("worker.actor.nonsense=1", "worker.actor.nonsense=1: nothing here does"),
        ("worker.anything=1", "worker.anything=1: nothing here does"),
        ("data.train_files=me/maths@train", "rltrain data jsonl --input FILE --prompt-column prompt"),
        ("data.answer_key=truth", "--answer-column truth"),
        ("data.format_prompt=maths.jinja", "--instruction 'the words of maths.jinja'"),
        ("worker.reward.reward_function=./r.py:score", 'runpy.run_path("./r.py")["score"]'),
        ("worker.actor.optim.strategy=adamw_bf16", "worker.actor.fsdp.torch_dtype=bf16"),
        ("worker.actor.fsdp.mp_reduce_dtype=bf16", "float32"),
        ("worker.actor.loss_avg_mode=median", "worker.actor.loss_avg_mode=median"),
        ("worker.rollout.val_override_config.min_p=0.1", "min_p=0.1: use one of"),
        ("trainer.load_checkpoint_path=/c/global_step_5", "rltrain.checkpoint export"),
        ("trainer.save_model_only=true", "save_contents=[model]"),
        ("data.video_key=clips", "videos"),
    ],
)
def test_what_easyr1_has_and_nobody_here_is_refused_by_its_name(file, word, told):
    with pytest.raises(ConfigError) as raised:
        load_config([word], [str(file)])
    assert told in str(raised.value)


def test_filters_that_would_keep_other_groups_are_refused(file):
    with pytest.raises(ConfigError, match=r"algorithm.filter_low=0.2"):
        load_config(["algorithm.online_filtering=true", "algorithm.filter_low=0.2"], [str(file)])


def test_a_launch_of_easyr1_is_ported_with_its_file(tmp_path, file, capsys):
    script = tmp_path / "scripts" / "run.sh"
    script.parent.mkdir()
    script.write_text(
        "MODEL=${MODEL:-/models/m}\npython3 -m verl.trainer.main config=config.yaml \\\n"
        "  worker.actor.model.model_path=$MODEL worker.rollout.n=6 worker.actor.loss_type=gspo \\\n"
        "  worker.actor.loss_avg_mode=token trainer.n_gpus_per_node=4\n"
    )
    code = port([str(script), "-o", str(tmp_path / "new.sh")])
    text = (tmp_path / "new.sh").read_text()
    output = capsys.readouterr().err
    assert code == 0, output
    assert "of EasyR1's" in output
    of_actor = [
        f"{A}{setting}" for setting in ("kl_loss_coef=0.01", "policy_loss.loss_mode=gspo", "loss_agg_mode=token-mean")
    ]
    for line in (*of_actor, f"{R}n=6", "actor_rollout_ref.model.path=/models/m", "trainer.n_gpus_per_node=4"):
        assert line in text
    assert "# EasyR1's default\n    actor_rollout_ref.actor.clip_ratio_high=0.3" in text
    assert "verl's default" not in text
    assert "worker." not in "".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


def test_a_launch_whose_file_is_not_here_says_so(tmp_path, capsys):
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main config=examples/none.yaml worker.actor.model.model_path=/m\n")
    assert port([str(script)]) == 2
    assert "config=examples/none.yaml: there is no such file" in capsys.readouterr().out


def test_a_file_of_easyr1_is_ported(tmp_path, file, capsys):
    assert port([str(file), "-o", str(tmp_path / "new.sh")]) == 0, capsys.readouterr().err
    assert f"{R}val_kwargs.n=2" in (tmp_path / "new.sh").read_text()
