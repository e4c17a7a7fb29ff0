"""The command: what it prints, what it learns from a run, which layouts it prefers, and what it refuses."""

import json
import re
from dataclasses import replace

import pandas as pd
import pytest

from rltrain.base.chips import find_chip
from rltrain.base.device import get_device, resolve_dtype
from rltrain.config.load import load_config, to_yaml
from rltrain.run.seconds.assumptions import Assumptions
from rltrain.run.seconds.step import engine_speed, sizes_of
from rltrain.tools.simulate.__main__ import main
from rltrain.tools.simulate.calibration import calibrate
from rltrain.tools.simulate.request import named_chip
from rltrain.trainer.plan import make_plan
from tests.tiny import save_tiny_model, save_tiny_moe

A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("simulate"))


@pytest.fixture
def words(model):
    return [
        "algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={model}", "data.train_batch_size=8",
        "data.max_prompt_length=32", "data.max_response_length=64", f"{A}ppo_mini_batch_size=4", f"{R}n=4",
        f"{A}ppo_max_token_len_per_gpu=4096", "trainer.n_gpus_per_node=2",
    ]  # fmt: skip


@pytest.fixture
def simulate(words, capsys):
    def run(*more):
        code = main([*words, *more])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


@pytest.fixture
def run(words, tmp_path):
    """A run's folder, whose update took 10 s and whose other phases took what they would."""
    folder = tmp_path / "run"
    (folder / "samples").mkdir(parents=True)
    cfg = load_config([*words, "trainer.device=cpu", f"{R}name=hf", "data.train_files=none"]).config
    (folder / "config.yaml").write_text(to_yaml(cfg))
    rows = [(1, row, 8, length) for row in range(8) for length in (3, 5, 9, 20)]
    samples = pd.DataFrame(rows, columns=["step", "row", "prompt_length", "response_length"])
    samples.to_parquet(folder / "samples" / "train_000001.parquet")
    names = ("reshard", "generate_sequences", "gen", "reward", "old_log_prob", "adv", "update_actor", "step")
    seconds = (0.5, 4, 5, 0.8, 2, 0.2, 10, 18)
    lines = [{f"timing_s/{name}": value for name, value in zip(names, seconds, strict=True)} | {"step": 2}] * 3
    lines[0] = lines[0] | {"timing_s/update_actor": 500, "step": 1}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def phases(text):
    """Seconds by phase, of a step."""
    found = re.findall(r"^ +(\w+) +([\d.,e-]+) s +\d+%", text, re.MULTILINE)
    return {name: float(value.replace(",", "")) for name, value in found}


def test_a_step_is_foretold_for_a_device_that_is_not_there(simulate):
    code, text, error = simulate("--device", "910B3", "--nodes", "2", "--lengths", "mean:20,max:64")
    assert code == 0, error
    assert "on 4 x Ascend910B3, 2 nodes (foretold, not measured on this device)" in text
    assert {"generate_sequences", "reshard", "gen", "old_log_prob", "update_actor", "step"} <= phases(text).keys()
    assert "step_ms=" in text
    assert "memory of a device in GiB" in text


def test_a_replica_reads_all_experts_where_many_rows_are_routed(words, tmp_path):
    cfg = load_config([*words, f"actor_rollout_ref.model.path={save_tiny_moe(tmp_path)}", "trainer.device=cpu"]).config
    sizes = sizes_of(cfg, make_plan(cfg))
    speed = replace(engine_speed(cfg, sizes, find_chip("H100"), Assumptions(step_ms=0), None), flops=float("inf"))
    one, many = (speed.decode_s(rows, 0) * speed.bandwidth for rows in (1, 1000))
    each = resolve_dtype(cfg.actor_rollout_ref.rollout.dtype, get_device("cpu")).itemsize
    assert one == pytest.approx(each * sizes["matmul_parameters"])
    # Six of eight experts in two layers are idle for a token: three matrices of 16 x 32 each.
    assert many - one == pytest.approx(each * 2 * 6 * 3 * 16 * 32)


def test_assumptions_are_printed_and_can_be_set(simulate):
    text = simulate("--device", "H100", "--lengths", "mean:20,max:64", "--assume", "step_ms=1000,reward_ms=500")[1]
    assert "step_ms=1000 " in text
    # 64 tokens of the longest answer; 32 samples.
    assert phases(text)["generate_sequences"] == pytest.approx(64, rel=0.02)
    assert phases(text)["reward"] == 16


def test_a_run_foretells_itself_and_corrects_other_settings(simulate, run):
    measured = {"generate_sequences": 4, "reshard": 0.5, "gen": 5, "old_log_prob": 2, "update_actor": 10, "step": 18}
    calibration = calibrate(run)
    # The first step warms up, and does not count.
    assert calibration.num_steps == 2
    assert calibration.assumed.ratios["update_actor"] == pytest.approx(10 / calibration.foretold["update_actor"])
    text = simulate("--from", str(run))[1]
    assert {name: phases(text)[name] for name in measured} == pytest.approx(measured, rel=0.01)
    # Twice as many answers take more, and the run's ratios stay.
    larger = phases(simulate("--from", str(run), f"{R}n=8")[1])
    assert larger["update_actor"] > 10
    assert larger["reward"] == pytest.approx(2 * 0.8)


