"""The configuration: spellings, types, secrets, and rules between keys."""

import subprocess
import sys
from pathlib import Path

import pytest

from rltrain.common.errors import ConfigError
from rltrain.common.secrets import is_secret
from rltrain.config.budgets import PassBudget, budgets
from rltrain.config.check import missing_files
from rltrain.config.load import load_config, masked_command, to_yaml
from rltrain.config.schema.engines import ENGINES
from rltrain.config.schema.keys import all_keys, get
from rltrain.trainer.plan import make_plan
from tests.config.commands import BASE, A, load, notes, problems, value, words

KEYS_FILE = Path(__file__).parent / "keys.txt"


def test_the_list_of_keys_is_frozen():
    """After a deliberate change regenerate the list with python -m tests.config.test_config."""
    assert sorted(all_keys()) == KEYS_FILE.read_text().split()
    assert [key.name for key in all_keys().values() if len(key.help) < 5] == []


def test_values_are_typed_and_later_wins(tmp_path):
    base, mine = tmp_path / "base.yaml", tmp_path / "mine.yaml"
    base.write_text("data:\n  seed: 5\n  train_batch_size: 32\ntrainer:\n  logger: console\n")
    mine.write_text("data.seed: 6\n")
    loaded = load_config(
        ["data.train_batch_size=64", "data.train_batch_size=16", "+data.shuffle=False"], [str(base), str(mine)]
    )
    assert (loaded.config.data.seed, loaded.config.data.train_batch_size, loaded.config.data.shuffle) == (6, 16, False)
    assert loaded.config.trainer.logger == ["console"]
    assert {"data.seed", "data.train_batch_size", "data.shuffle", "trainer.logger"} <= loaded.explicit


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ('trainer.logger=["console","tensorboard"]', ["console", "tensorboard"]),
        ("trainer.logger=console", ["console"]),
        ("data.train_files=['a.parquet','b.parquet']", ["a.parquet", "b.parquet"]),
        ("actor.optim.lr=1e-6", 1e-6),
        ("trainer.total_training_steps=null", None),
        ("data.shuffle=false", False),
        ("++data.truncation=left", "left"),
        ("+model.override_config={rope_theta:5.0}", {"rope_theta": 5.0}),
        ("custom_reward_function.reward_kwargs={sandbox_fusion_url:u}", {"sandbox_fusion_url": "u"}),
        (
            "+custom_reward_function.reward_kwargs={url:http://x:80/y,q:'a:b,c:d',n:{k:[x:1]}}",
            {"url": "http://x:80/y", "q": "a:b,c:d", "n": {"k": ["x:1"]}},
        ),
        ("reward.weights={acc:1,format:0.5}", {"acc": 1, "format": 0.5}),
    ],
)
def test_yaml_flow_values(override, expected):
    found = value(override.partition("=")[0].lstrip("+"), override)
    assert found == expected
    assert type(found) is type(expected)


def test_a_value_may_follow_another_key():
    follows = "trainer.experiment_name=a trainer.default_local_dir=runs/${trainer.experiment_name}"
    assert value("trainer.default_local_dir", follows) == "runs/a"
    key = "rollout.log_prob_max_token_len_per_gpu"
    assert value(key, f"{key}=${{data.max_prompt_length}}") == 512
    assert "trainer.nmae" in problems("trainer.default_local_dir=runs/${trainer.nmae}")[0]


def test_a_section_may_be_given_as_a_mapping():
    loaded = load("actor.optim={lr:1e-5,weight_decay:0.1} reward.custom_reward_function={path:r.py}")
    optim = loaded.config.actor_rollout_ref.actor.optim
    assert (optim.lr, optim.weight_decay, optim.clip_grad) == (1e-5, 0.1, 1.0)
    assert loaded.config.custom_reward_function.path == "r.py"
    assert f"{A}actor.optim.lr" in loaded.explicit
    assert problems("actor.optim={lrr:1e-5}")[0].startswith(f"unknown key '{A}actor.optim.lrr'")
    assert "'data' is a section" in problems("data=gsm8k")[0]


