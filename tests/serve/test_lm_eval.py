"""lm-evaluation-harness on ``rltrain serve``: its results equal those of ``rltrain evaluate`` and transformers."""

import json
import os
import subprocess
import sys

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rltrain.common.env import installed
from tests.serve.served import serving
from tests.tiny import CHARACTERS, save_tiny_model, save_tiny_tokenizer

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (extra: lm-eval)")
pytestmark = pytest.mark.skipif(not installed("vllm"), reason="vllm is not installed")
OFFLINE = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "-"}
QUESTIONS = [f"{left}+{right}=?" for left in range(5) for right in range(4)]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
GENERATED = """
output_type: generate_until
doc_to_target: "{{truth}}"
generation_kwargs: {until: ["\\n\\n"], do_sample: false, max_gen_toks: 8}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = save_tiny_model(tmp_path_factory.mktemp("evaluated"))
    # Without spaces between characters, so that texts of the server equal those of transformers.
    save_tiny_tokenizer(folder, characters=CHARACTERS)
    return folder


@pytest.fixture(scope="module")
def address(model):
    with serving(model) as address:
        yield address


@pytest.fixture(scope="module")
def rows(model, tmp_path_factory):
    """The folder of tasks and data. The truths of two thirds of the rows are the model's responses."""
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    records = []
    for number, question in enumerate(QUESTIONS):
        conversation = [{"role": "user", "content": question}]
        prompt = torch.tensor(
            [tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)]
        )
        whole = plain.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=8)
        answer = tokenizer.decode(whole[0, prompt.shape[1] :], skip_special_tokens=True)
        records.append({"question": question, "truth": answer if number % 3 else "-"})
    folder = tmp_path_factory.mktemp("tasks")
    file = folder / "rows.json"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "generated.yaml").write_text(TASK.format(name="generated", file=file) + GENERATED)
    (folder / "reward.py").write_text(REWARD)
    pd.DataFrame(
        {
            "data_source": "exact",
            "prompt": [[{"role": "user", "content": record["question"]}] for record in records],
            "reward_model": [{"style": "rule", "ground_truth": record["truth"]} for record in records],
        }
    ).to_parquet(folder / "rows.parquet")
    return folder, records


def run(*words):
    done = subprocess.run([sys.executable, "-m", *map(str, words)], env=OFFLINE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def harness(folder, out, task, kind, address, *more):
    """Return the numbers of a task. kind: the kind of model."""
    given = ",".join(["model=m", f"base_url={address}", "num_concurrent=4", *more])
    words = ["--tasks", task, "--include_path", folder, "--model_args", given, "--output_path", out]
    run("lm_eval", "run", "--model", kind, *words, *(["--apply_chat_template"] if "chat" in kind else []))
    (file,) = out.rglob("results_*.json")
    return json.loads(file.read_text())["results"][task]


def test_generated_answers_score_as_they_do_in_an_evaluation(model, rows, address, tmp_path):
    folder, records = rows
    found = harness(folder, tmp_path / "a", "generated", "local-chat-completions", f"{address}/chat/completions")
    words = [f"model={model}", f"data={folder / 'rows.parquet'}", f"out={tmp_path / 'b'}", "trainer.device=cpu"]
    lengths = ["data.max_prompt_length=16", "data.max_response_length=8", "trainer.n_gpus_per_node=1"]
    run("rltrain.evaluate", *words, *lengths, f"custom_reward_function.path={folder / 'reward.py'}")
    own = json.loads((tmp_path / "b/evaluation.json").read_text())["average"]["avg@1"]["value"]
    assert found["exact_match,none"] == own == sum(record["truth"] != "-" for record in records) / len(records)
