"""What verl's names and values become: taken, noted, or refused with the key as it was written."""

import math
import re

import pytest

from rltrain.api import look_over
from rltrain.base.errors import ConfigError
from rltrain.config.check import check
from rltrain.config.load import load_config, masked_command
from rltrain.config.schema.keys import all_keys, free_form_parent, get, sections
from rltrain.config.verl.keys import aliases, classes, refused_null, verdict
from rltrain.config.verl.table import rows
from rltrain.main_ppo import main

A, C = "actor_rollout_ref.", "algorithm.rollout_correction."
BASE = [
    f"{A}model.path=m", "data.train_files=t.parquet", "algorithm.adv_estimator=grpo", f"{A}rollout.n=4",
    "trainer.n_gpus_per_node=8",
]  # fmt: skip


def value(key: str, *overrides: str):
    return get(load_config([*BASE, *overrides]).config, key)


def notes(*overrides: str) -> list[str]:
    return look_over(load_config([*BASE, *overrides]))


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check(load_config([*BASE, *overrides]))
    return str(caught.value).splitlines()


OF_NO_RELEASE = "none of verl 0.5.0, 0.6.1, 0.7.0, 0.8.0, 0.9.0, 0.9.1 has this key"

# Null has a meaning of its own here, which the help text tells.
OWN_NULL = {"trainer.max_actor_ckpt_to_keep", "trainer.hang_floor_s", "trainer.save_every_s"} | {
    "actor_rollout_ref.rollout.multi_turn.trajectory_timeout_s"
}


@pytest.mark.few(10)
@pytest.mark.parametrize("key", [key for key in all_keys() if key not in OWN_NULL and not refused_null(key)])
def test_null_is_the_default_of_every_key(key):
    default, declared = get(load_config([]).config, key), all_keys()[key].default
    endings = [f"{declared}, the default"] if declared and not str(declared).startswith("${") else []
    for word, how in ((f"{key}=null", "is"), (f"{key}=", "is empty, so it is"), (f"~{key}", "")):
        loaded = load_config([word])
        assert get(loaded.config, key) == default
        assert list(loaded.warnings) == [f"{word} {how} {ending}" for ending in endings if how]
        assert key not in loaded.explicit


def test_an_estimator_that_is_null_is_refused_unless_another_word_names_one(tmp_path):
    null, file = "algorithm.adv_estimator=null", tmp_path / "sppo.yaml"
    file.write_text("algorithm: {adv_estimator: null}\n")
    for words, files in (([null], []), (["algorithm.adv_estimator=grpo", null], []), ([], [str(file)])):
        with pytest.raises(ConfigError, match=f"^{null}: .*SPPO and SPIN.*such as gae or grpo"):
            load_config(words, files)
    for words in ([null, "algorithm.adv_estimator=grpo"], [null, "~algorithm.adv_estimator"]):
        assert load_config(words, [str(file)]).warnings == ()
    with pytest.raises(ConfigError, match="no estimator is named"):
        load_config(["algorithm.adv_estimator="])


def test_null_takes_an_earlier_value_back():
    assert value("data.train_batch_size", "data.train_batch_size=8", "data.train_batch_size=null") == 1024
    assert value("trainer.logger", "trainer.logger=[console]", "trainer.logger=null") == ["console", "tensorboard"]
    assert value(f"{A}rollout.engine_kwargs", f"{A}rollout.engine_kwargs.vllm.x=1", f"{A}rollout.engine_kwargs=") == {}
    assert value("trainer.max_actor_ckpt_to_keep", "trainer.max_actor_ckpt_to_keep=null") is None


@pytest.mark.parametrize("key", [key for key in all_keys() if key.endswith("_freq")])
def test_false_for_a_frequency_means_never(key):
    assert value(key, f"{key}=False") == -1


OFF = ("null", "False", "0", "[]", "{}", "disabled", "")


@pytest.mark.parametrize("off", OFF)
def test_what_is_turned_off_is_not_refused(off):
    refused = [row for row in rows("refused", "section") if row.condition.operator in ("", "!=")]
    keys = {row.key.replace("*@*", "a@b").replace("*", "x") for row in refused}
    assert load_config([f"{key}={off}" for key in sorted(keys)]).warnings == ()
    # A key of nobody's gets a note, and one that is near a key of ours is a mistake all the same.
    assert "turned off" in load_config([f"{A}actor.no_such_thing={off}"]).warnings[0]
    with pytest.raises(ConfigError, match=r"Did you mean data\.shuffle"):
        load_config([f"data.shufle={off}"])


# Below these stand names that are no keys of verl's: arguments, options of other tools, and one section of many names.
FREE = {
    "distillation.teacher_models.*.key",
    "distillation.teacher_models.*.num_replicas",
    "distillation.teacher_models.*.inference.*",
    *("reward.reward_kwargs*", "reward_model.reward_kwargs*", "trainer.v1.sampler.sampler_kwargs*"),
    *("profile.*", "trainer.npu_profile.*", "transfer_queue.*", "*.fsdp_config.turbo_config.*"),
    *(f"{A}rollout.multi_turn.*continuous_token*", "trainer.dump_high_diff_*", "*.optim.override_optimizer_config*"),
    *("global_profiler.global_tool_config*", "*.profiler.tool_config*", f"{A}rollout.checkpoint_engine.engine_kwargs*"),
    *(f"{section}.engine_kwargs*" for section in ("reward_model.inference", "reward_model.rollout")),
    f"{A}ref.model.override_config*",
}