def test_the_rollout_and_reference_budgets_follow_the_actor():
    config = load("actor.ppo_max_token_len_per_gpu=9999 actor.use_dynamic_bsz=True").config
    assert budgets(config)["ref"] == budgets(config)["old_log_prob"] == PassBudget(9999, None)
    assert config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz


def test_every_bound_and_every_list_of_words_is_kept():
    rules = {name: key.rules for name, key in all_keys().items()}
    wrong = [f"{name}=-7" for name, rule in rules.items() if rule.least is not None or rule.over is not None]
    wrong += [f"{name}=nobody_s" for name, rule in rules.items() if rule.among]
    told = problems(*wrong)
    assert len(wrong) > 100
    assert [word for word in wrong if not any(line.startswith(f"{word.split('=')[0]}=") for line in told)] == []


TOOLS = "rollout.multi_turn.function_tool_path=tools.py"
AGENT = "rollout.agent.default_agent_loop"
KWARGS = "data.apply_chat_template_kwargs"
ENGINE = "rollout.name=vllm +rollout.engine_kwargs.vllm"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("data.seed=1.5", "data.seed=1.5: expected int, got float"),
        ("trainer.logger=[", "not valid YAML"),
        ("oops", "'oops' is not of the form"),
        ("data.train_batch_size=100 actor.ppo_mini_batch_size=32", f"Try {A}actor.ppo_mini_batch_size=25"),
        ("rollout.n=1 algorithm.adv_estimator=grpo_passk", f"Try {A}rollout.n=8"),
        ("rollout.do_sample=False", "makes all responses to a prompt equal"),
        ("data.max_response_length=20000", "Set it to at least 20512"),
        ("actor.use_dynamic_bsz=False", "needs actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        ("trainer.resume_mode=resume_path", "needs trainer.resume_from_path"),
        ("model.path=''", "model.path is not set"),
        ("data.train_files=null", "data.train_files is not set"),
        ("actor.ulysses_sequence_parallel_size=3", "does not divide the 8 devices"),
        (
            "actor.ulysses_sequence_parallel_size=2 data.max_response_length=40000",
            "= 40512 tokens over 2 devices. Set it to at least 20256",
        ),
        (
            "actor.ulysses_sequence_parallel_size=2 ref.ulysses_sequence_parallel_size=4 actor.use_kl_loss=True "
            "actor.kl_loss_type=full",
            "Use actor_rollout_ref.ref.ulysses_sequence_parallel_size=2, as the actor",
        ),
        (
            "actor.ulysses_sequence_parallel_size=2 actor.ring_attention_size=8",
            "actor.ulysses_sequence_parallel_size x ring_attention_size=16 does not divide the 8 devices",
        ),
        (
            "actor.ring_attention_size=2 data.max_response_length=40000",
            "= 40512 tokens over 2 devices. Set it to at least 20256",
        ),
        (
            "actor.ring_attention_size=2 ref.ring_attention_size=1 actor.use_kl_loss=True actor.kl_loss_type=full",
            "Use actor_rollout_ref.ref.ring_attention_size=2, as the actor",
        ),
        ("actor.ring_attention_size=0", "actor.ring_attention_size=0: it must be"),
        ("actor.fsdp_config.fsdp_size=3", "fsdp_size=3 does not divide the 8 devices"),
        ("rollout.log_prob_use_dynamic_bsz=False", f"needs {A}rollout.log_prob_micro_batch_size_per_gpu"),
        ("reward_model.micro_batch_size=0", "at least 1, or reward_model.micro_batch_size_per_gpu."),
        ("actor.optim.betas=[2,3]", "betas=[2.0, 3.0]: give two numbers"),
        (f"+{KWARGS}={{truncation:true,max_length:9}}", "kwargs.truncation=True: see data.trunc"),
        (f"+{KWARGS}.add_generation_prompt=False", "it is always true, because the model"),
        ("reward_model.enable=True", "needs reward_model.model.path"),
        ("reward_model.enable=True reward_model.rule_weight=0 reward_model.weight=0", "means no reward"),
        (
            "reward_model.enable=True reward_model.rule_weight=0 data.sampler.name=solve_rate",
            "solve_rate needs a scorer",
        ),
        ("reward_model.reward_manager=batch", "batch needs custom_reward_function.path"),
        ("reward.weights.acc=much", "reward.weights.acc=much: give a number"),
        ("algorithm.adv_estimator=gdpo", "needs algorithm.gdpo_reward_keys"),
        (
            "algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=[acc] algorithm.use_kl_in_reward=True",
            "algorithm.use_kl_in_reward would be ignored",
        ),
        ("algorithm.filter_groups.enable=True data.gen_batch_size=1", "Set gen_batch_size to at least 11"),
        ("algorithm.rollout_correction.rollout_rs=token_k1", "is not a number or low_high"),
        (
            "algorithm.adv_estimator=optimal_token_baseline algorithm.rollout_correction.bypass_mode=True",
            "needs the old policy's distribution at every token",
        ),
        ("algorithm.adv_estimator=gae trainer.critic_warmup=9 trainer.total_training_steps=5", "never be updated"),
        ("algorithm.adv_estimator=gae critic.use_dynamic_bsz=False", "critic.use_dynamic_bsz=False needs"),
        ("trainer.val_only=True", "needs data.val_files"),
        ("critic.model.lora_rank=8 critic.model.target_modules=[]", "critic.model.target_modules=[]: give a name"),
        ("model.lora_rank=8 model.exclude_modules=[3]", "model.exclude_modules=[3]: give a name"),
        ("model.lora_rank=8 model.lora.merge=False rollout.name=sglang", "rollout.name=hf or rollout.name=vllm"),
        ("model.fp32_head=True rollout.name=sglang", "rollout.name=sglang computes its head in half precision"),
        ("model.enable_gradient_checkpointing=some", "gradient_checkpointing=some: use True, False, selective, or"),
        ("model.enable_gradient_checkpointing=-1", "gradient_checkpointing=-1: use True, False, selective, or"),
        (
            "rollout.name=hf rollout.tensor_model_parallel_size=2",
            "an engine of rollout.name=hf runs on one device. Use 1, or rollout.name=vllm or rollout.name=sglang",
        ),
        (
            "rollout.name=sglang rollout.tensor_model_parallel_size=16 trainer.nnodes=2",
            "is more than trainer.n_gpus_per_node=8, but an engine of rollout.name=sglang cannot span nodes",
        ),
        ("rollout.tail=exact", "rollout.name=hf does not support. Use rollout.name=vllm"),
        ("rollout.name=vllm rollout.temperature=2.5", "vllm takes 0.01 to 2"),
        ("+rollout.engine_kwargs.hf.x=1", "engine_kwargs.vllm or engine_kwargs.sglang"),
        (f"{TOOLS} {AGENT}=tool_agent rollout.multi_turn.enable=False", "needs tools. Set"),
        (f"{AGENT}=my_agent", "unknown agent. Use single_turn_agent, tool_agent"),
        (f"{TOOLS} reward_model.enable=True reward_model.model.path=m", "it would also score the text of tools"),
        (f"{TOOLS} rollout.multi_turn.max_user_turns=2", "use multi_turn.max_assistant_turns"),
        # Arguments that would make the engine differ from the trainer.
        (f"{ENGINE}.quantization=fp8", "vllm.quantization=fp8: the engine loads the trainer's weights"),
        (f"{ENGINE}.mm_device_do_normalize=True", "images are processed by the trainer"),
        (f"{ENGINE}.limit_mm_per_prompt={{image:5,video:0}}", f"are {A}rollout.limit_images=N"),
        (
            f"{ENGINE}.mm_processor_kwargs.max_pixels=200704",
            "limited by data.min_pixels and data.max_pixels",
        ),
        (f"{ENGINE}.language_model_only=True", "does not load the vision tower"),
        ("rollout.quantization=fp8", "rollout.quantization=fp8: the engine loads"),
        # Code that cannot be used, with the alternative.
        ("data.my_key=3", "unknown key 'data.my_key'"),
        ("data.custom_cls=a.py:B data.suffle=False", "Did you mean data.shuffle?"),
        ("data.custom_cls.path=a.py", "name the class in it with data.custom_cls.name"),
        ("data.custom_cls=a.py", "give the file and the name in it, FILE.py:NAME"),
        ("data.datagen.path=a.py", "data.datagen.path=a.py: rows are read once, before the first step"),
        ("reward.reward_manager.source=importlib", "reads verl's batch of tensors"),
        ("reward_manager.source=importlib", "custom_reward_function.path and name"),
        ("reward_model.reward_loop_source=importlib", "reward_model.reward_manager=batch"),
    ],
)
def test_rules_between_keys(command, message):
    assert message in "\n".join(problems(command))


