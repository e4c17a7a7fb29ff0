"""Names and values of verl and other trainers: read, noted, or refused with the key as it was written."""

import re
from contextlib import suppress
from fnmatch import fnmatch

import pytest
import yaml

from rltrain.common.errors import ConfigError
from rltrain.config.check import check
from rltrain.config.load import load_config
from rltrain.config.schema.keys import all_keys, get
from rltrain.config.verl.table import rows
from rltrain.main_ppo import main
from tests.config.commands import BASE, A, load, notes, problems, words

OF_NO_RELEASE = "none of verl 0.5.0, 0.6.1, 0.7.0, 0.8.0, 0.9.0, 0.9.1 has this key"
C = "algorithm.rollout_correction."
MTP, LOSS = "model.mtp.", "distillation.distillation_loss."
IS = "algorithm.rollout_is=True algorithm.rollout_is_threshold=2"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        # Another experiment.
        ("rollout.agent.default_agent_loop=tool_agent", "needs tools"),
        (f"{A}hybrid_engine=0", "synchronous"),
        ("model_engine=veomni", "FSDP2"),
        (
            "rollout.multi_turn.max_user_turns=5 rollout.multi_turn.max_assistant_turns=6",
            "follows from the number of policy turns",
        ),
        ("data.tool_config_path=a", f"use {A}rollout.multi_turn.tool_config_path"),
        ("reward_model.elliptical.lamb=0.01", "this is a key of representation-based exploration"),
        # A sentence names the section of the same model.
        ("actor.megatron.param_offload=True", f"use {A}actor.fsdp_config.param_offload."),
        ("critic.megatron.param_offload=True", "use critic.model.fsdp_config.param_offload."),
        ("ref.megatron.context_parallel_size=2", f"use {A}ref.ulysses_sequence_parallel_size."),
        ("critic.optim.lr_scheduler.min_lr=1e-7", "critic.optim.lr_scheduler_type"),
        ("actor.optim.override_optimizer_config={amsgrad:True}", "leave it out"),
        ("actor.tensor_parallel_size=2", f"training has it as {A}actor.fsdp_config.tensor_parallel_size"),
        ("critic.model.tensor_model_parallel_size=2", f"engines as {A}rollout.tensor_model_parallel_size"),
        # Trained weights are stored in float32; sizes of an engine that is not used here.
        ("actor.fsdp_config.model_dtype=fp16", "trained weights are kept in float32"),
        ("algorithm.adv_estimator=gae critic.fsdp.model_dtype=float16", "trained weights are kept in float32"),
        # Bounds of old that are none.
        (f"{C}rollout_token_veto_threshold=-1", "1e-4"),
        (f"{C}rollout_rs=token {C}rollout_rs_threshold=0.9", "0.5_2.0"),
        (f"{C}rollout_rs=token {C}rollout_rs_threshold_lower=x", "0.5"),
        ("actor.tis_imp_ratio_cap=abc", "such as 2.0"),
        (f"{IS} algorithm.rollout_is_level=geometric", "weights per token or sequence"),
        (f"{IS} algorithm.rollout_is_mode=clamp", "algorithm.rollout_is_mode=clamp: use one of truncate, mask."),
        # A name that is mistyped, and the message names the key as it was written.
        ("trainer.nodes=1", "Did you mean trainer."),
        ("data.trian_files=1", "Did you mean data."),
        ("algorithm.adv_estimater=grpo", "Did you mean algorithm.adv_estimator"),
        ("actor_rollout_rf.rollout.temperature=1", f"{A}rollout.temperature?"),
        ("actor.lr=1", f"{A}actor.optim.lr"),
        ("rollout.brand.new=1", f"{OF_NO_RELEASE}. See --help {A}rollout."),
        ("nobody.knows=1", f"unknown key 'nobody.knows': {OF_NO_RELEASE}. See --help."),
        ("~algorithm.nobody", f"unknown key '~algorithm.nobody': {OF_NO_RELEASE}. See --help algorithm."),
        ("reward.reward_model.model_path=[1]", "reward.reward_model.model_path="),
        ("critic.fsdp.fsdp_size=3 algorithm.adv_estimator=gae", "critic.fsdp.fsdp_size=3 does not divide"),
        ("actor.grad_clip=0", f"{A}actor.grad_clip=0.0: it must be over 0. Try 1."),
        ("rollout.multi_turn={enable:True,max_parallel_calls:0}", f"{A}rollout.multi_turn.max_parallel_calls=0: "),
        ("actor.use_rollout_log_probs=True", "bypass_mode=True"),
        ("rollout.skip.enable=True", "every step generates new responses"),
        ("actor.optim.name=muon", "AdamW"),
        ("trainer.project_name=sppo-sglang", "verl's recipe SPPO"),
        ("trainer.experiment_name=verl_FlowRL_7b", "verl's recipe FlowRL"),
        ("custom_reward_function.path=recipe/flowrl/reward.py", "verl's recipe FlowRL"),
        ("reward.reward_manager.name=limited", "use naive: at most reward.num_workers responses"),
    ],
)
def test_verl_s_words_are_refused_with_a_reason(command, message):
    (line,) = [line for line in problems(command) if message in line]
    assert any(re.split(r"[={]", word)[0].lstrip("+") in line for word in words(command))