def concrete(pattern: str) -> str:
    """A key that a row fits."""
    return ("critic" + pattern[1:] if pattern.startswith("*.") else pattern).replace("*", "x").rstrip(".")


def test_rows_lead_to_keys_that_exist():
    targets = [*aliases().values(), *classes().values(), *(row.key for row in rows("value", "elsewhere"))]
    for key in targets:
        assert key.rstrip(".") in {*all_keys(), *sections()} or free_form_parent(key), key
    for old in (*aliases(), *(row.key for row in rows("translated", "path", "name"))):
        assert old.rstrip(".") not in all_keys(), f"{old} is a key of ours"
    for row in rows("turns on"):
        assert {f"{A}actor.{row.key.split('.')[1]}.{name}" for name in row.to.split()} <= set(all_keys())


def test_sentences_of_rows_name_keys_that_exist():
    named = re.compile(r"(?:--help )?(?<![\w{}.])(?:[a-z]\w*\.)+\w+(?==|\b)")
    key_names = [*all_keys(), *sections(), *aliases(), *(row.key for row in rows("no effect", "refused"))]
    for why in {row.note for row in rows("no effect", "refused", "section")}:
        for name in named.findall(re.sub(r"\w+\.jsonl?\b", "", why)):
            key = name.removeprefix("--help ")
            assert any(f".{key_name}".endswith(f".{key}") for key_name in key_names), (key, why)


def test_only_arguments_and_options_of_other_tools_may_have_any_name():
    assert {row.key for row in rows("no effect") if "*" in row.key.removeprefix("*.")} == FREE
    for row in rows("no effect"):
        section = concrete(row.key).rpartition(".")[0]
        if section and (ruling := verdict(f"{section}.nobody_s", 1)):
            assert ruling.refused or ruling.row.key in FREE, (row, ruling)


@pytest.mark.parametrize(
    "key",
    [
        "reward_model.rollout.nobody_s", "reward.reward_model.nobody_s", "reward_model.inference.nobody_s",
        f"{A}rollout.checkpoint_engine.nobody_s", "trainer.v1.nobody_s", "trainer.v1.sampler.nobody_s",
        "critic.checkpoint.nobody_s", f"{A}actor.fsdp_config.mixed_precision.nobody_s", f"{A}model.lora.nobody_s",
        f"{A}ref.fsdp_config.nobody_s", f"{A}ref.model.nobody_s", f"{A}rollout.trace.nobody_s",
        f"{A}actor.profiler.nobody_s", "global_profiler.nobody_s", "algorithm.pf_ppo.nobody_s",
        "nobody_s.profiler.enable", "trainer.nccl_timeout", "nobody_s.fsdp_config.seed",
        "algorithm.optim.lr_scheduler", "rewards.reward_kwargs.x",
    ],
)  # fmt: skip
def test_a_name_that_verl_does_not_know_is_refused_in_its_sections_too(key):
    assert problems(f"{key}=1")[0].startswith(f"unknown key '{key}'")


def test_a_key_of_verl_without_an_answer_names_the_releases_that_have_it():
    answer = "verl 0.9.0-0.9.1 has this key, and rltrain does not. Leave it out."
    for key in (f"{A}actor.checkpoint.save_lora_only", "critic.checkpoint.save_lora_only"):
        assert problems(f"{key}=True") == [f"{key}: {answer}"]
        assert notes(f"{key}=False") == [f"{key}: no effect: not known here, and turned off"]
    free_form = "critic.checkpoint.mbridge_config.any_name"
    assert problems(f"{free_form}=1") == [f"{free_form}: {answer.replace('0.9.0', '0.8.0')}"]


def test_arguments_of_the_processor_of_images_are_no_note():
    for word in (".max_pixels=1000", "={max_pixels:1000}", ".use_fast=True"):
        assert "data.max_pixels" in problems(f"+data.mm_processor_kwargs{word}")[0]
    assert notes("data.mm_processor_kwargs={}", "data.mm_processor_kwargs=null") == []


def test_every_row_of_the_tables_is_reached():
    for row in rows("refused", "section", "no effect"):
        operator, values = row.condition.operator, row.condition.values
        wanted = values[0] if operator == "=" else {">": math.inf, "<": -math.inf}.get(operator, "something")
        key = concrete(row.key)
        if row.action == "section" and row.to:
            key = key.removesuffix("x") + row.to
        ruling = verdict(key, wanted if wanted != "null" else None)
        assert (ruling and ruling.row, ruling and ruling.applies) == (row, True)