@pytest.mark.parametrize(
    "command",
    [
        "actor.ppo_max_token_len_per_gpu=16", "ref.log_prob_max_token_len_per_gpu=16", "actor.use_dynamic_bsz=False",
        "algorithm.adv_estimator=gae critic.ppo_max_token_len_per_gpu=16", "ref.ulysses_sequence_parallel_size=3",
        "critic.model.fsdp_config.fsdp_size=3 critic.ulysses_sequence_parallel_size=3", "trainer.total_epochs=0",
        "trainer.total_training_steps=0", "rollout.tail=carry_over", "rollout.do_sample=False",
        "rollout.n=1 algorithm.adv_estimator=grpo_passk", "actor.ppo_mini_batch_size=3", "algorithm.adv_estimator=gdpo",
        "actor.fsdp_config.model_dtype=float16", "algorithm.rollout_correction.rollout_rs=token_k1",
        "reward_model.enable=True reward_model.rule_weight=0 reward_model.model.path=m data.sampler.name=solve_rate",
        "algorithm.adv_estimator=gae trainer.critic_warmup=9 trainer.total_training_steps=5",
    ],
)  # fmt: skip
def test_what_a_step_alone_needs_is_no_rule_of_an_evaluation(command):
    assert problems(command)
    make_plan(load(command, "trainer.val_only=True data.val_files=v.parquet").config)