def typed(row):
    """Return an argument that this row of `keys.tsv` applies to."""
    condition, key = row.condition, re.sub(r"^\*\.", A, row.key)
    key = re.sub(r"\*$", row.to or "x", key) if row.action == "section" else key
    values = {"": "1", "=": condition.values and condition.values[0], "!=": "other", ">": "7"}
    return f"{key.replace('*', 'x')}={values[condition.operator]}"


def sentence_of(row):
    """Return the row's note up to its first place for a key."""
    return row.note.partition("{")[0]


@pytest.mark.few(20)
@pytest.mark.parametrize("row", rows("refused", "other", "section"), ids=lambda row: row.key)
def test_every_key_that_a_row_refuses_is_told_its_reason(row):
    with pytest.raises(ConfigError, match=re.escape(sentence_of(row))):
        check(load_config([*BASE, typed(row)]))


def test_every_reason_why_a_key_has_no_effect_is_told():
    with_notes = [row for row in rows("no effect") if not row.key.endswith("offload_policy")]  # which another row reads
    told = "\n".join(notes(*{row.key: typed(row) for row in with_notes}.values()))
    assert len(with_notes) > 200
    assert {sentence_of(row) for row in with_notes if sentence_of(row) not in told} == set()


@pytest.mark.few(10)
@pytest.mark.parametrize("row", [row for row in rows("renamed") if ".use_p" not in row.key], ids=lambda row: row.key)
def test_a_key_under_another_name_is_the_key(row):
    new = next((key for key in all_keys() if fnmatch(key, row.to)), row.to.replace("*", "num_cpus"))
    old = row.key.replace("*", new.removeprefix(row.to[:-1]))
    for word in ("[1,2]", "{a:1}", "0.125", "3", "True", "bf16", "naive", "cosine"):
        with suppress(ConfigError):
            meant, found = (load_config([*BASE, f"{key}={word}"]) for key in (new, old))
            assert found.config == meant.config
            assert f"{old} is called {new} here" in "\n".join(found.warnings)
            return
    pytest.fail(f"no word is taken for {old}")


def test_a_name_of_another_trainer_is_told_by_ours():
    for meant, name in [(row.key, name) for row in rows("elsewhere") for name in row.to.split()]:
        assert any(meant in line for line in problems(f"{name}=1")), name
    assert problems("beta=1") == [f"unknown key 'beta'. Did you mean {A}actor.kl_loss_coef?"]


def test_a_key_of_verl_without_an_answer_names_the_releases_that_have_it():
    answer = "verl 0.9.0-0.9.1 has this key, and rltrain does not. Leave it out."
    key = "critic.checkpoint.save_lora_only"
    assert problems(f"{key}=True") == [f"{key}: {answer}"]
    assert notes(f"{key}=False") == [f"{key}: no effect: unknown, and turned off"]
    free_form = f"{A}actor.global_batch_info.any_name"
    assert problems(f"{free_form}=1") == [f"{free_form}: {answer.replace('0.9.0', '0.7.0')}"]


def test_a_section_is_refused_in_one_line():
    (line,) = problems(*(f"async_training.{name}=1" for name in "abcdef"))
    assert line.startswith("async_training.a=1, async_training.b=1, async_training.c=1 and 3 more: ")
    assert len(notes(*(f"actor.profiler.tool_config.{name}=1" for name in "abcdef"))) == 1


