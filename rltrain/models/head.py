"""Log-probs, entropy and an exact divergence from hidden states, without the logits of all tokens.

The logits of a batch are its largest tensor (8,192 tokens x 152k vocabulary x 4 bytes = 4.6 GiB), and autograd keeps
several tensors of this size. Therefore logits exist only for a chunk of tokens at a time and are recomputed in a
hand-written backward pass. Apart from the gradient of the head's weight, memory grows with neither vocabulary nor
tokens. The head's product may be in float32 with half-precision weights and states (MiniMax 2025, section 3.2), so that
logits are not rounded. Nonlinear heads are not supported, because they would need a second implementation. Under tensor
parallelism each rank has the logits of some tokens of the vocabulary: maxima and sums are reduced over the ranks, and
logits are never gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from rltrain.algorithms.distillation import Divergence, ReverseKL
from rltrain.common.device import device_of
from rltrain.config.schema.families import family
from rltrain.models.tensor_layers import Vocabulary, local

REVERSE_KL = ReverseKL()


class TokenLogProbs(NamedTuple):
    """Outputs of the head: log pi(label), entropy of pi, exact KL(pi || pi_ref), and sum over the vocabulary of pi^2.

    Each is [response tokens] in fp32, or None if not requested. The last has no gradient. The KL may be another
    divergence (`ReferenceStates`). experts: experts of each token [tokens of samples, layers, experts per token], in
    the order of `PackedInputs.by_sample`. balance_loss: load-balancing loss of the experts (scalar), if
    `PolicyModel.balance` enabled it.
    """

    log_probs: Tensor
    entropy: Tensor | None
    kl: Tensor | None
    sum_pi_squared: Tensor | None = None
    experts: Tensor | None = None
    balance_loss: Tensor | None = None


class ReferenceStates(NamedTuple):
    """Last hidden states of another model at the predictors [response tokens, hidden], and its head as a function."""

    hidden: Tensor
    logits: Callable[[Tensor, float], Tensor]
    """Function (hidden states, temperature) -> fp32 logits of at least the policy's vocabulary."""
    divergence: Divergence = REVERSE_KL
    """Divergence between the two distributions."""


def has_fp32_head(config: PretrainedConfig) -> bool:
    """Return whether the config's ``head_dtype`` (a name from vLLM) requests the head's product in float32."""
    return getattr(config, "head_dtype", None) == "float32"


def head_product(weight: Tensor, bias: Tensor | None, in_fp32: bool) -> Callable[[Tensor], Tensor]:
    """Return a function from states [n, size] to the head's output [n, vocabulary]. in_fp32: compute in float32."""
    if not in_fp32 or weight.dtype == torch.float32:
        return lambda states: nn.functional.linear(states, weight, bias)
    if weight.is_cuda:
        # Products of half-precision numbers are exact in float32, so cuBLAS can sum them without an fp32 copy of the
        # weight.
        def product(states: Tensor) -> Tensor:
            output = torch.mm(states, weight.t(), out_dtype=torch.float32)
            return output if bias is None else output.add_(bias.float())

        return product
    wide, wide_bias = weight.float(), None if bias is None else bias.float()
    return lambda states: nn.functional.linear(states.float(), wide, wide_bias)


