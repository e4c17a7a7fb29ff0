"""Create a small model to train on a CPU: a Qwen3 of a few million parameters with a tokenizer, that is sometimes
right; with ``--experts`` a GLM-4-MoE.

With ``--train`` a short supervised warm-up on the training file stops as soon as sampled responses reach
``--target-accuracy``. A share of the responses in the warm-up has an error (a digit one too high or too low), so the
model knows more than its responses show: most prompts get both right and wrong responses, and GRPO learns from that
difference. Nothing is downloaded; the same options give the same folder.
"""

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # threads that spin while they wait would block each other on a busy machine

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Glm4MoeConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

BOS, END, USER, ASSISTANT, SYSTEM, PAD = "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>"
SPECIALS = [BOS, END, USER, ASSISTANT, SYSTEM, PAD]
# ChatML with one token instead of three, because with short responses the prompts are most of the training cost.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Pattern by which Qwen's tokenizer splits text. transformers may rebuild a tokenizer from the model type; then it
# splits by this pattern, regardless of tokenizer.json. A tokenizer that already has this pattern cannot change.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MAX_POSITIONS = 512
MEASURED = 256
MAX_ANSWER = 8
EVERY = 10

Pair = tuple[list[int], str]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte: any text is encoded losslessly, and numbers are digits."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        model_max_length=MAX_POSITIONS,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, num_layers: int = 2, num_experts: int = 0
) -> PreTrainedModel:
    """Return a model of two layers by default, with 3.3 million parameters.

    Two wide layers learn sums in fewer steps than four narrow ones, and decode faster. With experts, each layer has
    ``num_experts``; a token uses two and a shared one, which together are about as wide as the dense layer.
    """
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": -(-len(tokenizer) // 32) * 32,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    experts = {
        "n_routed_experts": num_experts,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 352,
        "first_k_dense_replace": 0,
    }
    model = AutoModelForCausalLM.from_config(Glm4MoeConfig(**sizes, **experts) if num_experts else Qwen3Config(**sizes))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def read_pairs(file: Path, tokenizer: PreTrainedTokenizerFast) -> list[Pair]:
    """Return prompt tokens and right answer of every row of a parquet file in verl's schema."""
    import pyarrow.parquet as pq

    if not file.is_file():
        sys.exit(
            f"error: --train {file} does not exist. Make it with: python -m rltrain.data_preprocess.arithmetic --help"
        )
    table = pq.read_table(file, columns=["prompt", "reward_model"]).to_pylist()
    prompts = tokenizer.apply_chat_template(
        [row["prompt"] for row in table], add_generation_prompt=True, return_dict=False
    )
    return [(prompt, row["reward_model"]["ground_truth"]) for prompt, row in zip(prompts, table, strict=True)]


def slip(answer: str, rate: float, rng: random.Random) -> str:
    """Return the answer, or with probability ``rate`` the answer with one digit changed by one."""
    digits = [place for place, character in enumerate(answer) if character.isdigit()]
    if rng.random() >= rate or not digits:
        return answer
    place = rng.choice(digits)
    return answer[:place] + str((int(answer[place]) + rng.choice((1, 9))) % 10) + answer[place + 1 :]