def test_mistakes_of_all_kinds_are_told_together():
    lines = problems(
        "data.sed=1 data.train_batch_size=many rollout.n=1 skip.rollout.enable=True actor.clip_ratio=-1 "
        "algorithm.adv_estimator=rloo_vectorized trainer.logger=[nobody]"
    )
    for part in ("data.sed", "many", "rollout.n must be", "skip.rollout", "clip_ratio=-1", "'nobody'"):
        assert sum(part in line for line in lines) == 1, part
    # A value that did not fit was not used, so there is no note about the default in its place.
    assert not any("1024" in line for line in lines)
    # A value that other keys follow is reported once, under its own name.
    lines = problems("algorithm.adv_estimator=gae data.train_batch_size=100 actor.ppo_mini_batch_size=32")
    assert len(lines) == 1
    assert "critic" not in lines[0]


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize(("file", "recipe"), [("spin", "SPIN"), ("prime", "PRIME")])
def test_the_file_of_a_recipe_s_own_trainer_says_whose_it_is(file, recipe, there, tmp_path, capsys):
    """SPIN has no key that PPO lacks."""
    if there:
        (tmp_path / f"{file}_trainer.yaml").write_text("data: {train_files: t.parquet}\n")
    typed = ["--config-path", str(tmp_path), "--config-name", f"{file}_trainer", f"{A}model.path=m"]
    assert main([*typed, "--print-config"]) == 2
    error = capsys.readouterr().err
    assert f"{file}_trainer.yaml is the configuration of verl's recipe {recipe}" in error
    assert "Traceback" not in error


# -- read --------------------------------------------------------------------------------------------------------------