class Scaling(NamedTuple):
    """Function after the head: logits = cap * tanh(multiplier * x / cap) / temperature. No tanh if cap is None."""

    multiplier: float = 1.0
    cap: float | None = None
    temperature: float = 1.0

    @classmethod
    def of(cls, config: PretrainedConfig) -> Scaling:
        """Return the scaling of the model's family, at temperature 1.

        Cohere multiplies by ``logit_scale``, Muse Glimmer by ``output_multiplier``, Granite divides by
        ``logits_scaling``, HyperCLOVA X multiplies by it, Gemma 2 soft-caps.
        """
        text = config.get_text_config()
        scaling = getattr(text, "logits_scaling", None) or 1.0
        scaling = scaling if family(text.model_type).multiplies_logits else 1 / scaling
        for name in ("logit_scale", "output_multiplier"):
            scaling *= getattr(text, name, None) or 1.0
        return cls(scaling, getattr(text, "final_logit_softcapping", None) or None)

    def apply(self, x: Tensor) -> Tensor:
        """Map the head's output [n, vocabulary] to fp32 logits."""
        logits = x.float()
        if not self.cap:
            factor = self.multiplier / self.temperature
            return logits if factor == 1 else logits * factor
        return torch.tanh(logits * (self.multiplier / self.cap)) * (self.cap / self.temperature)

    def apply_(self, x: Tensor) -> Tensor:
        """Compute the same as `apply`, bitwise, but in place if ``x`` is in fp32."""
        logits = x.float()
        if not self.cap:
            factor = self.multiplier / self.temperature
            return logits if factor == 1 else logits.mul_(factor)
        return logits.mul_(self.multiplier / self.cap).tanh_().mul_(self.cap / self.temperature)

    def backward_(self, gradient: Tensor, logits: Tensor | None) -> Tensor:
        """Convert the gradient of the logits, in place, to the gradient of the head's output. ``logits`` are needed if
        there is a cap."""
        if self.cap:
            assert logits is not None
            gradient.mul_(1 - (logits * (self.temperature / self.cap)).square_())
        factor = self.multiplier / self.temperature
        return gradient if factor == 1 else gradient.mul_(factor)


def token_log_probs(
    head: nn.Linear,
    hidden: Tensor,
    labels: Tensor,
    scaling: Scaling,
    with_entropy: bool,
    reference: ReferenceStates | None = None,
    in_fp32: bool = False,
    with_squares: bool = False,
) -> TokenLogProbs:
    """Compute log-probs of ``labels`` [n] under softmax(logits of ``hidden`` [n, size]), and other requested outputs.

    in_fp32: compute the head's product in float32; the gradients are rounded to the dtype of their tensors as usual.
    """
    asked = with_entropy, reference, in_fp32, with_squares
    weights = local(head.weight), local(head.bias), Vocabulary(head.weight)
    outputs = _TokenLogProbs.apply(hidden, *weights, labels, scaling, *asked)
    log_probs, entropy, kl, squares = outputs
    return TokenLogProbs(
        log_probs, entropy if with_entropy else None, kl if reference else None, squares if with_squares else None
    )