def batches(
    pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerFast, size: int, slip_rate: float, rng: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield endless token ids [size, width] and labels: -100 except on the answer and its end token."""
    while True:
        inputs, labels = [], []
        for prompt, answer in rng.sample(pairs, min(size, len(pairs))):
            target = [*tokenizer.encode(slip(answer, slip_rate, rng)), tokenizer.eos_token_id]
            inputs.append(torch.tensor(prompt + target))
            labels.append(torch.tensor([-100] * len(prompt) + target))
        yield (
            torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True, padding_value=tokenizer.pad_token_id),
            torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100),
        )


@torch.inference_mode()
def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, pairs: Sequence[Pair], seed: int
) -> dict[str, float]:
    """Return the accuracy on ``pairs``, sampled at temperature 1 and greedy.

    Also returns the share of samples that are a number.
    """
    width = max(len(prompt) for prompt, _ in pairs)
    tokens = torch.tensor([[tokenizer.pad_token_id] * (width - len(prompt)) + prompt for prompt, _ in pairs])
    mask = (tokens != tokenizer.pad_token_id).long()
    right, numbers = {}, 0.0
    torch.manual_seed(seed)
    for name, sample in (("greedy", False), ("sampled", True)):
        output = model.generate(
            tokens, attention_mask=mask, max_new_tokens=MAX_ANSWER, do_sample=sample, top_k=0 if sample else None
        )
        ended = (output[:, width:] == tokenizer.eos_token_id).any(1).tolist()
        texts = tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
        right[name] = sum(e and t == a for e, t, (_, a) in zip(ended, texts, pairs, strict=True)) / len(pairs)
        numbers = sum(e and t.removeprefix("-").isdigit() for e, t in zip(ended, texts, strict=True)) / len(pairs)
    return {**right, "numbers": numbers}


def warm_up(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace) -> dict[str, Any]:
    """Run supervised steps until sampled responses are right often enough. Return the accuracies."""
    pairs = read_pairs(options.train, tokenizer)
    rng = random.Random(options.seed)
    watched = rng.sample(pairs, min(MEASURED, len(pairs)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)
    stream = batches(pairs, tokenizer, options.batch_size, options.slip_rate, rng)
    reached: dict[str, Any] = {}
    started = time.perf_counter()
    for step in range(1, options.steps + 1):
        tokens, labels = next(stream)
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1.0, step / 20)
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
        wanted = labels[:, 1:] != -100
        loss = F.cross_entropy(model.lm_head(hidden[wanted]), labels[:, 1:][wanted])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0 or step == options.steps:
            reached = {"step": step, "loss": round(loss.item(), 4), **measure(model, tokenizer, watched, options.seed)}
            if step % (5 * EVERY) == 0 or reached["sampled"] >= options.target_accuracy or step == options.steps:
                numbers = "  ".join(f"{name} {value:.3f}" for name, value in reached.items() if name != "step")
                print(f"warm-up step {step}: {numbers}  ({time.perf_counter() - started:.0f} s)", flush=True)
            if reached["sampled"] >= options.target_accuracy:
                break
    return reached


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, reached: dict[str, Any], output: Path) -> None:
    """Write the folder atomically, and check that transformers loads the same tokenizer from it."""
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / "warm_up.json").write_text(json.dumps(reached, indent=1) + "\n")
        check_round_trip(tokenizer, temporary)
        shutil.rmtree(output, ignore_errors=True)
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_round_trip(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Check that the ids are unchanged: transformers may rebuild a tokenizer from its model type."""
    loaded = AutoTokenizer.from_pretrained(folder)
    for text in ("12+7=?", "-3 * 40 = ", "Größe: 5\n\n  it's 100 %", "<|user|>1+1=?<|end|><|assistant|>2<|end|>"):
        ids = tokenizer.encode(text)
        if loaded.encode(text) != ids or loaded.decode(ids) != text:
            sys.exit(
                f"error: the tokenizer changes when it is saved and loaded: {text!r} -> {ids}, "
                f"then {loaded.encode(text)}"
            )
    messages = [{"role": "user", "content": "12+7=?"}]
    first, second = (
        t.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) for t in (tokenizer, loaded)
    )
    if first != second or (loaded.eos_token_id, loaded.pad_token_id) != (
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    ):
        sys.exit("error: the chat template or the special tokens change when the tokenizer is saved and loaded.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--train", type=Path, help="parquet file in verl's schema to warm up on; without it: random weights"
    )
    parser.add_argument("--task", choices=["arithmetic"], default="arithmetic", help="task in the file")
    parser.add_argument("--layers", type=int, default=2, help="decoder layers; a teacher has more")
    parser.add_argument("--experts", type=int, default=0, help="number of experts per layer; 0: none")
    parser.add_argument("--steps", type=int, default=400, help="maximum number of warm-up steps")
    parser.add_argument(
        "--target-accuracy", type=float, default=0.35, help="stop when this share of the sampled responses is right"
    )
    parser.add_argument("--slip-rate", type=float, default=0.4, help="share of warm-up responses with an error")
    parser.add_argument("--batch-size", type=int, default=128, help="problems per warm-up step")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of the warm-up")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, order and errors")
    options = parser.parse_args(argv)
    if min(options.steps, options.layers) < 1 or not 0 <= options.slip_rate < 1:
        parser.error("--steps and --layers must be at least 1 and --slip-rate in [0, 1)")
    if options.experts < 0 or options.experts == 1:
        parser.error("--experts must be 0, or at least 2, since a token goes to two")
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, options.seed, options.layers, options.experts)
    reached = warm_up(model, tokenizer, options) if options.train else {}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    save(model, tokenizer, reached, options.output)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{options.output}: {parameters / 1e6:.1f} million parameters, {len(tokenizer)} tokens")
    if reached and reached["sampled"] < options.target_accuracy:
        print(f"note: sampled accuracy {reached['sampled']:.2f} is below --target-accuracy after {options.steps} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
