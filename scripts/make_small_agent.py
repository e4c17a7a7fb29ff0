"""Create a tiny model for examples/agent_cpu.sh. It has learned the format of conversations, but not the task.

``--task calculator``: it answers a sum with a random number, or writes a call of the calculator; after the result, it
repeats it or says a random number. ``--task guess``: it says a random number, or a random one of the remaining. A
supervised warm-up of about a minute shows such conversations, after others that are always right, because right ones
take long to learn. Nothing is downloaded; the same options give the same folder.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parent.parent))
import rltrain
from rltrain.run.report.table import read_metrics
from scripts.make_small_model import MAX_POSITIONS, build_tokenizer, save

# A call and its result are formatted as by Qwen (hermes), without the newlines.
OPEN, CLOSE = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
RESULT, END_RESULT = "<tool_response>", "</tool_response>"
# Words that are one token each, so that a conversation has a few dozen tokens.
WORDS = [OPEN, CLOSE, RESULT, END_RESULT, "calculator", "higher", "lower"]
TEMPLATE = """\
{%- if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }}{% endfor %}<|end|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|user|>{% endif -%}
<tool_response>{{ message.content }}</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|end|>{% endif %}
{%- else %}<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
# The template of the game. A word is followed directly by the next guess, so the guess is found by attention to the
# previous token.
GAME_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "calculator"}}]
# Shares of responses that begin with a call, of calls with a wrong operand, of results that are repeated, and of
# guesses that use the previous words.
CALLS, SLIPS, COPIES, HEEDS = 0.4, 0.2, 0.5, 0.4
# Share of the warm-up steps in which all conversations are right.
PRACTICE = 0.6
MAX_OPERAND, MAX_TURNS = 49, 4

# Messages of a conversation.
Conversation = list[dict[str, Any]]
# Function that creates a conversation. Its number is the finished share of the warm-up.
Talk = Callable[[random.Random, float], Conversation]


def tokenizer_of(options: argparse.Namespace) -> PreTrainedTokenizerFast:
    """Return the quickstart's byte tokenizer, with tokens for the words of a task, and a template."""
    tokenizer = build_tokenizer()
    game = options.task == "guess"
    tokenizer.add_tokens([*WORDS, *(str(number) for number in range(options.low, options.high + 1) if game)])
    tokenizer.chat_template = GAME_TEMPLATE if game else TEMPLATE
    return tokenizer


def tiny_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Return a model of 0.3 million parameters.

    Copying needs two layers: one finds the token before each token, the next its position.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 32) * 32, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def asked_for_a_sum(rng: random.Random, done: float) -> Conversation:
    """Return a conversation with a direct answer or a call. At first all conversations call the tool and copy its
    result, because copying takes most steps to learn.
    """
    calls, slips, copies = (CALLS, SLIPS, COPIES) if done > PRACTICE else (1.0, 0.0, 1.0)
    operands = [rng.randint(0, MAX_OPERAND) for _ in range(2)]
    prompt = {"role": "user", "content": "{}+{}=?".format(*operands)}
    if rng.random() >= calls:
        return [prompt, {"role": "assistant", "content": any_sum(rng)}]
    if rng.random() < slips:
        operands[rng.randrange(2)] = rng.randint(0, MAX_OPERAND)
    result = str(sum(operands))
    answer = result if rng.random() < copies else any_sum(rng)
    function = {"name": "calculator", "arguments": {"expression": "{}+{}".format(*operands)}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return [prompt, call, {"role": "tool", "content": result}, {"role": "assistant", "content": answer}]


def any_sum(rng: random.Random) -> str:
    return str(rng.randint(0, MAX_OPERAND) + rng.randint(0, MAX_OPERAND))


def guessing(prompt: str, low: int, high: int) -> Talk:
    """Return games in which the player says any number, or a remaining one. At first always a remaining one."""

    def game(rng: random.Random, done: float) -> Conversation:
        number, said = rng.randint(low, high), [{"role": "user", "content": prompt.format(low=low, high=high)}]
        least, most = low, high
        heeds = HEEDS if done > PRACTICE else 1.0
        for _ in range(MAX_TURNS):
            guess = rng.randint(least, most) if rng.random() < heeds else rng.randint(low, high)
            said.append({"role": "assistant", "content": str(guess)})
            if guess == number:
                break
            said.append({"role": "user", "content": "higher" if guess < number else "lower"})
            least, most = (max(least, guess + 1), most) if guess < number else (least, min(most, guess - 1))
        return said[: None if said[-1]["role"] == "assistant" else -1]

    return game


def write_rows(file: Path, talk: Talk, options: argparse.Namespace) -> None:
    """Write the conversations of all warm-up steps in their order, as rows of `rltrain sft`."""
    rng, number = random.Random(options.seed), options.steps * options.batch_size
    tools = {"tools": TOOLS} if options.task == "calculator" else {}
    with file.open("w") as rows:
        for place in range(number):
            done = (place // options.batch_size + 1) / options.steps
            rows.write(json.dumps({"messages": talk(rng, done), **tools}) + "\n")


def warm_up(folder: Path, rows: Path, options: argparse.Namespace) -> tuple[PreTrainedModel, float]:
    """Run `rltrain.sft` on the model in ``folder``. Return the model and the last loss, in nats per token."""
    run = folder.parent / "run"
    keys = {
        "model.path": folder, "model.enable_gradient_checkpointing": False, "data.train_files": rows,
        "data.max_length": MAX_POSITIONS, "data.train_batch_size": options.batch_size, "data.shuffle": False,
        "optim.lr": options.lr, "optim.lr_warmup_steps": min(20, options.steps - 1), "optim.weight_decay": 0.0,
        "trainer.device": "cpu", "trainer.total_epochs": 1, "trainer.logger": "[]", "trainer.report": False,
        "trainer.default_local_dir": run,
    }  # fmt: skip
    rltrain.sft([f"{key}={value}" for key, value in keys.items()])
    model = AutoModelForCausalLM.from_pretrained(run / f"global_step_{options.steps}/huggingface")
    return model, read_metrics(run)[-1]["train/loss"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--task", choices=["calculator", "guess"], default="calculator", help="kind of conversation")
    parser.add_argument("--prompt", default="{low}-{high}?", help="guess: prompt, as in data_preprocess.guess_number")
    parser.add_argument("--low", type=int, default=1, help="guess: the smallest number")
    parser.add_argument("--high", type=int, default=15, help="guess: the largest number")
    parser.add_argument("--steps", type=int, default=300, help="warm-up steps; 0: random weights")
    parser.add_argument("--batch-size", type=int, default=128, help="conversations per warm-up step")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate of the warm-up")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and conversations")
    options = parser.parse_args(argv)
    if options.steps < 0:
        parser.error("--steps must be at least 0")
    if options.low > options.high:
        parser.error(f"--low {options.low} is over --high {options.high}")
    tokenizer = tokenizer_of(options)
    model = tiny_model(tokenizer, options.seed)
    talk = asked_for_a_sum if options.task == "calculator" else guessing(options.prompt, options.low, options.high)
    reached: dict[str, float] = {"step": options.steps}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    if options.steps:
        with tempfile.TemporaryDirectory(dir=options.output.parent) as work:
            save(model, tokenizer, {}, Path(work, "model"))
            write_rows(Path(work, "rows.jsonl"), talk, options)
            model, reached["loss"] = warm_up(Path(work, "model"), Path(work, "rows.jsonl"), options)
    save(model, tokenizer, reached, options.output)
    print(
        f"{options.output}: {sum(parameter.numel() for parameter in model.parameters()) / 1e6:.2f} million parameters"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
