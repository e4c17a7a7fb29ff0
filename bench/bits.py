"""Compares the weights of five short runs bit by bit with those runs at another commit: the guard of a refactoring.

    python -m bench.bits [--against REV [REV ...]]

Each run trains three steps on the CPU from the same model and data, by the command that a user types. Commits are
checked out into git worktrees, and the working tree runs as it is. A digest covers every weight of actor and critic,
read from the last checkpoint: name, dtype, shape and bytes. Digests are equal on one machine only: processors round
differently. Prints a line per run and exits with 1 if a digest differs or a run fails. Two to four minutes with one REV
on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from bench.table import ROOT, parse
from tests.tiny import save_tiny_model, small_run, write_arithmetic

STEPS = 3
_CRITIC = {"critic.ppo_mini_batch_size": 2, "critic.ppo_max_token_len_per_gpu": 64, "critic.optim.lr": 5e-3}
_LORA = {"actor_rollout_ref.model.lora_rank": 4, "actor_rollout_ref.model.lora_alpha": 8}
_BYPASS = {"algorithm.rollout_correction.bypass_mode": True, "actor_rollout_ref.actor.use_kl_loss": False}
# Name -> ranks, settings in addition to the settings of `small_run`.
RUNS: dict[str, tuple[int, dict[str, object]]] = {
    "GRPO": (2, {}),
    "GAE with critic": (2, {"algorithm.adv_estimator": "gae", **_CRITIC}),
    "KL in the reward": (1, {"algorithm.use_kl_in_reward": True, "actor_rollout_ref.actor.use_kl_loss": False}),
    "LoRA": (1, _LORA),
    "bypass mode": (1, _BYPASS),
}


def weights_digest(checkpoint: Path) -> str:
    """Return a SHA-256 of all weights of the actor and of the critic, if there is one."""
    digest = hashlib.sha256()
    for role in ("actor", "critic"):
        if (checkpoint / role).is_dir():
            with tempfile.NamedTemporaryFile(suffix=".pt") as file:
                dcp_to_torch_save(checkpoint / role, file.name)
                weights = torch.load(file.name)["model"]
            for name, weight in sorted(weights.items()):
                digest.update(f"{role} {name} {weight.dtype} {tuple(weight.shape)}".encode())
                digest.update(weight.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def train(tree: Path, inputs: Path, folder: Path, name: str) -> str:
    """Train the run ``name`` with the code of ``tree`` and return its digest, or the end of its output if it failed."""
    ranks, settings = RUNS[name]
    files = (inputs / "train.parquet", inputs / "test.parquet")
    changes = {"trainer.n_gpus_per_node": ranks, "trainer.total_training_steps": STEPS, **settings}
    if name == "GAE with critic":
        changes["critic.model.path"] = inputs / "model"
    command = [sys.executable, "-m", "rltrain.main_ppo", *small_run(inputs / "model", files, folder / "run")]
    command += [f"{key}={value}" for key, value in changes.items()]
    # One thread: a kernel's summation order depends on its number of threads.
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with open(folder / "log", "w") as log:
        code = subprocess.run(command, cwd=tree, env=environment, stdout=log, stderr=log).returncode
    if code:
        return f"failed with exit code {code}:\n" + "".join((folder / "log").read_text()[-2000:])
    return weights_digest(folder / "run" / f"global_step_{STEPS}")


def digests_of(tree: Path, inputs: Path, names: list[str]) -> dict[str, str]:
    """Return the digest of each run with the code of ``tree``."""
    digests = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="bits_") as folder:
            digests[name] = train(tree, inputs, Path(folder), name)
    return digests


@contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """Check ``revision`` out into a folder that is removed afterwards. Raises SystemExit for an unknown revision."""
    with tempfile.TemporaryDirectory(prefix="bits_") as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        added = subprocess.run([*git, "add", "--detach", str(tree), revision], capture_output=True, text=True)
        if added.returncode:
            raise SystemExit(f"error: git worktree add {revision}: {added.stderr.strip()}")
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def _of_revision(revision: str, inputs: Path, names: list[str]) -> dict[str, str]:
    with worktree(revision) as tree:
        return digests_of(tree, inputs, names)


def main(argv: list[str] | None = None) -> int:
    """Run all trees, two at a time, print the comparison and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--against", nargs="+", default=[], metavar="REV", help="commits to compare with")
    parser.set_defaults(names=list(RUNS))
    options = parse(parser, argv, against=[], names=["LoRA"])
    with tempfile.TemporaryDirectory(prefix="bits_") as folder:
        inputs = Path(folder)
        save_tiny_model(inputs / "model")
        write_arithmetic(inputs / "train.parquet", range(24))
        write_arithmetic(inputs / "test.parquet", range(24, 30))
        with ThreadPoolExecutor(2) as pool:
            working = pool.submit(digests_of, ROOT, inputs, options.names)
            others = {
                revision: pool.submit(_of_revision, revision, inputs, options.names) for revision in options.against
            }
            ours = working.result()
            theirs = {revision: digests.result() for revision, digests in others.items()}
    for name, digest in ours.items():
        print(f"{name} ({RUNS[name][0]} rank{'s' * (RUNS[name][0] > 1)}): {digest}")
    wrong = [name for name, digest in ours.items() if digest.startswith("failed")]
    for revision, digests in theirs.items():
        differing = [name for name in ours if digests[name] != ours[name] or digests[name].startswith("failed")]
        print(f"{revision}: {'equal' if not differing else 'differs: ' + ', '.join(differing)}")
        for name in differing:
            print(f"  {name}: {digests[name]}")
        wrong += differing
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
