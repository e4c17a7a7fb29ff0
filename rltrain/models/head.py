"""From hidden states to log-probs, entropy and an exact divergence without the logits of all tokens.

The logits of a batch are its largest tensor (8,192 tokens x 152k vocabulary x 4 bytes = 4.6 GiB), and automatic
differentiation keeps several of it. So logits exist for a chunk of tokens at a time and are computed again in a
backward pass written by hand; memory then grows with neither vocabulary nor tokens, beyond the gradient of the head's
weight. The head's product may be in float32 over half-precision weights and states (MiniMax 2025, section 3.2), so that
no logit is rounded. Left out: heads that are more than a linear map, which would need the plain way beside this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from rltrain.algorithms.distillation import Divergence, ReverseKL
from rltrain.base.device import device_of
from rltrain.config.schema.families import family

REVERSE_KL = ReverseKL()


class TokenLogProbs(NamedTuple):
    """log pi(label), entropy of pi, exact KL(pi || pi_ref), sum over the vocabulary of pi^2, each [answer tokens] in
    fp32; None where not asked for. The last has no gradient.

    In place of the KL may stand another divergence (`ReferenceStates`). experts: where the tokens went
    [tokens of samples, layers, experts per token], in the order of `PackedInputs.by_sample`. balance_loss: the loss on
    the balance of experts (scalar), where `PolicyModel.balance` has it computed.
    """

    log_probs: Tensor
    entropy: Tensor | None
    kl: Tensor | None
    sum_pi_squared: Tensor | None = None
    experts: Tensor | None = None
    balance_loss: Tensor | None = None


class ReferenceStates(NamedTuple):
    """Last hidden states of another model at the predictors [answer tokens, hidden], and its head as a function."""

    hidden: Tensor
    logits: Callable[[Tensor, float], Tensor]
    """Hidden states and a temperature -> fp32 logits, for at least as many tokens as the policy's head has."""
    divergence: Divergence = REVERSE_KL
    """What is computed of the two distributions."""


def has_fp32_head(config: PretrainedConfig) -> bool:
    """Whether the head's product is in float32, as the config's ``head_dtype`` says: a name of vLLM's."""
    return getattr(config, "head_dtype", None) == "float32"


def head_product(weight: Tensor, bias: Tensor | None, in_fp32: bool) -> Callable[[Tensor], Tensor]:
    """States [n, size] -> the head's output [n, vocabulary]. in_fp32: in float32, whatever both are in."""
    if not in_fp32 or weight.dtype == torch.float32:
        return lambda states: nn.functional.linear(states, weight, bias)
    if weight.is_cuda:
        # Products of half-precision numbers are exact in float32, so cuBLAS's sums of them need no copy of the weight.
        def product(states: Tensor) -> Tensor:
            output = torch.mm(states, weight.t(), out_dtype=torch.float32)
            return output if bias is None else output.add_(bias.float())

        return product
    wide, wide_bias = weight.float(), None if bias is None else bias.float()
    return lambda states: nn.functional.linear(states.float(), wide, wide_bias)


class Scaling(NamedTuple):
    """The function after the head: logits = cap * tanh(multiplier * x / cap) / temperature; cap None: no tanh."""

    multiplier: float = 1.0
    cap: float | None = None
    temperature: float = 1.0

    @classmethod
    def of(cls, config: PretrainedConfig) -> Scaling:
        """The scaling of the model's family, at temperature 1.

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
        """The head's output [n, vocabulary] -> fp32 logits."""
        logits = x.float()
        if not self.cap:
            factor = self.multiplier / self.temperature
            return logits if factor == 1 else logits * factor
        return torch.tanh(logits * (self.multiplier / self.cap)) * (self.cap / self.temperature)

    def apply_(self, x: Tensor) -> Tensor:
        """`apply`, to the last bit, in place where ``x`` is in fp32 already."""
        logits = x.float()
        if not self.cap:
            factor = self.multiplier / self.temperature
            return logits if factor == 1 else logits.mul_(factor)
        return logits.mul_(self.multiplier / self.cap).tanh_().mul_(self.cap / self.temperature)

    def backward_(self, gradient: Tensor, logits: Tensor | None) -> Tensor:
        """The gradient of the head's output, in place of that of the logits. ``logits`` are needed under a cap."""
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
    """Log-probs of ``labels`` [n] under softmax(logits of ``hidden`` [n, size]), and the others where asked for.

    in_fp32: the head's product is; the gradients of its factors are rounded to their dtype as without.
    """
    asked = with_entropy, reference, in_fp32, with_squares
    outputs = _TokenLogProbs.apply(hidden, head.weight, head.bias, labels, scaling, *asked)
    log_probs, entropy, kl, squares = outputs
    return TokenLogProbs(
        log_probs, entropy if with_entropy else None, kl if reference else None, squares if with_squares else None
    )


