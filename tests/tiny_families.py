"""Random models of many families that call tools: a few tokens are complete calls in the family's format."""

import json
import string
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rltrain.common.columns import names as c
from rltrain.data.turns.calls import FORMATS
from rltrain.data.turns.detect import format_of
from rltrain.data.turns.turn_delta import TurnDelta
from rltrain.models.load import load_config, model_kind
from rltrain.run.preflight.small import random_model, small_copy
from tests.data.turns.families import FAMILIES, TEMPLATES


@dataclass(frozen=True)
class Calling:
    """A model and its call format. kind: transformers' model_type; fields: of its configuration."""

    kind: str
    template: str
    """The template's name in tests/data/turns/families.py."""
    fields: dict[str, Any] = field(default_factory=dict)
    is_fast: bool = False
    """True if it represents similar models in the ordinary tests."""
    most: float = 1e-5
    """Maximum distance of a log-prob; in some families float32 itself differs that much from float64."""


CALLING = {
    "qwen2": Calling("qwen2", "hermes"),
    "qwen3": Calling("qwen3", "thinking", is_fast=True),
    "qwen3_moe": Calling("qwen3_moe", "thinking"),
    "qwen3_5": Calling("qwen3_5_text", "coder", is_fast=True, most=1e-4),
    "qwen3_next": Calling("qwen3_next", "coder", most=1e-4),
    "qwen3_vl": Calling("qwen3_vl", "hermes"),
    "llama": Calling("llama", "llama", is_fast=True),
    "llama4": Calling("llama4_text", "llama", {"num_hidden_layers": 4}),
    "mistral": Calling("mistral", "mistral"),
    "mixtral": Calling("mixtral", "mistral"),
    "gemma3": Calling("gemma3_text", "hermes"),
    "gemma4": Calling("gemma4_text", "gemma", is_fast=True, most=1e-4),
    "glm4": Calling("glm4", "glm"),
    "glm4_moe": Calling("glm4_moe", "glm"),
    "deepseek_v3": Calling("deepseek_v3", "deepseek"),
    "deepseek_v3 as V4 calls": Calling("deepseek_v3", "deepseek_v4", is_fast=True),
    "kimi_k2": Calling("deepseek_v3", "kimi"),
    "gpt_oss": Calling("gpt_oss", "harmony", is_fast=True),
    "minimax_m2": Calling("minimax_m2", "minimax"),
    "seed_oss": Calling("seed_oss", "seed"),
    "phi3": Calling("phi3", "hermes"),
    "olmo3": Calling("olmo3", "hermes"),
    "granite": Calling("granite", "hermes"),
    "smollm3": Calling("smollm3", "thinking"),
}
# With calmer matrices than those that are to show mistakes, more than a few tokens are likely.
_CALM = 0.5
# (a, b) of the tool of tests/tiny_tools.py.
SUMS = [(a, b) for a in range(6) for b in range(5)]


def calls_of(template: str) -> dict[str, tuple[int, int]]:
    """Return the text that a call adds, by its token."""
    call_format = FORMATS[FAMILIES[template][2] or "hermes"]
    assert call_format.write
    # Llama's calls begin the turn, or stand behind a token.
    head = "<|python_tag|>" if template == "llama" else ""
    return {head + call_format.write("add", {"a": a, "b": b}): (a, b) for a, b in SUMS}


