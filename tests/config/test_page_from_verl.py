"""The tables of docs/from-verl.md, compared with the code: existing keys, and notes that a run prints."""

import re
from pathlib import Path

from rltrain.config.schema.declarations import ESTIMATORS, POLICY_LOSSES
from rltrain.config.schema.keys import all_keys, sections
from rltrain.config.verl.table import keys_of_verl, rows, table
from tests.config.commands import meanings, notes

PAGE = (Path(__file__).parents[2] / "docs" / "from-verl.md").read_text()
DIFFERENCES = [
    tuple(row[2:-2].split(" | "))
    for row in re.findall(
        r"^\| .* \|$", PAGE.partition("## Same key, other meaning")[2].partition("\n## ")[0], re.MULTILINE
    )
    if not row.startswith(("| key |", "|---"))
]
C, GAE = "algorithm.rollout_correction.", "algorithm.adv_estimator=gae"
BYPASS, RS = f"{C}bypass_mode=True", f"{C}rollout_rs=token_k1 {C}rollout_rs_threshold=0.5_2"
FILTERS = "algorithm.filter_groups.enable=True"
# First cell of a row that promises a note -> a command that prints it.
COMMANDS = {
    "`actor.clip_ratio`": "actor.clip_ratio=0.1",
    "`actor.loss_agg_mode` with `gspo`, `sapo`, `geo_mean`": "actor.policy_loss.loss_mode=gspo",
    "`rollout_correction.bypass_mode=True` with a `loss_mode`": f"actor.policy_loss.loss_mode=sapo {BYPASS}",
    "`rollout_is_batch_normalize` with `bypass_mode`": f"{BYPASS} {C}rollout_is_batch_normalize=True",
    "`rollout_correction.bypass_mode=True` with `rollout_correction.loss_type=reinforce` or "
    "`rollout_correction.rollout_rs`": f"{BYPASS} {C}loss_type=reinforce",
    "`rollout_correction.rollout_is`, `rollout_rs` with `rollout.calculate_log_probs` unset": RS,
    "`algorithm.norm_adv_by_std_in_grpo=False` with `grpo_vectorized`, `gdpo`":
    "algorithm.norm_adv_by_std_in_grpo=False algorithm.adv_estimator=grpo_vectorized",
    "`optim.clip_grad`, `actor.grad_clip`, `critic.grad_clip`": "actor.grad_clip=0.5",
    "`actor.shuffle`, `critic.shuffle`": "actor.shuffle=True",
    "`model.enable_activation_offload=True`":
    "model.enable_activation_offload=True model.enable_gradient_checkpointing=False",
    "`fsdp_config.dtype=float16`": "actor.fsdp_config.dtype=float16",
    "a comparing estimator with `rollout.n` unset or 1": "rollout.n=1",
    "`optim.lr_warmup_steps=0` with a `lr_warmup_steps_ratio`":
    "actor.optim.lr_warmup_steps=0 actor.optim.lr_warmup_steps_ratio=0.1",
    "`trainer.critic_warmup` without a critic": "trainer.critic_warmup=5",
    "`rollout.val_kwargs.do_sample=False` with a temperature":
    "rollout.val_kwargs.do_sample=False rollout.val_kwargs.temperature=0.5 data.val_files=v",
    "`filter_groups.metric` unset": FILTERS,
    "`data.gen_batch_size` without `filter_groups.enable`": "data.gen_batch_size=256",
    "`data.reward_fn_key`": "data.reward_fn_key=kind",
    "`rollout.top_k`, `val_kwargs.top_k`": "rollout.top_k=20",
    "`rollout.repetition_penalty`": "rollout.repetition_penalty=1.1",
    "`data.truncation`": "data.truncation=right",
    "sizes over all ranks (`ppo_micro_batch_size`, `log_prob_micro_batch_size`, `forward_micro_batch_size`, "
    "`reward_model.micro_batch_size`)": "actor.ppo_micro_batch_size=64",
    "both a micro-batch size and `*_max_token_len_per_gpu`":
    "actor.ppo_micro_batch_size_per_gpu=1 actor.ppo_max_token_len_per_gpu=9999",
    "`model.use_fused_kernels`": "model.use_fused_kernels=True",
    "`*.use_torch_compile`": "actor.use_torch_compile=True",
    "removed arguments of vLLM (`swap_space`, `disable_mm_preprocessor_cache`)":
    "rollout.name=vllm rollout.engine_kwargs.vllm.swap_space=4",
}  # fmt: skip
# Words in the column of keys that are not keys.
VALUES = {*ESTIMATORS, *POLICY_LOSSES, "data_source", "resume_path", "swap_space", "disable_mm_preprocessor_cache"}


def test_a_row_that_promises_a_note_is_printed():
    promised = {cells[0] for cells in DIFFERENCES if re.search(r"\bnotes?\b", cells[-1])}
    assert promised == set(COMMANDS)
    for cell, command in COMMANDS.items():
        leaves = {word.partition("=")[0].rpartition(".")[2] for word in command.split()}
        told = [*notes(command), *meanings(command)]
        assert any(leaf in line for line in told for leaf in leaves), (cell, told)


def test_every_key_of_the_table_exists_and_every_note_on_versions_has_a_row():
    known = [*all_keys(), *sections(), *keys_of_verl(), *(row.key for row in table())]
    cells = " ".join(cells[0] for cells in DIFFERENCES)
    names = {name.partition("=")[0].strip("*.…") for name in re.findall(r"`([\w.*…]+(?:=\S+)?)`", cells)}
    names = {name for name in names - VALUES if re.search(r"[._]", name)}
    assert len(names) > 60
    # A name that is cut off ends in "_".
    lost = [name for name in names if not any(name in key if name[-1] == "_" else key.endswith(name) for key in known)]
    assert lost == []
    for row in rows("differs"):
        assert row.key.rpartition(".")[2] in cells, row.key