@pytest.mark.parametrize(
    ("section", "role", "names"),
    [
        ("actor.fsdp_config", "actor.fsdp_config", ("param_offload", "optimizer_offload")),
        ("ref.fsdp_config", "ref.fsdp_config", ("param_offload",)),
        ("critic.fsdp", "critic.model.fsdp_config", ("param_offload", "optimizer_offload")),
    ],
)
def test_an_offload_policy_turns_both_offloads_on(section, role, names):
    (section,), (role,) = words(section), words(role)
    offloads = [key for key in all_keys() if key.endswith("_offload")]
    for more in ([], [f"{role}.param_offload=False"]):
        loaded = load_config([f"{section}.offload_policy=True", *more])
        assert {key for key in offloads if get(loaded.config, key)} == {f"{role}.{name}" for name in names}
        assert loaded.warnings == (f"{section}.offload_policy turns on {' and '.join(names)} here",)
    loaded = load_config([f"{section}.offload_policy=False"])
    assert not [key for key in offloads if get(loaded.config, key)]
    assert not loaded.warnings


@pytest.mark.parametrize(
    ("command", "size", "ranks"),
    [
        ("actor.ppo_micro_batch_size=16 actor.ulysses_sequence_parallel_size=2", 4, 4),
        ("rollout.log_prob_micro_batch_size=64 trainer.nnodes=2", 4, 16),
        ("ref.log_prob_micro_batch_size=3 ref.ulysses_sequence_parallel_size=4", 1, 2),
        ("critic.forward_micro_batch_size=4", 1, 8),
        ("reward_model.micro_batch_size=8 actor.ulysses_sequence_parallel_size=2", 1, 8),
    ],
)
def test_a_size_over_all_ranks_is_divided_by_them(command, size, ranks):
    typed = ["trainer.n_gpus_per_node=8", *words(command)]
    loaded = load_config(typed)
    key, _, total = typed[1].partition("=")
    assert get(loaded.config, f"{key}_per_gpu") == size
    rounded = "" if size * ranks == int(total) else " (rounded, as in verl)"
    assert f"{key}={total} over {ranks} ranks is {key}_per_gpu={size} here{rounded}" in loaded.warnings
    for order in ([*typed, f"{key}_per_gpu=5"], [f"{key}_per_gpu=5", *typed]):
        loaded = load_config(order)
        assert get(loaded.config, f"{key}_per_gpu") == 5
        assert f"{key}: no effect: {key}_per_gpu is set too" in loaded.warnings
    assert load_config([f"{key}=8", f"{key}=null"]).explicit == set()