def test_a_run_of_devices_that_are_not_here_is_foretold_in_their_dtypes(simulate, run):
    """Else this machine's would be taken, which on a CPU is float32: the weights would be read in twice the time."""
    (run / "env.json").write_text(json.dumps({"devices": ["NVIDIA H100 80GB HBM3"]}))
    file, foretold = run / "config.yaml", []
    for device in ("cuda", "auto"):
        file.write_text(re.sub(r"(?m)^(  device): \w+$", rf"\1: {device}", file.read_text()))
        foretold.append(calibrate(run).foretold)
    assert foretold[0] == foretold[1]
    for flags in ((), ("--device", "H100")):
        found = phases(simulate("--from", str(run), *flags)[1])
        assert (found["generate_sequences"], found["reshard"]) == (4, 0.5)


def test_a_sweep_tells_the_best_that_fits_and_why(simulate):
    code, text, error = simulate(
        "--device", "H100", "--lengths", "mean:20,max:64", "--assume", "micro_batch_ms=500", "--sweep",
        f"{A}ppo_max_token_len_per_gpu=96,4096", f"{R}tensor_model_parallel_size=1,3",
    )  # fmt: skip
    assert code == 0, error
    table, _, rest = text.partition("why the first and not the second, ")
    assert [line.split()[-1] for line in table.splitlines()[1:]] == [
        "ppo_max_token_len_per_gpu=4096_tensor_model_parallel_size=1",
        "ppo_max_token_len_per_gpu=96_tensor_model_parallel_size=1",
    ]
    assert "update_actor" in rest
    assert "2 combinations are refused" in rest


def test_a_sweep_of_which_nothing_can_run_ends_as_a_wrong_key_does(simulate):
    code, text, error = simulate("--device", "H100", "--lengths", "mean:20,max:64", "--sweep", f"{R}tensor_size=1,2")
    assert (code, text) == (2, "")
    assert "2 combinations are refused" in error
    assert f"unknown key '{R}tensor_size'" in error


def test_a_model_that_is_not_there_is_told_by_its_folder(simulate, tmp_path):
    path = f"actor_rollout_ref.model.path={tmp_path}/none"
    code, _, error = simulate(path, "--device", "H100", "--lengths", "mean:20,max:64")
    assert code == 2
    assert f"{path}: there is no such folder" in error


def test_a_sweep_leaves_out_what_does_not_fit(simulate):
    text = simulate(
        "--device", "H100", "--lengths", "mean:20,max:64", "--sweep", "trainer.device_memory_gb=0.001,80"
    )[1]  # fmt: skip
    assert re.search(r"1 combination (does|do) not fit", text) or "are refused" in text
    assert "device_memory_gb=80" in text.splitlines()[1]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--device", "H1000"], "--device H1000: nobody knows the peaks of this chip. Known are 910B1, "),
        (["--device", "H100"], "--lengths is not given"),
        (["--lengths", "mean:20,max:64"], "--device is not given"),
        (["--device", "H100", "--lengths", "mean:x,max:64"], "mean:x is no number"),
        (["--device", "H100", "--lengths", "mean:20,max:64", "--nodes", "0"], "--nodes 0 is no number of nodes"),
        (["--device", "H100", "--lengths", "mean:20,max:64", "--assume", "mfu=1"], "there is no mfu. Known are"),
        (["--device", "H100", "--lengths", "mean:20,max:64", "--assume", "step_ms=-1"], "it is at least 0"),
        (["--device", "H100", "--lengths", "mean:20,max:64", "--assume", "update_share=2"], "at most 1"),
        (["--device", "H100", "--lengths", "mean:20,max:64", "data.train_batch_size=7"], "ppo_mini_batch_size"),
        (
            ["--device", "H100", "--lengths", "mean:20,max:64", "actor_rollout_ref.model.path=/none/there"],
            "/none/there",
        ),
        (["--device", "H100", "--lengths", "mean:20,max:64", "--sweep"], "nothing is swept"),
        (["--device", "H100", "--lengths", "mean:20,max:64", "--best", "few"], "--best few"),
        (["--from", "/none/there"], "there is no config.yaml in it"),
        (["--device"], "expected one argument"),
    ],
)
def test_what_is_wrong_is_told_with_the_way_out(simulate, flags, told):
    code, _, error = simulate("trainer.device=cpu", *flags)
    assert code == 2
    assert told in error
    assert "Traceback" not in error


def test_chips_are_found_by_the_names_that_people_say():
    assert named_chip("910B3") == find_chip("Ascend910B3")
    assert named_chip("H100") == find_chip("NVIDIA H100 80GB HBM3")
