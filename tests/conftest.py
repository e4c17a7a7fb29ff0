"""Shared fixtures: a tiny model with its own tokenizer, made on the spot, and two-process runs without Ray."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import pytest
import torch

from tests.tiny import save_tiny_model, write_arithmetic


@pytest.fixture(scope="session", autouse=True)
def threads():
    """One, unless OMP_NUM_THREADS asks for more."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A two-layer Qwen3 with tied embeddings and a character tokenizer."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def arithmetic_files(tmp_path_factory) -> tuple[Path, Path]:
    """train.parquet (24 rows) and test.parquet (6 rows) in verl's schema."""
    folder = tmp_path_factory.mktemp("arithmetic")
    return write_arithmetic(folder / "train.parquet", range(24)), write_arithmetic(
        folder / "test.parquet", range(24, 30)
    )