ANOTHER_EXPERIMENT = [
    (f"{A}rollout.agent.default_agent_loop=tool_agent", "there are no tools"),
    (f"{A}model.mtp.enable=True", "multi-token"),
    (f"{A}hybrid_engine=False", "synchronous"),
    (f"{A}rollout.nnodes=1", "tail=carry_over"),
    ("trainer.v1.trainer_mode=separate_async", "tail=carry_over"),
    ("async_training.staleness_threshold=0.5", "tail=carry_over"),
    ("rollout.n_gpus_per_node=4", "tail=carry_over"),
    ("distillation.distillation_loss.policy_loss_mode=gspo", "vanilla"),
    ("distillation.distillation_loss.clip_ratio_high=0.3", "the clip is the actor's"),
    ("distillation.distillation_loss.kd_temperature=2.0", "rollout.temperature"),
    ("distillation.teacher_models.mathematics.model_path=m", "one teacher"),
    ("model_engine=veomni", "FSDP2"),
    (f"{A}actor.strategy=megatron", "FSDP2"),
    (f"{A}ref.router_replay.mode=R2", "own router"),
    (f"{A}actor.fsdp_config.qat.enable=True", "FP8"),
    (f"{A}rollout.skip_rollout=True", "generates its own answers"),
    ("skip.rollout.enable=True", "generates its own answers"),
    (f"{A}actor.optim.optimizer=muon", "AdamW"),
    (f"{A}model.tokenizer_path=/other", "model.path"),
    ("algorithm.use_pf_ppo=True", "PF-PPO"),
]


@pytest.mark.parametrize(("override", "words"), ANOTHER_EXPERIMENT)
def test_what_makes_another_experiment_is_refused(override, words):
    (line,) = problems(override)
    assert line.startswith(f"{override}: ")
    assert words in line
    assert "Did you mean" not in line


@pytest.mark.parametrize(
    "override",
    [
        f"{A}rollout.mode=async", f"{A}rollout.agent.num_workers=4", f"{A}hybrid_engine=True", "trainer.use_v1=True",
        "trainer.v1.trainer_mode=sync", "transfer_queue.enable=True", "global_profiler.tool=npu",
        f"{A}actor.profiler.enable=True", "critic.profiler.all_ranks=True", "model_engine=dp",
        f"{A}actor.fsdp_config.strategy=fsdp", f"{A}ref.fsdp_config.use_torch_compile=True", "critic.fsdp.seed=3",
        f"{A}ref.entropy_checkpointing=True", f"{A}rollout.skip_tokenizer_init=True", f"{A}model.torch_dtype=bf16",
        "distillation.distillation_loss.topk=32", "distillation.nnodes=1", "distillation.teacher_key=data_source",
        "distillation.teacher_models.teacher_model.inference.name=vllm", f"{A}model.mtp.num_speculative_tokens=1",
        "reward_model.rollout.gpu_memory_utilization=0.9", "reward_model.enable_resource_pool=True",
        "reward.reward_model.rollout.name=vllm", f"{A}actor.router_replay.record_file=x", f"{A}model.lora.merge=True",
        f"{A}model.tokenizer_path=m", f"{A}rollout.nnodes=0",
    ],
)  # fmt: skip
def test_what_changes_nothing_is_accepted(override):
    notes(override)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("{alpha:0.5,beta:2}", {"alpha": 0.5, "beta": 2}),
        ("{url:http://x:80/y,q:'a:b,c:d',n:{k:[x:1]}}", {"url": "http://x:80/y", "q": "a:b,c:d", "n": {"k": ["x:1"]}}),
        ('{"a":1, b: 2}', {"a": 1, "b": 2}),
    ],
)
def test_mappings_are_read_as_hydra_reads_them(text, meant):
    assert value("custom_reward_function.reward_kwargs", f"+custom_reward_function.reward_kwargs={text}") == meant
    assert "abc" not in masked_command(["x={a_token:abc,b:http://h}"])


def test_a_mapping_for_a_section_is_taken_key_by_key():
    name = f"{A}rollout.multi_turn.max_parallel_calls"
    assert problems(f"{A}rollout.multi_turn={{enable:True,max_parallel_calls:0}}")[0].startswith(f"{name}=0: ")
    assert value(f"{A}actor.optim.lr", f"{A}actor.optim={{lr:1e-5,weight_decay:0.2}}") == 1e-5


def test_what_the_optimizer_is_given_is_read_or_refused():
    section = "optim.override_optimizer_config"
    for word in (f".{section}.amsgrad=True", f".{section}={{amsgrad:True}}", f".{section}.maximize=1"):
        assert "leave it out" in problems(f"{A}actor{word}")[0]
    assert notes(f"{A}actor.{section}.amsgrad=False", f"{A}actor.{section}.fused=False") == []
    # It wins over optim.*, as in verl, in either order.
    words = [f"{A}actor.{section}.weight_decay=0", f"{A}actor.optim.weight_decay=0.3"]
    for order in (words, words[::-1]):
        assert value(f"{A}actor.optim.weight_decay", *order) == 0
    assert value("critic.optim.betas", f"critic.{section}={{betas:[0.9,0.95]}}") == [0.9, 0.95]