RS, MODEL = f"{C}rollout_rs=", "reward.reward_model."
THEIRS = "distillation.teacher_models.teacher_model.model_path=theirs"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("data.train_batch_size=8 data.train_batch_size=null", "data.train_batch_size=1024"),
        ("rollout.engine_kwargs.vllm.x=1 rollout.engine_kwargs=", "rollout.engine_kwargs={}"),
        ("trainer.save_freq=False", "trainer.save_freq=-1"),
        ("trainer.test_freq=False", "trainer.test_freq=-1"),
        ("algorithm.kl_ctrl.type=adaptive ~algorithm.kl_ctrl", "algorithm.kl_ctrl.type=fixed"),
        ("critic.fsdp.fsdp_size=3 ~critic.fsdp", "critic.model.fsdp_config.fsdp_size=-1"),
        ("actor.optim={lr:1e-5,weight_decay:0.2}", "actor.optim.lr=1.0e-05 actor.optim.weight_decay=0.2"),
        ("actor.optim.warmup_style=cosine", "actor.optim.lr_scheduler_type=cosine"),
        ("actor.optim.lr_scheduler_type=cosine actor.optim.warmup_style=null", "actor.optim.lr_scheduler_type=cosine"),
        ("actor.loss_mode=clip_cov actor.clip_cov_lb=0.5", "actor.policy_loss.loss_mode=clip_cov"),
        ("global_profiler.steps=[1,2]", "trainer.profile_steps=[1,2]"),
        ("reward_model.reward_manager=prime", "reward_model.reward_manager=naive"),
        ("rollout.name=sglang_async", "rollout.name=sglang"),
        ("actor.fsdp_config.offload_policy=1", "actor.fsdp_config.param_offload=True"),
        (THEIRS, "distillation.teacher.model.path=theirs"),
        # It wins over optim.*, as in verl, in either order; else our name counts where both are written.
        (
            "actor.optim.override_optimizer_config.weight_decay=0 actor.optim.weight_decay=0.3",
            "actor.optim.weight_decay=0.0",
        ),
        (
            "actor.optim.weight_decay=0.3 actor.optim.override_optimizer_config={weight_decay:0}",
            "actor.optim.weight_decay=0.0",
        ),
        ("actor.grad_clip=1.0 actor.optim.clip_grad=0.5", "actor.optim.clip_grad=0.5"),
        ("actor.optim.clip_grad=0.5 actor.grad_clip=1.0", "actor.optim.clip_grad=0.5"),
        # A reward model.
        (
            f"{MODEL}enable=True {MODEL}model_path=judge reward_model.model.type=generative {MODEL}rollout.name=hf "
            f"reward_model.rollout.temperature=0.5 {MODEL}rollout.prompt_length=64",
            "reward_model.model.path=judge reward_model.rollout.temperature=0.5 reward_model.rollout.prompt_length=64",
        ),
        # Rejection: bounds once were on pi_trainer / pi_engine, and are on its inverse now; ln(1e-4)^2 / 2.
        (
            f"{RS}geometric {C}rollout_rs_threshold=1.25 {C}rollout_rs_threshold_lower=0.5",
            f"{RS}seq_mean_k1 {C}rollout_rs_threshold='0.8_2'",
        ),
        (f"{RS}sequence {C}rollout_is_threshold=4", f"{RS}seq_sum_k1 {C}rollout_rs_threshold='0.25_4'"),
        (f"{RS}token {C}rollout_rs_threshold=0.5_2.0", f"{RS}token_k1 {C}rollout_rs_threshold='0.5_2'"),
        (f"{C}rollout_token_veto_threshold=1e-4", f"{RS}seq_max_k2 {C}rollout_rs_threshold='42.4152'"),
        (
            f"{RS}token {C}rollout_token_veto_threshold=1e-4",
            f"{RS}token_k1,seq_max_k2 {C}rollout_rs_threshold='0.5_2,42.4152'",
        ),
        (f"{RS}null {C}rollout_rs_threshold_lower=null", f"{RS}null {C}rollout_rs_threshold=null"),
        (f"{C}bypass_old_logprob_for_rollout=true", f"{C}bypass_mode=True"),
        (f"{C}use_pure_rollout_correction=true", f"{C}loss_type=reinforce"),
        (f"{C}use_policy_gradient=False", f"{C}loss_type=ppo_clip"),
        # Weights. Masked ones reject everything beyond the bounds.
        ("actor.tis_imp_ratio_cap=3", f"{C}rollout_is=token {C}rollout_is_threshold='3.0'"),
        ("actor.tis_imp_ratio_cap=-1", f"{C}rollout_is=null"),
        (IS, f"{C}rollout_is=token {C}rollout_is_threshold='2'"),
        (f"{IS} algorithm.rollout_is_mode=mask", f"{RS}token_k1 {C}rollout_rs_threshold='0.5_2' {C}rollout_is=token"),
        (f"{IS} algorithm.rollout_is_veto_threshold=1e-4", f"{RS}seq_max_k2 {C}rollout_rs_threshold='42.4152'"),
        (
            "algorithm.rollout_is=False algorithm.rollout_is_threshold=2 algorithm.rollout_is_mode=mask "
            "algorithm.rollout_is_level=geometric algorithm.rollout_is_threshold_lower=0.25",
            f"{C}rollout_is=null {RS}seq_mean_k1 {C}rollout_rs_threshold='0.5_4'",
        ),
        # carry_over replaces colocated asynchronous training; a written tail stays.
        ("trainer.v1.trainer_mode=colocate_async", f"rollout.tail=carry_over {C}rollout_is=token"),
        (
            f"trainer.v1.trainer_mode=colocate_async rollout.tail=oversample {C}bypass_mode=True",
            f"rollout.tail=oversample {C}rollout_is=null",
        ),
        # Sizes that are not set.
        ("data.train_batch_size=64", "actor.ppo_mini_batch_size=64 critic.ppo_mini_batch_size=64"),
        ("rollout.name=vllm data.max_response_length=9000", "rollout.max_num_batched_tokens=8192"),
        (
            "rollout.name=vllm data.max_response_length=9000 rollout.enable_chunked_prefill=False",
            "rollout.max_num_batched_tokens=9512",
        ),
    ],
)
def test_verl_s_words_are_read(command, expected):
    config = load(command).config
    for setting in words(expected):
        key, _, written = setting.partition("=")
        meant = yaml.safe_load(re.sub(r"(?<=\w):(?! )", ": ", written) if written.startswith("{") else written)
        assert get(config, key) == meant, key


def test_where_a_file_and_a_command_have_two_names_of_a_key_the_command_counts(tmp_path):
    saved, key = tmp_path / "config.yaml", f"{A}actor.optim.clip_grad"
    removed = "trainer: {overlap: false}\n"
    saved.write_text(f"{removed}actor_rollout_ref:\n  actor:\n    optim: {{clip_grad: 0.5}}\n    grad_clip: 1.0\n")
    assert get(load_config([], [str(saved)]).config, key) == 0.5
    assert get(load_config([f"{A}actor.grad_clip=0.2"], [str(saved)]).config, key) == 0.2


