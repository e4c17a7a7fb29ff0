"""The packed forward pass: log-probs of the answers' tokens under the policy, and their entropy.

Both the log-prob passes and the update go through here, with the same packing, so an unchanged policy has ratio 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rltrain.batch import Batch
from rltrain.models.attention import SEGMENTS

# Logits exist for this many elements at a time (fp32: 256 MiB), forward and backward.
LOGITS_CHUNK = 2**26


@dataclass(frozen=True)
class PackedInputs:
    """One micro-batch as the model sees it.

    tokens, positions: [total]; segments: length of each sample (host integers). predictors, labels: [answer tokens], the
    place of the hidden state that predicts each answer token, and that token.
    """

    tokens: Tensor
    positions: Tensor
    segments: tuple[int, ...]
    predictors: Tensor
    labels: Tensor


def pack(batch: Batch, device: torch.device) -> PackedInputs:
    """``tokens`` (prompt and answer, ragged), ``prompt_length`` -> packed inputs. An empty batch packs to one dummy token."""
    if not len(batch):
        one = torch.zeros(1, dtype=torch.long, device=device)
        return PackedInputs(one, one, (1,), one[:0], one[:0])
    tokens = batch.ragged("tokens")
    positions = tokens.positions
    answer = (positions >= batch.dense("prompt_length")[tokens.row_ids]).nonzero()[:, 0]
    values = tokens.values.long()
    return PackedInputs(
        tokens=values.to(device),
        positions=positions.to(device),
        segments=tuple(tokens.lengths.tolist()),
        predictors=(answer - 1).to(device),
        labels=values[answer].to(device),
    )


class PolicyModel(nn.Module):
    """A causal language model whose forward returns log-probs, never logits. It is the unit that FSDP wraps."""

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def forward(self, inputs: PackedInputs, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Returns log pi(label) and the entropy of pi at each answer token, both [answer tokens] in fp32.

        pi is softmax(logits / temperature): the distribution that was sampled from, before top-k and top-p.
        """
        hidden = self.causal_lm.base_model(
            input_ids=inputs.tokens[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            **{SEGMENTS: inputs.segments},
        ).last_hidden_state[0]
        rows = max(1, LOGITS_CHUNK // self.causal_lm.config.get_text_config().vocab_size)
        chunks = zip(hidden[inputs.predictors].split(rows), inputs.labels.split(rows), strict=True)
        results = [self._score(states, labels, temperature, with_entropy) for states, labels in chunks]
        log_probs = torch.cat([result[0] for result in results])
        # Keeps every parameter in the graph when there is no answer token at all (a rank that only keeps step).
        log_probs = log_probs + 0.0 * hidden.float().sum() if not inputs.labels.numel() else log_probs
        return log_probs, torch.cat([result[1] for result in results]) if with_entropy else None

    def _score(self, hidden: Tensor, labels: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():
            return checkpoint(self._log_probs, hidden, labels, temperature, with_entropy, use_reentrant=False)
        return self._log_probs(hidden, labels, temperature, with_entropy)

    def _log_probs(
        self, hidden: Tensor, labels: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        logits = final_logits(self.causal_lm, hidden) / temperature
        normaliser = logits.logsumexp(-1)
        log_probs = logits.gather(-1, labels[:, None])[:, 0] - normaliser
        if not with_entropy:
            return log_probs, log_probs.detach()
        entropy = normaliser - (torch.softmax(logits, -1) * logits).sum(-1)
        return log_probs, entropy


def final_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Hidden states [n, hidden] -> logits [n, vocabulary] in fp32, with the scaling some families apply after the head.

    Cohere multiplies by ``logit_scale``, Granite divides by ``logits_scaling``, Gemma 2 soft-caps.
    """
    config = model.config.get_text_config()
    logits = model.get_output_embeddings()(hidden).float()
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if scale := getattr(config, "logits_scaling", None):
        logits = logits / scale
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits


def model_numbers(policy: PolicyModel) -> dict[str, int]:
    """num_parameters; matmul_parameters (without the input embedding, with the head); attention_width = layers x heads x head size."""
    config = policy.causal_lm.config.get_text_config()
    total = sum(parameter.numel() for parameter in policy.parameters())
    embedding = next(policy.causal_lm.get_input_embeddings().parameters())
    tied = embedding is next(policy.causal_lm.get_output_embeddings().parameters())
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "num_parameters": total,
        "matmul_parameters": total if tied else total - embedding.numel(),
        "attention_width": config.num_hidden_layers * config.num_attention_heads * head_size,
    }