def test_a_section_that_is_left_out_has_its_defaults():
    assert value("algorithm.kl_ctrl.type", "algorithm.kl_ctrl.type=adaptive", "~algorithm.kl_ctrl") == "fixed"
    loaded = load_config(["critic.fsdp.fsdp_size=3", "trainer.v1.trainer_mode=async", "~critic.fsdp", "~trainer.v1"])
    assert (loaded.config.critic.model.fsdp_config.fsdp_size, loaded.explicit, loaded.warnings) == (-1, set(), ())
    kwargs = "custom_reward_function.reward_kwargs"
    assert value(kwargs, f"{kwargs}={{a:1,b:2}}", f"~{kwargs}.a") == {"b": 2}
    assert problems("~algorithm.nobody") == [f"unknown key '~algorithm.nobody': {OF_NO_RELEASE}. See --help algorithm."]


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("critic.use_torch_compile", "critic.model.fsdp_config.use_torch_compile=True"),
        (f"{A}ref.use_torch_compile", f"{A}ref.fsdp_config.use_torch_compile=True"),
        ("critic.megatron.param_offload", "critic.model.fsdp_config.param_offload"),
    ],
)
def test_a_sentence_names_the_section_of_the_same_model(key, place):
    ruling = verdict(key, True)
    assert ruling
    assert place in ruling.why


def test_switches_may_be_typed_as_0_and_1():
    for word in (f"{A}hybrid_engine=0",):
        assert problems(word)[0].startswith(f"{word}: ")
    assert value(f"{A}actor.fsdp_config.param_offload", f"{A}actor.fsdp_config.offload_policy=1") is True
    assert notes(f"{A}model.use_remove_padding=1") == []


@pytest.mark.parametrize(
    ("words", "key", "fix"),
    [
        (["rollout_token_veto_threshold=-1"], "rollout_token_veto_threshold=-1", "1e-4"),
        (["rollout_token_veto_threshold=abc"], "rollout_token_veto_threshold=abc", "1e-4"),
        (["rollout_rs=token", "rollout_rs_threshold=abc"], "rollout_rs_threshold=abc", "0.5_2.0"),
        (["rollout_rs=token", "rollout_rs_threshold=0.9"], "rollout_rs_threshold=0.9", "0.5_2.0"),
        (["rollout_rs=token", "rollout_rs_threshold_lower=x"], "rollout_rs_threshold_lower=x", "0.5"),
    ],
)
def test_bounds_of_old_that_are_none_are_told(words, key, fix):
    (line,) = problems(*(C + word for word in words))
    assert line.startswith(f"{C}{key}: ")
    assert fix in line
    assert "such as 2.0" in problems(f"{A}actor.tis_imp_ratio_cap=abc")[0]


def test_the_attention_of_a_model_is_noted_as_ours():
    for model in (f"{A}model", "critic.model"):
        for word in (".attn_implementation=flash_attention_2", "={attn_implementation:flash_attention_2}"):
            told = notes(f"{model}.override_config{word}", "algorithm.adv_estimator=gae")
            assert any(line.startswith(f"{model}.override_config.attn_implementation: no effect") for line in told)


def test_a_guess_stays_within_its_section():
    for key in ("trainer.nodes", "data.trian_files", f"{A}rollout.temprature"):
        (line,) = problems(f"{key}=1")
        section = key.rpartition(".")[0]
        assert f"Did you mean {section}." in line
    for key, section in (
        (f"{A}rollout.max_steps", f"{A}rollout"),
        ("trainer.database", "trainer"),
        ("critic.epochs", "critic"),
        (f"{A}actor.brand.new", f"{A}actor"),
    ):
        assert problems(f"{key}=1") == [f"unknown key '{key}': {OF_NO_RELEASE}. See --help {section}."]
    assert problems("nobody.knows=1") == [f"unknown key 'nobody.knows': {OF_NO_RELEASE}. See --help."]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("trainer.total_steps", "trainer.total_training_steps"), ("trainer.epochs", "trainer.total_epochs"),
        ("trainer.save_steps", "trainer.save_freq"), ("trainer.n_gpus", "trainer.n_gpus_per_node"),
        ("algorithm.advantage", "algorithm.adv_estimator"), ("data.batch_size", "data.train_batch_size"),
        ("learning_rate", f"{A}actor.optim.lr"), ("num_generations", f"{A}rollout.n"),
        ("beta", f"{A}actor.kl_loss_coef"), ("max_completion_length", "data.max_response_length"),
        ("per_device_train_batch_size", f"{A}actor.ppo_micro_batch_size_per_gpu"),
        ("seed", "data.seed"), ("trainer.seed", "data.seed"),
    ],
)  # fmt: skip
def test_a_name_of_another_trainer_is_told_by_ours(typed, meant):
    assert problems(f"{typed}=1") == [f"unknown key '{typed}'. Did you mean {meant}?"]


def test_a_missing_or_mistyped_start_of_a_name_is_seen():
    assert problems("rollout.temperature=1") == [
        f"unknown key 'rollout.temperature': {OF_NO_RELEASE}. Did you mean {A}rollout.temperature, "
        "reward_model.rollout.temperature?"
    ]
    assert f"{A}rollout.temperature?" in problems("actor_rollout_rf.rollout.temperature=1")[0]
    assert f"{A}actor.optim.lr" in problems(f"{A}actor.lr=1")[0]