# -- noted -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "note"),
    [
        ("actor.grad_clip=0.5", f"{A}actor.grad_clip is called {A}actor.optim.clip_grad here"),
        ("actor.grad_clip=1.0 actor.optim.clip_grad=0.5", f"no effect: {A}actor.optim.clip_grad is set too"),
        (
            "critic.fsdp.param_offload=True",
            "critic.fsdp.param_offload: no effect: algorithm.adv_estimator has no critic",
        ),
        ("model.override_config.attn_implementation=flash_attention_2", "attn_implementation: no effect"),
        ("model.override_config={attn_implementation:flash_attention_2}", "attn_implementation: no effect"),
        ("rollout.name=sglang_async", "rollout.name=sglang here: every engine"),
        ("rollout.multi_turn.max_assistant_turns=5", "multi_turn.max_assistant_turns: no effect"),
        ("model.lora.merge=False", "model.lora.merge: no effect"),
        ("actor.grad_clip=0.5", "clips at 1.0"),
        ("actor.fsdp_config.dtype=float16", "mixed_precision.param_dtype is its switch"),
        (f"{C}rollout_is=token", f"none unless {A}rollout.calculate_log_probs=True"),
        ("rollout.multi_turn.format=qwen", "multi_turn.format=hermes here"),
        ("rollout.server.timeout=60", "not over a server"),
        ("+trainer.tensorboard_dir=x", "verl does not read it either"),
        (f"{RS}geometric", "defines the rejection here"),
        ("trainer.v1.trainer_mode=colocate_async", f"is {A}rollout.tail=carry_over here"),
        (
            "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=reward",
            "metric=reward is algorithm.filter_groups.metric=seq_reward here",
        ),
        ("data.train_batch_size=64", "data.train_batch_size=64 is below its default, 256: one mini-batch a step"),
        (
            "rollout.name=vllm data.max_response_length=9000 rollout.enable_chunked_prefill=False",
            "rollout.max_num_batched_tokens is not set: 9512",
        ),
    ],
)
def test_verl_s_words_are_noted(command, note):
    assert any(note in line for line in notes(command))


@pytest.mark.parametrize(
    "command",
    [
        "rollout.mode=async", "rollout.agent.num_workers=4", f"{A}hybrid_engine=True", "trainer.use_v1=True",
        "trainer.v1.trainer_mode=sync", "transfer_queue.enable=True", "global_profiler.tool=npu", "model_engine=dp",
        f"{LOSS}topk=32", "distillation.nnodes=1", "distillation.teacher_models.teacher_model.inference.name=vllm",
        f"{MTP}num_speculative_tokens=1", "reward_model.rollout.gpu_memory_utilization=0.9", "model.lora.merge=True",
        "reward_model.enable_resource_pool=True", "reward.reward_model.rollout.name=vllm", "model.tokenizer_path=m",
        "actor.router_replay.record_file=x", "rollout.nnodes=0", "rollout.dtype=float16",
        "critic.model.fsdp_config.model_dtype=float16", "data.use_shm=True", "global_profiler.relocate_results=True",
        "actor.profiler.finish_hook_cmd=x", "rollout.sglang_rollout_mode=server", "model.lora.fully_sharded_loras=True",
        "trainer.worker_nsight_options.capture-range=x", "actor.checkpoint.mbridge_config.x=1",
        "trainer.v1.separate_async.hybrid_rollout.enable_switch=True", "data.continuous_token.enable=True",
        "trainer.project_name=flowrlike",
    ],
)  # fmt: skip
def test_what_changes_nothing_is_accepted(command):
    notes(command)


@pytest.mark.parametrize(
    "command",
    [
        "actor.megatron.pipeline_model_parallel_size=1", "model.use_remove_padding=1", "data.mm_processor_kwargs=null",
        "actor.optim.override_optimizer_config.amsgrad=False", "rollout.multi_turn.enable=False",
        "rollout.agent.default_agent_loop=single_turn_agent", "trainer.overlap=False", "rollout.data_parallel_size=1",
        "model.lora_rank=8 model.lora.merge=False", "data.train_batch_size=512", "actor.optim.clip_grad=1",
        "rollout.skip={enable:False,dump_dir:d,max_dump_step:1,action:cache}", "data.gen_batch_size=1024",
        "data.tool_config_path=a rollout.multi_turn.tool_config_path=a",
        "rollout.multi_turn.function_tool_path=t.py rollout.multi_turn.max_user_turns=5 "
        "rollout.multi_turn.max_assistant_turns=5",
    ],
)  # fmt: skip
def test_what_is_as_verl_has_it_is_not_noted(command):
    assert notes(command) == []
