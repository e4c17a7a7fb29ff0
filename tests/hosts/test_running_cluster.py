"""A cluster that was started separately with `ray start`: ways to join it, the environment of workers on each node, and
the result of a run over both."""

import json
import os
import re
import shutil

import pandas as pd
import pytest

from rltrain.common.env import cpu_quota, installed
from tests.clock import eventually
from tests.hosts.test_two_hosts import Run
from tests.tiny_vision import save_tiny_vision_model, write_pictures

TOKEN = {"RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
LOOK = "python -m tests.hosts.look trainer.device=cpu trainer.nnodes=2 trainer.n_gpus_per_node=1"
ADDRESS, ENV = "ray_kwargs.ray_init.address", "ray_kwargs.ray_init.runtime_env.env_vars"
# Ray's client server alone takes half a minute on a busy machine.
LIMIT_S = 800
DASHBOARD = installed("aiohttp_cors") and installed("opencensus")


@pytest.fixture(scope="module")
def hosts(network):
    """Head, worker, and a host that is not a node of the cluster."""
    head, worker, outside = network(3)
    # Ray's own variable for a process that has no CPU slots, which must not be taken for the user's.
    del head.environment["OMP_NUM_THREADS"], worker.environment["OMP_NUM_THREADS"]
    own = TOKEN | {"RAY_AUTH_MODE": "token", "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": 15}

    def start(host, options, environment):
        line = f"ray start --disable-usage-stats --num-cpus=1 --node-ip-address={host.address} {options}"
        # Ray gives its own start 30 s, which a busy machine may exceed.
        host.check(f"{line} || (ray stop --force && {line})", environment, LIMIT_S)

    start(head, f"--head --port=6379 --include-dashboard={DASHBOARD}", own)
    start(worker, f"--address={head.address}:6379", own | {"WANDB_MODE": "offline"})
    return head, worker, outside


def found(output: str) -> dict:
    """Return the workers' reports by node."""
    (line,) = [line for line in output.splitlines() if line.startswith("found ")]
    seen = json.loads(line.removeprefix("found "))
    assert sorted(seen["ranks"][0]["nodes"]) == ["host1", "host2"]
    return {rank["node"]: rank["variables"] for rank in seen["ranks"]}


# At every run: tests/test_env.py, of one process.
@pytest.mark.long
def test_variables_reach_every_node_and_each_finds_its_card(hosts):
    given = {
        "GLOO_X": 1, "HCCL_WHITELIST_DISABLE": 1, "NCCL_DEBUG": "WARN", "PYTORCH_X": "a", "VLLM_LOGGING_LEVEL": "INFO",
        "WANDB_API_KEY": "secret", "WANDB_MODE": "online",
    }  # fmt: skip
    passed = {name: str(value) for name, value in given.items()}
    # Each host has another card, docker0, that comes first and has the same address everywhere.
    card = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0", "HCCL_SOCKET_IFNAME": "=eth0"}
    seen = found(hosts[0].check(f"{LOOK} {ADDRESS}=auto {ENV}.MINE=1", TOKEN | given | {"OTHER": 1}, LIMIT_S))
    expected = {**passed, **card, "MINE": "1"}
    assert {name: seen["host1"].get(name) for name in expected} == expected
    # The second node has this one of its own.
    expected["WANDB_MODE"] = "offline"
    assert {name: seen["host2"].get(name) for name in expected} == expected
    assert not any("OTHER" in variables for variables in seen.values())


@pytest.mark.smoke("A run over two hosts learns what one process learns")
def test_a_run_over_two_hosts_learns_what_one_process_learns(
    hosts, process_group, tiny_model, arithmetic_files, tmp_path
):
    run = Run(hosts, tiny_model, arithmetic_files, TOKEN)
    job = run.start(2, 1, 2)
    assert job.wait(LIMIT_S) == 0, job.output
    assert sorted(json.loads((run.folder / "env.json").read_text())["hosts"]) == ["host1", "host2"]
    alone = run.learns_what_one_process_learns(tmp_path)
    for line, other in zip(run.lines, alone, strict=True):
        assert line["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], abs=1e-5)
        assert line["rollout/log_prob_gap/mean"] < 1e-5


@pytest.mark.long
def test_images_of_a_shared_folder_over_two_hosts(hosts, process_group, tmp_path):
    """The rows name the images by their paths, as in ViRL39K."""
    model = save_tiny_vision_model(tmp_path / "model", "qwen2_5_vl", tied=True)
    folder = hosts[0].shared / "images"
    folder.mkdir()
    files = [tmp_path / f"{split}.parquet" for split in ("train", "test")]
    for file, rows in zip(files, (range(24), range(24, 30)), strict=True):
        table = pd.read_parquet(write_pictures(file, rows))
        for row, images in enumerate(table["images"]):
            for number, image in enumerate(images):
                path = folder / f"{file.stem}_{row}_{number}.png"
                path.write_bytes(image.pop("bytes"))
                image["path"] = str(path)
        table.to_parquet(file)
    sizes = {"data__max_prompt_length": 48, "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 128}
    run = Run(hosts, model, files, TOKEN, **sizes)
    job = run.start(2, 1, 2)
    assert job.wait(LIMIT_S) == 0, job.output
    for line, other in zip(run.lines, run.learns_what_one_process_learns(tmp_path / "alone"), strict=True):
        assert line["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], abs=1e-5)
        assert line["rollout/log_prob_gap/mean"] < 1e-5
    # Without the folder, a run is refused with a row and its image.
    shutil.rmtree(folder)
    job = run.start(2, 1, 3)
    assert job.wait(LIMIT_S) == 2, job.output
    assert re.search(r"error: .*train.parquet.*row \d.*_\d.png", job.output, re.DOTALL), job.output


@pytest.mark.long
def test_a_host_outside_drives_the_cluster_as_a_client(hosts):
    head, _, outside = hosts
    given = TOKEN | {"NCCL_DEBUG": "WARN"}
    listens = f"timeout 5 bash -c '</dev/tcp/{head.address}/10001'"
    eventually(lambda: outside.run(listens).returncode == 0, "Ray's client server", LIMIT_S)
    job = outside.start(f"{LOOK} {ADDRESS}=ray://{head.address}:10001", given)
    # The process that serves the client dies while it starts, as happens on a busy head: another one is asked for.
    eventually(lambda: head.pids("specific-server") or job.returncode is not None, "a server of the client", LIMIT_S)
    assert job.returncode is None, job.output
    head.kill("specific-server")
    assert job.wait(LIMIT_S) == 0, job.output
    seen = found(job.output)
    assert "did not start; trying again" in job.output
    assert all(variables["NCCL_DEBUG"] == "WARN" for variables in seen.values())


@pytest.mark.parametrize("submitted", [False, True], ids=["as Ray starts it", "ray job submit"])
def test_a_submitted_job_joins_its_cluster(hosts, submitted):
    if submitted and not DASHBOARD:
        pytest.skip("`ray job submit` needs the dashboard: pip install 'ray[default]'")
    head = hosts[0]
    job = {"env_vars": {"MINE_1": "job", "MINE_2": "job"}}
    command = f"{LOOK} {ENV}.MINE_2=command {ENV}.MINE_3=command"
    if submitted:
        command = f"ray job submit --address http://127.0.0.1:8265 --runtime-env-json '{json.dumps(job)}' -- {command}"
        seen = found(head.check(command, TOKEN | {"RAY_AUTH_MODE": "token"}, LIMIT_S))
    else:
        by_ray = {
            "RAY_ADDRESS": f"{head.address}:6379", "RAY_AUTH_MODE": "token", "OMP_NUM_THREADS": 1,
            "RAY_JOB_CONFIG_JSON_ENV_VAR": f"'{json.dumps({'runtime_env': job, 'metadata': {}})}'",
        }  # fmt: skip
        variables = " ".join(f"{name}={value}" for name, value in by_ray.items())
        seen = found(head.check(f"env {variables} {command}", TOKEN, LIMIT_S))
    for variables in seen.values():
        assert [variables[f"MINE_{number}"] for number in (1, 2, 3)] == ["job", "command", "command"]
        # All cores of the node for its one worker.
        assert variables["OMP_NUM_THREADS"] == str(int(min(len(os.sched_getaffinity(0)), cpu_quota())))
