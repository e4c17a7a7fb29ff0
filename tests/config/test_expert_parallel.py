"""Impossible sizes of expert parallelism are refused before Ray starts, for trainer and engine."""

import pytest

from rltrain.main_ppo import main
from tests.config.commands import A, problems
from tests.tiny import save_tiny_model, save_tiny_moe, small_run, write_arithmetic

ENGINE = f"{A}rollout.expert_parallel_size=2"


@pytest.mark.parametrize(("words", "message"), [
    ([f"{A}rollout.name=hf"], "rollout.name=hf has no expert parallelism. Leave it out, or use rollout.name=vllm"),
    ([f"{A}rollout.name=vllm"], f"{A}rollout.tensor_model_parallel_size=1. Set both to the same"),
    ([f"{A}rollout.name=vllm", f"{A}rollout.tensor_model_parallel_size=2"], "vLLM's CPU kernel"),
])  # fmt: skip
def test_engines_that_do_not_spread_experts_say_why(words, message):
    devices = ("trainer.device=cpu", "trainer.n_gpus_per_node=2")
    assert any(line.startswith(ENGINE) and message in line for line in problems(*devices, *words, ENGINE))


@pytest.mark.parametrize(("save", "size", "message"), [
    (save_tiny_model, 2, "the model has no experts. Leave it out."),
    (save_tiny_moe, 16, "does not divide the 4 devices"),
    (save_tiny_moe, 4, None),
])  # fmt: skip
def test_the_dry_run_tells_sizes_that_do_not_fit(save, size, message, tmp_path, capsys):
    save(tmp_path / "model")
    files = write_arithmetic(tmp_path / "train.parquet", range(8)), write_arithmetic(tmp_path / "val.parquet", range(4))
    key = f"{A}actor.fsdp_config.expert_parallel_size={size}"
    words = [*small_run(tmp_path / "model", files, tmp_path / "run"), "trainer.n_gpus_per_node=4", key, "--dry-run"]
    code = main(words)
    out, error = capsys.readouterr()
    assert code == (2 if message else 0), out + error
    if message:
        assert f"{key}" in out + error
        assert message in out + error


@pytest.mark.parametrize("chip", [[], ["--device=H100"]], ids=["", "on a chip"])
def test_sizes_that_fit_are_listed_by_config_json_alone(chip, tmp_path, capsys):
    (save_tiny_moe(tmp_path / "model", num_experts=6) / "model.safetensors").unlink()
    files = [write_arithmetic(tmp_path / "train.parquet", range(8))] * 2
    words = [*small_run(tmp_path / "model", files, tmp_path / "run"), "trainer.n_gpus_per_node=4"]
    assert main([*words, f"{A}actor.fsdp_config.expert_parallel_size=4", "--dry-run", *chip]) == 2
    assert "Use one of 2." in "".join(capsys.readouterr())