class _TokenLogProbs(torch.autograd.Function):
    """Log-probs with a hand-written backward pass. With p = softmax(z):

    d log p(l) / dz = 1_l - p;  dH / dz = -p (log p + H);  a divergence provides its gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        vocabulary: Vocabulary,
        labels: Tensor,
        scaling: Scaling,
        with_entropy: bool,
        reference: ReferenceStates | None,
        in_fp32: bool,
        with_squares: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # With ``set_materialize_grads(False)`` the gradient of an output that no loss uses is None, so backward can
        # skip its terms.
        ctx.set_materialize_grads(False)
        ctx.scaling, ctx.reference, ctx.in_fp32, ctx.vocabulary = scaling, reference, in_fp32, vocabulary
        output_of = head_product(weight, bias, in_fp32)
        log_probs, normaliser = (hidden.new_empty(len(labels), dtype=torch.float32) for _ in range(2))
        # Every output must be a tensor, so an empty one represents an output that is not requested.
        entropy = torch.empty_like(log_probs) if with_entropy else log_probs[:0].clone()
        kl = torch.empty_like(log_probs) if reference else log_probs[:0].clone()
        squares = torch.empty_like(log_probs) if with_squares else log_probs[:0].clone()
        kept = torch.empty_like(kl)
        columns = vocabulary.columns(labels, len(weight))
        for part in _chunks(len(labels), weight):
            logits = scaling.apply_(output_of(hidden[part]))
            # The normaliser is saved for backward, which would otherwise reduce over the vocabulary again.
            normaliser[part] = vocabulary.logsumexp(logits)
            log_pi = logits.sub_(normaliser[part, None])
            log_probs[part] = log_pi.gather(-1, columns[part, None])[:, 0]
            if with_entropy:
                entropy[part] = -torch.linalg.vecdot(log_pi.exp(), log_pi)
            if reference:
                theirs = _theirs(reference, part, scaling.temperature, len(weight), vocabulary)
                kl[part], kept[part] = reference.divergence.value(log_pi, theirs)
            if with_squares:
                squares[part] = torch.linalg.vecdot(probs := log_pi.exp(), probs)
        log_probs = vocabulary.own(log_probs, labels, len(weight))
        # All these outputs are sums over the vocabulary.
        vocabulary.sum(log_probs, entropy, kl, kept, squares)
        ctx.mark_non_differentiable(squares)
        ctx.save_for_backward(hidden, weight, bias, labels, normaliser, entropy, kept)
        return log_probs, entropy, kl, squares

    @staticmethod
    def backward(
        ctx: Any, of_log_probs: Tensor | None, of_entropy: Tensor | None, of_kl: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, normaliser, entropy, kept = ctx.saved_tensors
        scaling: Scaling = ctx.scaling
        output_of = head_product(weight, bias, ctx.in_fp32)
        vocabulary: Vocabulary = ctx.vocabulary
        columns = vocabulary.columns(labels, len(weight))
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if to_hidden else None
        # Gradients of the weights are in fp32, because the chunks are summed here, and half precision would round small
        # contributions away.
        d_weight = weight.new_zeros(weight.shape, dtype=torch.float32) if to_weight else None
        d_bias = bias.new_zeros(bias.shape, dtype=torch.float32) if to_bias else None
        for part in _chunks(len(labels), weight):
            logits = scaling.apply_(output_of(hidden[part]))
            # The derivative of tanh needs the logits, which the next line overwrites.
            capped = logits.clone() if scaling.cap else None
            log_pi = logits.sub_(normaliser[part, None])
            # If only the log-probs have a gradient (the usual case), no second tensor of the logits' size is needed.
            if of_log_probs is not None and of_entropy is None and of_kl is None:
                gradient = log_pi.exp_().mul_(-of_log_probs[part, None])
            else:
                factor = torch.zeros_like(log_pi)
                if of_entropy is not None:
                    factor.add_(log_pi).add_(entropy[part, None]).mul_(-of_entropy[part, None])
                if of_log_probs is not None:
                    factor.sub_(of_log_probs[part, None])
                of_divergence: Tensor | None = None
                if of_kl is not None:
                    theirs = _theirs(ctx.reference, part, scaling.temperature, len(weight), vocabulary)
                    of_divergence = ctx.reference.divergence.gradient(log_pi, theirs, kept[part])
                gradient = log_pi.exp_().mul_(factor)
                if of_divergence is not None and of_kl is not None:
                    gradient.addcmul_(of_divergence, of_kl[part, None])
            if of_log_probs is not None:
                of_labels = vocabulary.own(of_log_probs[part], labels[part], len(weight))
                gradient.scatter_add_(-1, columns[part, None], of_labels[:, None])
            gradient = scaling.backward_(gradient, capped)
            if d_bias is not None:
                d_bias += gradient.sum(0)
            gradient = gradient.to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(gradient, weight, out=d_hidden[part])
            # addmm_ requires one dtype for all tensors, and the sum is in fp32.
            if d_weight is not None and hidden.dtype == torch.float32:
                d_weight.addmm_(gradient.T, hidden[part])
            elif d_weight is not None:
                d_weight += gradient.T @ hidden[part]
        vocabulary.sum(d_hidden)
        return d_hidden, d_weight, d_bias, *[None] * 7


def _theirs(
    reference: ReferenceStates, part: slice, temperature: float, num_columns: int, vocabulary: Vocabulary
) -> Tensor:
    """Compute log pi_ref [part, vocabulary] of the policy's tokens, without padding rows of a larger model's head."""
    # Use the same operations as for log pi instead of log_softmax, so that the KL of equal models is exactly 0.
    logits = reference.logits(reference.hidden[part], temperature)[:, :num_columns]
    return logits.sub_(vocabulary.logsumexp(logits)[:, None])


def _chunks(num_tokens: int, weight: Tensor) -> Iterator[slice]:
    rows = max(1, device_of(weight).logits_at_once // len(weight))
    for start in range(0, num_tokens, rows):
        yield slice(start, start + rows)