def save_calling_family(folder: Path, calling: Calling) -> Path:
    """Save a small random copy of the family's model, its tokenizer and its chat template."""
    ends, special, _ = FAMILIES[calling.template]
    calls = list(calls_of(calling.template))
    vocabulary = ["<pad>", "<unk>", *ends, *special, *calls, *string.printable[:95], "\n"]
    tokenizer = Tokenizer(models.WordLevel({token: id for id, token in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token=ends[0], unk_token="<unk>",
        additional_special_tokens=[*ends[1:], *special],
    )  # fmt: skip
    fast.chat_template = (TEMPLATES / f"{calling.template}.jinja").read_text(encoding="utf-8")
    fast.save_pretrained(folder)
    stops = [vocabulary.index(text) for text in (*ends, *calls)]
    config = small_copy(CONFIG_MAPPING[calling.kind](**calling.fields))
    text = config.get_text_config()
    for name in ("vocab_size", "vocab_size_per_layer_input"):
        if getattr(text, name, None):
            setattr(text, name, len(vocabulary))
    text.eos_token_id, text.pad_token_id, text.bos_token_id = stops[0], 0, None
    model = random_model(config, decoder_only=False, trust_remote_code=False)
    with torch.no_grad():
        for weight in model.parameters():
            weight *= _CALM if weight.dim() > 1 else 1.0
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return folder


# Changes to a run of `tool_run`: prompts have room for what templates write of tools, and answers for many turns.
ROOM = {
    "data__max_prompt_length": 900,
    "data__max_response_length": 300,
    "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 2400,
    "actor_rollout_ref__rollout__n": 3,
    "actor_rollout_ref__rollout__multi_turn__max_parallel_calls": 3,
    "actor_rollout_ref__rollout__multi_turn__num_tool_processes": 2,
    # No text of a result may depend on how busy the machine is.
    "actor_rollout_ref__rollout__multi_turn__tool_timeout_s": 600,
}


@dataclass
class Measured:
    """The measured properties of a generation with tools."""

    call_format: str
    num_turns: int = 0
    """Turns of all responses."""
    most_turns: int = 0
    num_contexts: int = 0
    """Results of calls; every token equals that of a second `TurnDelta`."""
    num_problems: int = 0
    """Contexts that report an error of the policy's call."""
    gap: float = 0.0
    """The largest distance of a log-prob from that of transformers' own attention over the single response."""


def measured(trainer: Any, folder: Path) -> Measured:
    """Measure responses of the policy in ``folder``, by the run's own engine and tools."""
    worker = trainer.worker.rollout
    encoder = worker.encoder
    call_format = format_of("auto", encoder)
    delta = TurnDelta(encoder, encoder.tools, call_format)
    batch, _, numbers = worker.generate(trainer.experience_task())
    config = load_config(str(folder))
    model = model_kind(config, decoder_only=False).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    prompts = batch.dictionary(c.PROMPT)
    columns = [batch.ragged(column).rows() for column in (c.RESPONSE, c.RESPONSE_MASK, c.ROLLOUT_LOG_PROBS)]
    result = Measured(call_format.name)
    for place, answer, mask, recorded, num_turns in zip(
        prompts.index.tolist(), *columns, numbers.per_sample[c.NUM_TURNS].tolist(), strict=True
    ):
        expected = _log_probs(model.eval(), prompts.values.rows()[place].long(), answer.long())[mask]
        assert len(recorded) == len(expected)
        result.gap = max(result.gap, float((expected - recorded).abs().max()))
        parts = np.split(answer.numpy(), np.flatnonzero(np.diff(mask.numpy().astype(int))) + 1)
        assert len(parts) == 2 * num_turns - 1
        assert mask[0]
        result.num_turns, result.most_turns = result.num_turns + num_turns, max(result.most_turns, num_turns)
        for turn, context in zip(parts[::2], parts[1::2], strict=False):
            (text,) = encoder.decode_batch([turn], special=True)
            said = call_format.parse(text, encoder.tools)
            if said.problems or len(said.calls) > 3:
                result.num_problems += 1
                continue
            results = [
                {"role": "tool", "name": "add", "content": str(call.arguments["a"] + call.arguments["b"])}
                for call in said.calls
            ]
            assert delta.context(turn[-1], said.calls, results) == context.tolist()
            result.num_contexts += 1
    return result


def _log_probs(model: Any, prompt: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, answer[:, None])[:, 0]