class _TokenLogProbs(torch.autograd.Function):
    """The backward pass by hand. With p = softmax(z):

    d log p(l) / dz = 1_l - p;  dH / dz = -p (log p + H);  that of a divergence is the divergence's own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scaling: Scaling,
        with_entropy: bool,
        reference: ReferenceStates | None,
        in_fp32: bool,
        with_squares: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # An output that no loss uses then has the gradient None, and backward can leave its terms out.
        ctx.set_materialize_grads(False)
        ctx.scaling, ctx.reference, ctx.in_fp32 = scaling, reference, in_fp32
        output_of = head_product(weight, bias, in_fp32)
        log_probs, normaliser = (hidden.new_empty(len(labels), dtype=torch.float32) for _ in range(2))
        # Every output must be a tensor, so an empty one stands for what was not asked for.
        entropy = torch.empty_like(log_probs) if with_entropy else log_probs[:0].clone()
        kl = torch.empty_like(log_probs) if reference else log_probs[:0].clone()
        squares = torch.empty_like(log_probs) if with_squares else log_probs[:0].clone()
        kept = torch.empty_like(kl)
        for part in _chunks(len(labels), weight):
            logits = scaling.apply_(output_of(hidden[part]))
            # The normaliser is kept for backward, which otherwise would reduce over the vocabulary a second time.
            normaliser[part] = logits.logsumexp(-1)
            log_pi = logits.sub_(normaliser[part, None])
            log_probs[part] = log_pi.gather(-1, labels[part, None])[:, 0]
            if with_entropy:
                entropy[part] = -torch.linalg.vecdot(log_pi.exp(), log_pi)
            if reference:
                theirs = _theirs(reference, part, scaling.temperature, len(weight))
                kl[part], kept[part] = reference.divergence.value(log_pi, theirs)
            if with_squares:
                squares[part] = torch.linalg.vecdot(probs := log_pi.exp(), probs)
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
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if to_hidden else None
        # In fp32, because the chunks are added up here: in half precision, small contributions would be rounded away.
        d_weight = weight.new_zeros(weight.shape, dtype=torch.float32) if to_weight else None
        d_bias = bias.new_zeros(bias.shape, dtype=torch.float32) if to_bias else None
        for part in _chunks(len(labels), weight):
            logits = scaling.apply_(output_of(hidden[part]))
            # The derivative of tanh needs the logits, which the next line overwrites.
            capped = logits.clone() if scaling.cap else None
            log_pi = logits.sub_(normaliser[part, None])
            # The usual case needs no second tensor as large as the logits.
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
                    theirs = _theirs(ctx.reference, part, scaling.temperature, len(weight))
                    of_divergence = ctx.reference.divergence.gradient(log_pi, theirs, kept[part])
                gradient = log_pi.exp_().mul_(factor)
                if of_divergence is not None and of_kl is not None:
                    gradient.addcmul_(of_divergence, of_kl[part, None])
            if of_log_probs is not None:
                gradient.scatter_add_(-1, labels[part, None], of_log_probs[part, None])
            gradient = scaling.backward_(gradient, capped)
            if d_bias is not None:
                d_bias += gradient.sum(0)
            gradient = gradient.to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(gradient, weight, out=d_hidden[part])
            # addmm_ wants all tensors in one dtype, and the sum is in fp32.
            if d_weight is not None and hidden.dtype == torch.float32:
                d_weight.addmm_(gradient.T, hidden[part])
            elif d_weight is not None:
                d_weight += gradient.T @ hidden[part]
        return d_hidden, d_weight, d_bias, None, None, None, None, None, None


def _theirs(reference: ReferenceStates, part: slice, temperature: float, vocabulary: int) -> Tensor:
    """log pi_ref [part, vocabulary], of the policy's tokens: rows that pad a larger model's head have none."""
    # By the same operations as log pi, and not by log_softmax: the KL of equal models is then 0 and not its rounding.
    logits = reference.logits(reference.hidden[part], temperature)[:, :vocabulary]
    return logits.sub_(logits.logsumexp(-1, keepdim=True))


def _chunks(num_tokens: int, weight: Tensor) -> Iterator[slice]:
    rows = max(1, device_of(weight).logits_at_once // len(weight))
    for start in range(0, num_tokens, rows):
        yield slice(start, start + rows)