def test_a_missing_file_is_answered_with_the_nearest(tmp_path):
    (tmp_path / "train.parquet").touch()
    (line,) = missing_files(load(f"data.train_files={tmp_path}/trian.parquet").config)
    assert line.startswith(f"data.train_files: {tmp_path}/trian.parquet does not exist.")
    assert f"Did you mean {tmp_path}/train.parquet?" in line


SECRETS = (
    *("api_key", "hf_token", "token", "Password", "openai_key", "private_key", "passphrase", "credential", "bearer"),
    *("github_pat", "sig", "openaiKey", "db_pass", "client_secret", "auth", "dsn", "session_cookie"),
)
PLAIN = (
    "tokenizer=t5",
    "max_tokens=3",
    "key_name=a",
    "keyword=b",
    "monkey=c",
    "pattern=d",
    "signal=e",
    "author=f",
    "pad_token=g",
    "KEY_FILE=h",
)


def test_secrets_are_masked_and_lengths_are_not(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "abc")
    kwargs, header = "custom_reward_function.reward_kwargs", "reward.url_headers.X-Me"
    secrets = [f"{kwargs}.{name}=abc123" for name in SECRETS]
    secrets += [f"{kwargs}.password=99abc", f"{kwargs}.passwd=3141592", f"{kwargs}.api_keys=[abc1,abc2]"]
    secrets += [f"{kwargs}.credentials={{user: abc, pin: 2718281}}", f"{kwargs}.at=https://h.ex/x?a=1&sig=abc&key=abc2"]
    secrets += [f"{kwargs}.database='host=h password=abc123'", f"{kwargs}.header='Bearer abcdefgh'"]
    env_vars = "ray_kwargs.ray_init.runtime_env.env_vars"
    secrets += [f"{env_vars}.AZURE_OPENAI_KEY=abc123", f"{env_vars}.DATABASE=postgres://me:abc123@h/x"]
    secrets += [f"{kwargs}.secrets.x=abc123", f"{kwargs}.api_key.prod=abc123", f"{kwargs}.judge_key=abc123"]
    secrets += [f"{env_vars}.OTHER=postgres://me:p@abc123@h/x", f"{env_vars}.THIRD=postgres://me:p/abc123@h/x"]
    secrets += [
        f"{env_vars}.HF_TOKEN_PROD=abc123",
        f"{kwargs}.hub_token_2=abc123",
        f"{kwargs}.lone='Token abc12345678'",
    ]
    secrets += [f"{kwargs}.headers=['X-Api-Key: abc 12','Authorization: Token abc123']", f"{kwargs}.me=me:abc123@h/x"]
    secrets += [f"{kwargs}.headers2=[{{name: X-Api-Key, value: abc123}}]", f"{kwargs}.headers3=[[X-Api-Key, abc123]]"]
    secrets += [f'{kwargs}.curl=\'-H "Authorization: Basic abc123" -d token="abc 12"\'']
    secrets += [f"{kwargs}.headers4=[{{Name: HF_TOKEN, Value: abc123}},[Authorization, abc123]]"]
    secrets += [f"{kwargs}.run='x --api-key abc123 y'", f"{kwargs}.plain_text=hf_abcdefghijklmnopqrstuv"]
    headers = ["reward.url_headers.Authorization='Bearer ${oc.env:JUDGE_TOKEN}'", f"{header}=me"]
    config = load_config([*BASE, *secrets, *headers, *(f"{kwargs}.{word}" for word in PLAIN)]).config
    assert config.reward.url_headers == {"Authorization": "Bearer abc", "X-Me": "me"}
    text = to_yaml(config)
    command = masked_command([*secrets, *headers, "--api-key", "abc", "next"])
    for secret in ("abc", "3141592", "2718281", ": me\n", "=me"):
        assert secret not in text + command
    assert masked_command(PLAIN) == " ".join(PLAIN)
    assert command.endswith(" --api-key '***' next")
    for plain in (
        *(word.replace("=", ": ") for word in PLAIN),
        "ppo_max_token_len_per_gpu: 16384",
        "default_local_dir: checkpoints/rltrain/run",
    ):
        assert plain in text
    assert "abc" not in masked_command(["python", f"{header}=abc", "x={a_token:abc,b:http://h}"])