def test_a_section_is_refused_in_one_line():
    lines = problems(*(f"async_training.{name}=1" for name in "abcdef"))
    assert len(lines) == 1
    assert lines[0].startswith("async_training.a=1, async_training.b=1, async_training.c=1 and 3 more: ")
    assert len(notes(*(f"{A}actor.profiler.tool_config.{name}=1" for name in "abcdef"))) == 1


def test_megatron_hints_name_the_keys_of_the_same_role():
    for role, sharding in (("actor", "actor.fsdp_config"), ("ref", "ref.fsdp_config")):
        assert problems(f"{A}{role}.megatron.param_offload=True")[0].endswith(f"use {A}{sharding}.param_offload.")
        lines = problems(f"{A}{role}.megatron.context_parallel_size=2")
        assert lines[0].endswith(f"use {A}{role}.ulysses_sequence_parallel_size.")
    assert problems("critic.megatron.param_offload=True")[0].endswith("use critic.model.fsdp_config.param_offload.")
    assert "critic.ulysses" in problems("critic.megatron.tensor_model_parallel_size=4")[0]
    assert "the reference has no optimizer" in problems(f"{A}ref.megatron.optimizer_offload=True")[0]
    # A size of 1 is what happens without the backend.
    assert notes(f"{A}actor.megatron.pipeline_model_parallel_size=1") == []


def test_messages_name_the_key_as_it_was_written():
    assert "reward.reward_model.model_path=" in problems("reward.reward_model.model_path=[1]")[0]
    aliased = problems(f"{A}actor.grad_clip=0", "critic.fsdp.fsdp_size=3", "algorithm.adv_estimator=gae")
    assert f"{A}actor.grad_clip=0.0: it must be over 0. Try 1." in aliased
    assert any(line.startswith("critic.fsdp.fsdp_size=3 does not divide") for line in aliased)
    critic = notes("critic.fsdp.param_offload=True")
    assert "critic.fsdp.param_offload: no effect: there is no critic: algorithm.adv_estimator needs none" in critic


def test_a_value_that_others_follow_is_told_once_by_its_own_name():
    (line,) = problems("algorithm.adv_estimator=gae", f"{A}actor.ppo_mini_batch_size=0")
    assert line.startswith(f"{A}actor.ppo_mini_batch_size=0: ")
    lines = problems("algorithm.adv_estimator=gae", "data.train_batch_size=100", f"{A}actor.ppo_mini_batch_size=32")
    assert len(lines) == 1
    assert "critic" not in lines[0]


def test_our_name_counts_where_both_are_written(tmp_path):
    old, new = f"{A}actor.grad_clip=1.0", f"{A}actor.optim.clip_grad=0.5"
    for words in ([old, new], [new, old]):
        assert value(f"{A}actor.optim.clip_grad", *words) == 0.5
        assert notes(*words) == [f"{A}actor.grad_clip: no effect: {A}actor.optim.clip_grad is set too"]
    saved = tmp_path / "config.yaml"
    saved.write_text("actor_rollout_ref:\n  actor:\n    optim: {clip_grad: 0.5}\n    grad_clip: 1.0\n")
    assert load_config([], [str(saved)]).config.actor_rollout_ref.actor.optim.clip_grad == 0.5
    assert load_config([f"{A}actor.grad_clip=0.2"], [str(saved)]).config.actor_rollout_ref.actor.optim.clip_grad == 0.2
    # A name that a version knows and does not use.
    cosine = [f"{A}actor.optim.lr_scheduler_type=cosine", f"{A}actor.optim.warmup_style=null"]
    assert value(f"{A}actor.optim.lr_scheduler_type", *cosine) == "cosine"


@pytest.mark.parametrize(
    ("words", "rules", "limits"),
    [
        # Bounds once were on pi_trainer / pi_engine, and are on its inverse now.
        (
            ["rollout_rs=geometric", "rollout_rs_threshold=1.25", "rollout_rs_threshold_lower=0.5"],
            "seq_mean_k1", "0.8_2",
        ),
        (["rollout_rs=token", "rollout_rs_threshold=2.0"], "token_k1", "0.5_2"),
        (["rollout_rs=sequence", "rollout_is_threshold=4"], "seq_sum_k1", "0.25_4"),
        (["rollout_rs=sequence"], "seq_sum_k1", "0.5_2"),
        (["rollout_rs=token", "rollout_rs_threshold=0.5_2.0"], "token_k1", "0.5_2"),
        (["rollout_rs=token", "rollout_is_threshold=0.5_5.0"], "token_k1", "0.2_2"),
        # ln(1e-4)^2 / 2
        (["rollout_token_veto_threshold=1e-4"], "seq_max_k2", "42.4152"),
        (["rollout_rs=token", "rollout_token_veto_threshold=1e-4"], "token_k1,seq_max_k2", "0.5_2,42.4152"),
        (["rollout_rs=null", "rollout_rs_threshold_lower=null", "rollout_token_veto_threshold=null"], None, None),
        (
            ["rollout_rs='token_k1,seq_max_k2'", "rollout_rs_threshold='0.6_1.6,2.5'"],
            "token_k1,seq_max_k2", "0.6_1.6,2.5",
        ),
    ],
)  # fmt: skip
def test_rejection_as_it_was_once_written(words, rules, limits):
    loaded = load_config([*BASE, *(C + word for word in words)])
    check(loaded)
    correction = loaded.config.algorithm.rollout_correction
    assert (correction.rollout_rs, correction.rollout_rs_threshold) == (rules, limits)
    changed = rules is not None and "k1" not in words[0]
    assert any("is what rejects here" in note for note in loaded.warnings) == changed


