"""VLMEvalKit on ``rltrain serve`` with images: its accuracy equals that of ``rltrain evaluate`` by the same rule.

VLMEvalKit needs another omegaconf than rltrain, so it runs in a separate environment (`scripts/test_extras.sh`).
"""

import base64
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from rltrain.common.env import installed
from tests.serve.served import serving
from tests.tiny_vision import save_tiny_vision_model

PYTHON = os.environ.get("VLMEVALKIT_PYTHON")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="VLMEVALKIT_PYTHON is not set: no environment with ms-vlmeval"),
    pytest.mark.skipif(not installed("vllm"), reason="vllm is not installed"),
]
OPTIONS = dict(zip("ABCDEFGHIJ", "0123456789", strict=True))
# The prompt that VLMEvalKit builds from a row of its table.
PROMPT = (
    "Question: 1+1?\nOptions:\n"
    + "".join(f"{letter}. {text}\n" for letter, text in OPTIONS.items())
    + "Please select the correct answer from the options above. \n"
)
# VLMEvalKit's rule without a judge: a response that contains the text of one option only counts as this option.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str.strip() == ground_truth)
"""


def gray(level: int) -> bytes:
    """Return a PNG that VLMEvalKit's JPEG keeps: large enough not to be resized, of one level that JPEG can encode."""
    image = Image.fromarray(np.full((112, 112, 3), level, np.uint8))
    png, jpeg = io.BytesIO(), io.BytesIO()
    image.save(png, format="PNG")
    image.save(jpeg, format="JPEG")
    assert (np.asarray(Image.open(jpeg)) == level).all()
    return png.getvalue()


def run(*words, **environment):
    done = subprocess.run([*map(str, words)], env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_images_score_as_they_do_in_an_evaluation(tmp_path):
    model = save_tiny_vision_model(tmp_path / "model", "qwen2_vl", tied=False, seed=3)
    plain, processor = AutoModelForImageTextToText.from_pretrained(model), AutoProcessor.from_pretrained(model)
    # Only digits get logits other than 0, so each response is a digit.
    digits = processor.tokenizer.convert_tokens_to_ids(list(OPTIONS.values()))
    with torch.no_grad():
        plain.lm_head.weight[[number for number in range(plain.lm_head.out_features) if number not in digits]] = 0
    plain.save_pretrained(model)
    images, answers = [gray(level) for level in range(0, 256, 16)], []
    for image in images:
        content = [{"type": "image", "image": Image.open(io.BytesIO(image))}, {"type": "text", "text": PROMPT}]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=True,
            return_tensors="pt",
        )  # fmt: skip
        answers.append(processor.decode(plain.generate(**inputs, do_sample=False, max_new_tokens=1)[0, -1]))
    assert len(set(answers)) > 1, f"the responses do not depend on the image: {answers}"
    truths = [answer if number % 3 else str((int(answer) + 1) % 10) for number, answer in enumerate(answers)]
    expected = sum(answer == truth for answer, truth in zip(answers, truths, strict=True)) / len(images)

    letters = {text: letter for letter, text in OPTIONS.items()}
    rows = [
        {"index": number, "image": base64.b64encode(image).decode(), "question": "1+1?", "answer": letters[truth]}
        | OPTIONS
        for number, (image, truth) in enumerate(zip(images, truths, strict=True))
    ]
    data = tmp_path / "lmu"
    data.mkdir()
    pd.DataFrame(rows).to_csv(data / "grays.tsv", sep="\t", index=False)
    with serving(model) as address:
        run(
            PYTHON, "-m", "vlmeval.run", "--data", "grays", "--model", "m", "--base-url", address, "--judge",
            "exact_matching", "--max-tokens", 1, "--temperature", 0, "--work-dir", tmp_path / "found",
            LMUData=str(data), PYTHONPATH="",
        )  # fmt: skip
    (table,) = (tmp_path / "found").rglob("*_acc.csv")
    found = float(pd.read_csv(table)["Overall"][0])

    (tmp_path / "reward.py").write_text(REWARD)
    pd.DataFrame(
        {
            "data_source": "grays",
            "prompt": [[{"role": "user", "content": f"<image>{PROMPT}"}] for _ in images],
            "images": [[{"bytes": image}] for image in images],
            "reward_model": [{"style": "rule", "ground_truth": truth} for truth in truths],
        }
    ).to_parquet(tmp_path / "rows.parquet")
    lengths = ["data.max_prompt_length=256", "data.max_response_length=1", "trainer.n_gpus_per_node=1"]
    run(
        sys.executable, "-m", "rltrain.evaluate", f"model={model}", f"data={tmp_path / 'rows.parquet'}",
        f"out={tmp_path / 'own'}", "trainer.device=cpu", "data.image_key=images", *lengths,
        f"custom_reward_function.path={tmp_path / 'reward.py'}",
    )  # fmt: skip
    own = json.loads(Path(tmp_path / "own/evaluation.json").read_text())["average"]["avg@1"]["value"]
    assert found == own == expected