def test_a_typed_secret_is_answered_with_the_variable_to_use():
    key = "custom_reward_function.reward_kwargs.openai_key"
    (warning,) = [line for line in load_config([*BASE, f"{key}=abc123"]).warnings if "secret" in line]
    assert f"{key}='${{oc.env:OPENAI_KEY}}'" in warning
    assert "abc123" not in warning
    assert not any(is_secret(key, 1) for key in all_keys())


def test_a_printed_config_can_be_read_back(tmp_path):
    config = load("model.override_config.rope_theta=5.0 rollout.dtype=bfloat16 rollout.seed=42").config
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert load_config([], [str(file)]).config == config


def test_help_needs_neither_torch_nor_ray_nor_omegaconf():
    code = (
        "import sys; from rltrain.main_ppo import main; main(['--help']); "
        "heavy = {'torch', 'ray', 'transformers', 'omegaconf'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert "actor_rollout_ref.rollout" in process.stdout


def test_path_and_name_of_a_class_are_one_key(tmp_path):
    loaded = load_config(["data.custom_cls.path=pkg://my.data", "data.custom_cls.name=Mine", "+data.my.key=3"])
    assert (loaded.config.data.custom_cls, loaded.config.data.own_keys) == ("pkg://my.data:Mine", {"my": {"key": 3}})
    loaded = load_config(["data.sampler.class_path=a.py", "data.sampler.class_name=B", "data.sampler.group_key=x"])
    assert (loaded.config.data.sampler.name, loaded.config.data.own_keys) == ("a.py:B", {"sampler": {"group_key": "x"}})
    # Classes that are not chosen.
    (tmp_path / "saved.yaml").write_text(
        "data: {custom_cls: {path: null, name: null}, sampler: {class_path: null, class_name: null}, "
        "datagen: {path: null, name: null}}\n"
        "reward: {reward_manager: {source: register, name: naive, module: {path: null, name: custom_reward_manager}}}\n"
    )
    loaded = load_config(BASE, [str(tmp_path / "saved.yaml")])
    assert (loaded.config.data.custom_cls, loaded.config.data.sampler.name) == (None, "shuffle")
    assert loaded.warnings == ("reward.reward_manager.name is called reward_model.reward_manager here",)


def test_an_engine_is_given_what_is_set():
    (pixels,) = words("rollout.engine_kwargs.vllm.mm_device_do_normalize")
    assert not [note for note in notes(f"rollout.name=vllm +{pixels}=False") if pixels in note]
    sizes = "rollout.name=vllm rollout.cudagraph_capture_sizes=[1,2,4]"
    assert value("rollout.engine_kwargs", sizes) == {"vllm": {"cudagraph_capture_sizes": [1, 2, 4]}}
    # null would undo what the adapter sets.
    assert ENGINES["vllm"].handed_on({"limit_mm_per_prompt": None, "swap_space": 4, "seed": 3}) == {"seed": 3}
    off = "rollout.quantization=null rollout.cudagraph_capture_sizes=null rollout.name=vllm"
    assert value("rollout.engine_kwargs", off) == {}


@pytest.mark.parametrize("text", ["trainer: !!python/object/apply:os.mkdir ['{0}']", "a: !!python/name:os.system ''"])
def test_a_config_file_runs_nothing(tmp_path, text):
    (tmp_path / "hostile.yaml").write_text(text.format(tmp_path / "it_ran"))
    for arguments in (
        ([], [str(tmp_path / "hostile.yaml")]),
        # Values without brackets are plain text on the command line.
        ([text.format(tmp_path / "it_ran").replace(": ", "=[", 1) + "]"],),
    ):
        with pytest.raises(ConfigError, match="python/"):
            load_config(*arguments)
    assert not (tmp_path / "it_ran").exists()


if __name__ == "__main__":
    KEYS_FILE.write_text("\n".join(sorted(all_keys())) + "\n")