def test_bypass_and_its_loss_as_they_were_once_written():
    once = [f"{C}bypass_old_logprob_for_rollout=true", f"{C}use_pure_rollout_correction=true"]
    correction = value("algorithm.rollout_correction", *once)
    assert (correction.bypass_mode, correction.loss_type) == (True, "reinforce")
    assert value(f"{C}loss_type", f"{C}use_policy_gradient=False") == "ppo_clip"


def test_the_cap_on_importance_weights_is_read():
    correction = value("algorithm.rollout_correction", f"{A}actor.tis_imp_ratio_cap=3")
    assert (correction.rollout_is, correction.importance_bounds()) == ("token", (None, 3.0))
    assert value(f"{C}rollout_is", f"{A}actor.tis_imp_ratio_cap=-1") is None


def test_managers_that_score_one_answer_at_a_time_are_naive():
    for name in ("gdpo", "prime", "remote"):
        assert value("reward_model.reward_manager", f"reward_model.reward_manager={name}") == "naive"
    (line,) = problems("reward.reward_manager.name=limited")
    assert line.startswith("reward.reward_manager.name=limited: use naive: at most reward.num_workers answers")


def test_the_engine_of_turns_of_older_versions_is_sglang():
    written = f"{A}rollout.name=sglang_async"
    assert value(f"{A}rollout.name", written) == "sglang"
    assert any(note.startswith(f"{written} is {A}rollout.name=sglang here: every engine") for note in notes(written))


def test_a_reward_model_has_no_server_that_a_function_could_ask(tmp_path):
    served = [
        "reward_model.enable=True", "reward.reward_model.model_path=judge", "reward_model.rollout.dtype=bfloat16",
        "reward_model.use_reward_loop=True", "reward_model.num_workers=4",
    ]  # fmt: skip
    loaded = load_config([*BASE, *served])
    assert (loaded.config.reward_model.model.path, loaded.config.reward.num_workers) == ("judge", 4)
    assert any("not behind a server" in note for note in look_over(loaded))
    lines = problems(*served, f"custom_reward_function.path={tmp_path}/f.py")
    assert any(line.startswith("reward_model.rollout.dtype=bfloat16: a generative reward model") for line in lines)


def test_a_generative_reward_model_has_the_names_of_verl():
    words = [
        "reward.reward_model.enable=True", "reward.reward_model.model_path=judge", "reward_model.model.type=generative",
        "reward.reward_model.rollout.name=hf", "reward_model.rollout.temperature=0.5",
        "reward.reward_model.rollout.prompt_length=64", "reward.reward_model.rollout.response_length=32",
    ]  # fmt: skip
    model = load_config([*BASE, *words]).config.reward_model
    assert (model.judges, model.classifies, model.model.path) == (True, False, "judge")
    assert (model.rollout.temperature, model.rollout.prompt_length, model.rollout.response_length) == (0.5, 64, 32)
    check(load_config([*BASE, *words]))
    (line,) = problems(*words, "reward.reward_model.rollout.name=vllm")
    assert line.startswith("reward.reward_model.rollout.name=vllm: the judge's engine lives beside the policy's")


@pytest.mark.parametrize(
    ("words", "weights", "rejection"),
    [
        (["=True", "_threshold=2.0", "_level=token", "_mode=truncate"], ("token", "2"), (None, None)),
        (["=True", "_threshold=3", "_level=sequence"], ("sequence", "3"), (None, None)),
        # Weights are whole within the bounds, which were on pi_trainer / pi_engine, and what lies outside is rejected.
        (["=True", "_threshold=2", "_mode=mask"], ("token", "2"), ("token_k1", "0.5_2")),
        (
            ["=False", "_threshold=2", "_mode=mask", "_level=geometric", "_threshold_lower=0.25"],
            (None, "2.0"), ("seq_mean_k1", "0.5_4"),
        ),
        # ln(1e-4)^2 / 2
        (["=True", "_threshold=2", "_veto_threshold=1e-4"], ("token", "2"), ("seq_max_k2", "42.4152")),
        (["=False", "_threshold=2.0"], (None, "2.0"), (None, None)),
        (["=True", "_threshold=null"], (None, "2.0"), (None, None)),
    ],
)  # fmt: skip
def test_weights_as_verl_0_6_wrote_them(words, weights, rejection):
    loaded = load_config([*BASE, *(f"algorithm.rollout_is{word}" for word in words)])
    check(loaded)
    correction = loaded.config.algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_is_threshold) == weights
    assert (correction.rollout_rs, correction.rollout_rs_threshold) == rejection
    assert bool(loaded.warnings) == (words != ["=False", "_threshold=2.0"])


