"""The commands of docs/npu.md and docs/cluster.md, run unchanged in a fresh checkout on hosts without earlier runs.
Each command is run here, or listed in `ELSEWHERE` with the reason why it cannot be.
"""

import re
import shutil

import pytest

from tests.hosts.hosts import ROOT
from tests.tiny import save_tiny_model, write_arithmetic

# What begins so, and what it needs that is not here.
ELSEWHERE = {
    r"npu-smi |ls /dev/davinci|bash examples/grpo_gsm8k_npu_8\.sh$|python -m rltrain\.(view|report) check": "NPUs",
    r"python -c .import vllm_ascend|source /usr/local/Ascend": "NPUs",
    r"git clone |python3\.11 -m venv|export PIP_|\[ .*PIP_|pip install|hf download": "downloads",
    r"python -m rltrain\.data_preprocess\.gsm8k --output": "downloads",
    r"RANK=0 NNODES=4 bash scripts/ray_start\.sh -- bash examples/math/": "32 NPUs",
}
# What a dry run of an NPU's recipe has to complain of on a machine without one.
LACKS = ("trainer.device=npu: this machine has 0 NPU devices", "rollout.name=vllm: the package is not installed here")
ONE_NODE = {
    "python -m rltrain.env": (0, ["PyTorch version"]),
    "bash examples/grpo_gsm8k_npu_8.sh --dry-run": (2, ["samples per step          1,280", LACKS[0]]),
    "python -m rltrain.port run_verl.sh -o run.sh": (0, ["next: bash run.sh --dry-run"]),
    "bash run.sh --dry-run": (2, ["samples per step          640", LACKS[0]]),
}
# On every node with its own rank: what stands behind ray_start.sh, and what the first node says.
_BOTH = "RANK=0 NNODES=2 bash scripts/ray_start.sh -- "
ALL_NODES = {
    f"{_BOTH}bash examples/nodes_cpu.sh": ["2 x 1 = 2 (cpu)", "exported model:"],
    f"{_BOTH}python -m rltrain.doctor trainer.default_local_dir=outputs/examined": ["192.0.2.2"],
}
# On which nodes, in this order: Ray goes on between them.
KEPT = {
    "RANK=0 NNODES=2 bash scripts/ray_start.sh": "all",
    "bash examples/nodes_cpu.sh trainer.nnodes=2": "the first",
    "bash scripts/ray_start.sh stop": "all",
}
VERL = """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=data/gsm8k/train.parquet \\
    data.val_files=data/gsm8k/test.parquet data.train_batch_size=128 data.max_prompt_length=512 \\
    data.max_response_length=128 actor_rollout_ref.model.path=models/Qwen2.5-0.5B-Instruct \\
    actor_rollout_ref.model.use_remove_padding=False actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=20 actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40 actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.n=5 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40 \\
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.total_epochs=1 trainer.device=npu $@
"""


def commands(page: str) -> list[str]:
    """Return the commands of a page without their comments."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(line.split("  #")[0].split()) for line in lines if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("page", ["npu.md", "cluster.md"])
def test_every_command_of_a_page_is_typed_or_needs_more(page):
    given = commands(page)
    assert given
    typed = ONE_NODE.keys() | ALL_NODES.keys() | KEPT.keys()
    assert [each for each in given if each not in typed and not any(re.match(what, each) for what in ELSEWHERE)] == []


def test_what_is_typed_stands_on_a_page():
    assert {*ONE_NODE, *ALL_NODES, *KEPT} <= {*commands("npu.md"), *commands("cluster.md")}


@pytest.fixture(scope="module")
def hosts(network):
    """Two hosts with a checkout on shared storage, which has a model and data instead of the downloads."""
    found = network(2)
    checkout = found[0].shared / "rltrain"
    for name in ("rltrain", "scripts", "examples"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / "data/gsm8k").mkdir(parents=True)
    for split, number in (("train", 300), ("test", 4)):
        write_arithmetic(checkout / f"data/gsm8k/{split}.parquet", range(number))
    save_tiny_model(checkout / "models/Qwen2.5-0.5B-Instruct", heads=16, kv_heads=16, positions=2048)
    (checkout / "run_verl.sh").write_text(VERL)
    return found


def typed(host, line: str):
    """Run a line of the page in the checkout, with the checkout installed as by `pip install -e .`."""
    checkout = host.shared / "rltrain"
    return host.start(line, {"PYTHONPATH": checkout}, cwd=checkout)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "line",
    [pytest.param(each, marks=pytest.mark.long) if each == "bash run.sh --dry-run" else each for each in ONE_NODE],
)
def test_a_command_for_one_node_does_what_its_page_says(hosts, line):
    code, words = ONE_NODE[line]
    if line.startswith("bash run.sh"):
        assert typed(hosts[0], "python -m rltrain.port run_verl.sh -o run.sh").wait() == 0
    job = typed(hosts[0], line)
    assert job.wait(120) == code, job.output
    for word in words:
        assert word in job.output
    if line.endswith("--dry-run"):
        problems = re.findall(r"^  (\S.*)", job.output[job.output.index("a run would refuse") :], re.MULTILINE)
        assert [problem for problem in problems if not any(lack in problem for lack in LACKS)] == []


@pytest.mark.long
@pytest.mark.parametrize("line", ALL_NODES, ids=["rehearsal", "doctor"])
def test_a_command_for_all_nodes_does_what_its_page_says(hosts, line):
    jobs = [typed(host, line.replace("RANK=0", f"RANK={rank}")) for rank, host in enumerate(hosts)]
    assert [job.wait(300) for job in jobs] == [0, 0], "\n".join(job.output for job in jobs)
    for each in ALL_NODES[line]:
        assert each in jobs[0].output
    assert not any(host.pids("raylet") for host in hosts)


@pytest.mark.long
def test_ray_that_is_kept_takes_a_command_and_is_stopped(hosts):
    for line, where in KEPT.items():
        some = hosts if where == "all" else hosts[:1]
        jobs = [typed(host, line.replace("RANK=0", f"RANK={rank}")) for rank, host in enumerate(some)]
        assert [job.wait(300) for job in jobs] == [0] * len(jobs), "\n".join(job.output for job in jobs)
    assert not any(host.pids("raylet") for host in hosts)