def test_weights_of_verl_0_6_that_are_not_here_are_refused():
    base = ["algorithm.rollout_is=True", "algorithm.rollout_is_threshold=2"]
    assert "weights per token or sequence" in problems(*base, "algorithm.rollout_is_level=geometric")[0]
    assert problems(*base, "algorithm.rollout_is_mode=clamp") == [
        "algorithm.rollout_is_mode=clamp: use one of truncate, mask."
    ]


def test_keys_of_agents_are_noted_where_verl_knows_them_and_refused_where_not():
    for name in ("agent.num_workers=4", "multi_turn.max_assistant_turns=5", "multi_turn.format=glm"):
        assert any(
            line.startswith(f"{A}rollout.{name.partition('=')[0]}: no effect") for line in notes(f"{A}rollout.{name}")
        )
    for name in ("activate_agent=True", "max_turns=5", "tool_name_key=env_name"):
        for section in ("agent", "multi_turn") if "max_turns" not in name else ("agent",):
            (line,) = problems(f"{A}rollout.{section}.{name}")
            assert line.startswith(f"{A}rollout.{section}.{name}: no version of verl has this key")
    for name in ("agent.agent_loop_manager_class=x", "multi_turn.interaction_config_path=x", "chat_scheduler=x"):
        assert problems(f"{A}rollout.{name}")[0].startswith(f"{A}rollout.{name}: ")
    assert notes(f"{A}rollout.multi_turn.enable=False", f"{A}rollout.agent.default_agent_loop=single_turn_agent") == []


def test_tools_that_prompts_show_are_those_that_may_be_called():
    for name in ("tool_config_path", "function_tool_path"):
        (line,) = problems(f"data.{name}=a")
        assert f"use actor_rollout_ref.rollout.multi_turn.{name}" in line
        assert problems(f"data.{name}=a", f"{A}rollout.multi_turn.{name}=b")
        load_config([*BASE, f"data.{name}=a", f"{A}rollout.multi_turn.{name}=a"])


def test_a_limit_of_answers_to_the_policy_that_is_never_reached_says_nothing():
    both = [f"{A}rollout.multi_turn.max_{who}_turns=5" for who in ("user", "assistant")]
    load_config([*BASE, f"{A}rollout.multi_turn.function_tool_path=t.py", *both])
    assert "at most one turn more" in problems(both[0])[0]
    assert "at most one turn more" in problems(both[0], f"{A}rollout.multi_turn.max_assistant_turns=6")[0]


@pytest.mark.parametrize(
    ("key", "recipe"),
    [
        ("algorithm.sppo_eta=1.0", "SPPO"),
        (f"{A}actor.sppo_eta=1.0", "SPPO"),
        ("algorithm.tb_coef=15", "FlowRL"),
        ("data.filter_accuracy=True", "PRIME"),
        ("reward_model.model.beta_train=0.05", "PRIME"),
        ("reward_model.prime_granularity=token", "PRIME"),
        (f"{A}actor.dpo_beta=0.1", "SPIN"),
        ("trainer.ref_update_freq=1", "SPIN"),
        ("trainer.spo.enable=True", "SPO"),
        ("reward_model.elliptical.lamb=0.01", "representation-based exploration"),
        (f"{A}teacher.server_ip=localhost", "GKD"),
        (f"{A}actor.policy_loss.dmpo_beta=0.1", "DMPO"),
    ],
)
def test_a_key_of_a_recipe_s_own_trainer_says_whose_it_is(key, recipe):
    (line,) = problems(key)
    assert line.startswith(f"{key}: this is a key of {recipe}")


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize(
    ("file", "recipe"), [("sppo", "SPPO"), ("spin", "SPIN"), ("prime", "PRIME"), ("flowrl", "FlowRL")]
)
def test_the_file_of_a_recipe_s_own_trainer_says_whose_it_is(file, recipe, there, tmp_path, capsys):
    """SPIN's has no key that PPO has not."""
    if there:
        (tmp_path / f"{file}_trainer.yaml").write_text("data: {train_files: t.parquet}\n")
    words = ["--config-path", str(tmp_path), "--config-name", f"{file}_trainer", f"{A}model.path=m"]
    assert main([*words, "--print-config"]) == 2
    error = capsys.readouterr().err
    assert f"{file}_trainer.yaml is the configuration of verl's recipe {recipe}" in error
    assert "Traceback" not in error


def test_keys_of_verl_s_first_versions_are_read_or_noted():
    for section in (f"{A}actor.fsdp_config", f"{A}ref.fsdp_config", "critic.model.fsdp_config"):
        assert any(
            "gradients live only" in line or "no effect" in line for line in notes(f"{section}.grad_offload=True")
        )
    assert value("trainer.log_val_generations", "trainer.val_generations_to_log_to_wandb=3") == 3
    assert value("trainer.profile_steps", "global_profiler.steps=[1,2]") == [1, 2]
    assert value("trainer.profile_steps", "global_profiler.steps=null") is None
    overlong = ("enable=True", "len=100", "penalty_factor=0.5")
    loaded = load_config([*BASE, *(f"reward.overlong_buffer.{word}" for word in overlong)])
    buffer = loaded.config.reward_model.overlong_buffer
    assert (buffer.enable, buffer.len, buffer.penalty_factor) == (True, 100, 0.5)


def test_a_mini_batch_that_is_not_written_is_no_larger_than_the_batch():
    mini = f"{A}actor.ppo_mini_batch_size"
    loaded = load_config([*BASE, "data.train_batch_size=64"])
    check(loaded)
    assert get(loaded.config, mini) == get(loaded.config, "critic.ppo_mini_batch_size") == 64
    assert f"{mini} is not set and data.train_batch_size=64 is below its default, 256: one mini-batch a step" in (
        loaded.warnings
    )
    assert load_config([*BASE, "data.train_batch_size=512"]).warnings == ()
    # Where it was written, today's verl asserts, and older versions drop nothing: it is the user's to decide.
    assert "Try" in problems("data.train_batch_size=64", f"{mini}=256")[0]
    assert "Try" in problems("data.train_batch_size=300")[0]


def test_a_budget_that_is_not_written_holds_the_longest_where_it_is_prefilled_at_once():
    longest = [f"{A}rollout.name=vllm", "data.max_response_length=9000", f"{A}rollout.enable_chunked_prefill=False"]
    key = f"{A}rollout.max_num_batched_tokens"
    assert value(key, *longest) == 9512
    assert value(key, *longest, f"{A}rollout.max_model_len=9200") == 9200
    assert any(line.startswith(f"{key} is not set: 9512") for line in notes(*longest))
    for words in (longest[:2], [*longest, f"{key}=8192"], [*longest[1:], f"{A}rollout.name=hf"]):
        assert value(key, *words) == 8192


def test_mistakes_of_all_kinds_are_told_together():
    lines = problems(
        "data.sed=1", "data.train_batch_size=many", f"{A}rollout.n=1", "skip.rollout.enable=True",
        "algorithm.adv_estimator=rloo_vectorized",
        f"{A}actor.clip_ratio=-1", "trainer.logger=[nobody]",
    )  # fmt: skip
    for words in ("data.sed", "many", "rollout.n must be", "skip.rollout", "clip_ratio=-1", "'nobody'"):
        assert sum(words in line for line in lines) == 1, words
    # A value that did not fit was not taken, so nothing is said of the default in its place.
    assert not any("1024" in line for line in lines)


def test_sections_of_the_schema_are_no_rows():
    assert not [section for section in sections() if verdict(section, "x")]


def test_colocated_asynchronous_training_is_the_tail_that_is_carried_over():
    mode, correction = "trainer.v1.trainer_mode=colocate_async", "algorithm.rollout_correction."
    loaded = load_config([*BASE, mode, "trainer.v1.colocate_async.num_warmup_batches=2"])
    check(loaded)
    config = loaded.config
    assert config.actor_rollout_ref.rollout.tail == "carry_over"
    assert config.algorithm.rollout_correction.rollout_is == "token"
    said = "\n".join(notes(mode))
    assert f"{mode} is {A}rollout.tail=carry_over here" in said
    assert f"{correction}rollout_is=token: each token is weighed" in said
    # What somebody has written stays.
    own = load_config([*BASE, mode, f"{A}rollout.tail=oversample", f"{correction}bypass_mode=True"]).config
    assert own.actor_rollout_ref.rollout.tail == "oversample"
    assert own.algorithm.rollout_correction.rollout_is is None
    assert "keep one of them" in "\n".join(problems(mode, "algorithm.filter_groups.enable=True")).lower()


def test_keys_of_today_s_verl_are_read_noted_or_refused():
    loaded = load_config(
        [*BASE, f"{A}actor.loss_mode=clip_cov", f"{A}actor.clip_cov_lb=0.5", f"{A}actor.optim.lr_scheduler_name=cosine",
         f"{A}actor.optim.min_lr_factor=0.1", "critic.optim.min_lr_factor=0.2", "trainer.debug=True",
         f"{A}rollout.moe_tensor_parallel_size=4"]
    )  # fmt: skip
    check(loaded)
    actor = loaded.config.actor_rollout_ref.actor
    assert (actor.policy_loss.loss_mode, actor.policy_loss.clip_cov_lb) == ("clip_cov", 0.5)
    assert (actor.optim.lr_scheduler_type, actor.optim.min_lr_ratio) == ("cosine", 0.1)
    assert loaded.config.critic.optim.min_lr_ratio == 0.2
    said = "\n".join(look_over(loaded))
    assert f"{A}rollout.moe_tensor_parallel_size: no effect" in said
    assert "trainer.debug: no effect" in said
    for override, words in {
        f"{A}actor.engine.tp=2": "FSDP2",
        f"{A}actor.model_engine=mlite": "FSDP2",
        f"{A}actor.optim.lr_scheduler.min_lr=1e-7": f"{A}actor.optim.lr_scheduler_type",
        "critic.optim.lr_scheduler.min_lr=1e-7": "critic.optim.lr_scheduler_type",
        "trainer.scheduler=one_step_off": "synchronous",
        "trainer.checkpoint_callback_class=a.B": "trainer.callbacks",
        f"{A}rollout.router_config_path=/r.yaml": "one queue",
        f"{A}actor.policy_loss.gvpo_beta=0.1": "GVPO",
    }.items():
        (line,) = problems(override)
        assert line.startswith(override.split("=")[0])
        assert words in line
