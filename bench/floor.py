"""Lower bound of a step's time: the same decoder in plain torch without a trainer, packed or with shared prompts.

Optimised for speed on one process only: Qwen3, prompts of equal length, responses of equal length. With shared prompts,
every prompt is computed once for all its responses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import Qwen3ForCausalLM

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Group:
    """tokens [groups, prompt], responses [groups, n, length]."""

    prompts: Tensor
    answers: Tensor

    def __getitem__(self, part: slice) -> Group:
        return Group(self.prompts[part], self.answers[part])


class Floor:
    """Weights of ``model`` as fp32 leaves, used in ``dtype``."""

    def __init__(self, model: Qwen3ForCausalLM, dtype: torch.dtype) -> None:
        self.config = model.config
        self.dtype = dtype
        self.heads, self.kv, self.size = (
            model.config.num_attention_heads,
            model.config.num_key_value_heads,
            model.config.head_dim,
        )
        self.weights = {
            name.removeprefix("model."): parameter.detach().clone().requires_grad_()
            for name, parameter in model.named_parameters()
        }
        self._head = "embed_tokens.weight" if model.config.tie_word_embeddings else "lm_head.weight"
        frequencies = 1.0 / model.config.rope_parameters["rope_theta"] ** (torch.arange(0, self.size, 2) / self.size)
        self._angles = torch.outer(torch.arange(2048), frequencies).repeat(1, 2)

    def cast(self) -> dict[str, Tensor]:
        """Return the weights in the compute dtype, for one forward."""
        return {name: weight.to(self.dtype) for name, weight in self.weights.items()}

    def hidden(self, weights: dict[str, Tensor], tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the last hidden states [tokens, hidden]. attend(layer, q [t, heads, d], k, v [t, kv, d]) -> [t, heads,
        d]."""
        x = weights["embed_tokens.weight"][tokens]
        cos, sin = (f(self._angles[positions])[:, None].to(self.dtype) for f in (torch.cos, torch.sin))
        for layer in range(self.config.num_hidden_layers):
            w = {
                name.partition(f"layers.{layer}.")[2]: weight
                for name, weight in weights.items()
                if f"layers.{layer}." in name
            }
            h = self._norm(x, w["input_layernorm.weight"])
            q, k, v = (linear(h, w[f"self_attn.{name}_proj.weight"]).unflatten(-1, (-1, self.size)) for name in "qkv")
            q, k = (
                self._rotate(self._norm(heads, w[f"self_attn.{name}_norm.weight"]), cos, sin)
                for name, heads in (("q", q), ("k", k))
            )
            x = x + linear(attend(layer, q, k, v).flatten(-2), w["self_attn.o_proj.weight"])
            h = self._norm(x, w["post_attention_layernorm.weight"])
            gate = silu(linear(h, w["mlp.gate_proj.weight"])) * linear(h, w["mlp.up_proj.weight"])
            x = x + linear(gate, w["mlp.down_proj.weight"])
        return self._norm(x, weights["norm.weight"])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat((-right, left), -1) * sin

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute attention of q [n, t, heads, d] over the last t of k, v [n, s, kv, d], causal.

        The query heads of a key head are stacked as queries.
        """
        n, t, _, _ = q.shape
        share = self.heads // self.kv
        stacked = q.unflatten(2, (self.kv, share)).permute(0, 2, 3, 1, 4).reshape(n, self.kv, share * t, self.size)
        mask = torch.ones(t, k.shape[1], dtype=torch.bool).tril(k.shape[1] - t).repeat(share, 1)
        out = scaled_dot_product_attention(stacked, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
        return out.unflatten(2, (share, t)).permute(0, 3, 1, 2, 4).reshape(n, t, self.heads, self.size)

    # -- log-probs -----------------------------------------------------------------------------------------------------

    def log_probs(self, batch: Group, shared: bool) -> Tensor:
        """Return log pi of every response token [groups, n, length]."""
        weights = self.cast()
        hidden = self._shared(weights, batch) if shared else self._packed(weights, batch)
        logits = linear(hidden, weights[self._head]).float()
        return logits.gather(-1, batch.answers[..., None])[..., 0] - logits.logsumexp(-1)

    def _packed(self, weights: dict[str, Tensor], batch: Group) -> Tensor:
        groups, n, length = batch.answers.shape
        rows = torch.cat([batch.prompts[:, None].expand(-1, n, -1), batch.answers], -1).flatten(0, 1)
        positions = torch.arange(rows.shape[1]).repeat(len(rows))

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._attention(*(part.unflatten(0, rows.shape) for part in (q, k, v))).flatten(0, 1)

        hidden = self.hidden(weights, rows.flatten(), positions, attend).unflatten(0, rows.shape)
        return hidden[:, -length - 1 : -1].unflatten(0, (groups, n))

    def _shared(self, weights: dict[str, Tensor], batch: Group) -> Tensor:
        groups, n, length = batch.answers.shape
        start = batch.prompts.shape[1]
        count = groups * start
        tokens = torch.cat([batch.prompts.flatten(), batch.answers.flatten()])
        positions = torch.cat(
            [torch.arange(start).repeat(groups), torch.arange(start, start + length).repeat(groups * n)]
        )

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads = [part[:count].unflatten(0, (groups, start)) for part in (q, k, v)]
            tails = [part[count:].unflatten(0, (groups * n, length)) for part in (q, k, v)]
            keys, values = (
                torch.cat([head.repeat_interleave(n, 0), tail], 1)
                for head, tail in zip(heads[1:], tails[1:], strict=True)
            )
            return torch.cat(
                [self._attention(*heads).flatten(0, 1), self._attention(tails[0], keys, values).flatten(0, 1)]
            )

        hidden = self.hidden(weights, tokens, positions, attend)
        last = hidden[:count].unflatten(0, (groups, start))[:, -1]
        answers = hidden[count:].unflatten(0, (groups, n, length))
        return torch.cat([last[:, None, None].expand(-1, n, 1, -1), answers[:, :, :-1]], 2)

    # -- generation ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(self, prompts: Tensor, n: int, length: int) -> tuple[Tensor, Tensor]:
        """Generate responses and log-probs [groups, n, length]: prompts read once, keys shared, weights in compute
        dtype."""
        weights = self.cast()
        groups, start = prompts.shape
        rows, share = groups * n, self.heads // self.kv
        cache: dict[int, tuple[Tensor, ...]] = {}

        def first(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (part.unflatten(0, (groups, start)) for part in (q, k, v))
            keys = torch.empty(
                rows, self.kv, self.size, length, dtype=self.dtype
            )  # transposed: decode is a matrix product
            cache[layer] = (
                k.permute(0, 2, 3, 1).contiguous(),
                v.transpose(1, 2).contiguous(),
                keys,
                keys.new_empty(rows, self.kv, length, self.size),
            )
            return self._attention(q, k, v).flatten(0, 1)

        hidden = self.hidden(weights, prompts.flatten(), torch.arange(start).repeat(groups), first)
        state = hidden.unflatten(0, (groups, start))[:, -1].repeat_interleave(n, 0)
        tokens, log_probs = torch.empty(rows, length, dtype=torch.long), torch.empty(rows, length)
        for at in range(length):
            tokens[:, at], log_probs[:, at] = self._sample(linear(state, weights[self._head]))
            if at == length - 1:
                break

            def step(layer: int, q: Tensor, k: Tensor, v: Tensor, at: int = at) -> Tensor:
                prompt_k, prompt_v, keys, values = cache[layer]
                keys[..., at], values[:, :, at] = k, v
                q = q.unflatten(1, (self.kv, share)) * self.size**-0.5
                grouped = q.unflatten(0, (groups, n)).transpose(1, 2).reshape(groups, self.kv, n * share, self.size)
                before = (
                    (grouped @ prompt_k).unflatten(2, (n, share)).transpose(1, 2).reshape(rows, self.kv, share, start)
                )
                scores = torch.cat([before, q @ keys[..., : at + 1]], -1).softmax(-1)
                ahead = (
                    scores[..., :start]
                    .reshape(groups, n, self.kv, share, start)
                    .transpose(1, 2)
                    .reshape(groups, self.kv, n * share, start)
                )
                out = (
                    (ahead @ prompt_v).unflatten(2, (n, share)).transpose(1, 2).reshape(rows, self.kv, share, self.size)
                )
                return (out + scores[..., start:] @ values[:, :, : at + 1]).flatten(1, 2)

            state = self.hidden(weights, tokens[:, at], torch.full((rows,), start + at), step)
        return tokens.view(groups, n, length), log_probs.view(groups, n, length)

    @staticmethod
    def _sample(logits: Tensor) -> tuple[Tensor, Tensor]:
        """Sample one token per row by the inverse of the cumulative distribution, with its log-prob."""
        probs = torch.softmax(logits.float(), -1)
        drawn = torch.searchsorted(probs.cumsum(-1), torch.rand(len(probs), 1)).clamp(max=probs.shape[-1] - 1)
        return drawn[:, 0], probs.gather(-1, drawn)[:, 0].log()

    # -- update --------------------------------------------------------------------------------------------------------

    def update(
        self, batch: Group, reference: Tensor, optimizer: torch.optim.Optimizer, shared: bool, micro: int, minis: int
    ) -> None:
        """Run ``minis`` optimizer steps of PPO with a KL (k3) to ``reference``, ``micro`` groups at a time."""
        size = len(batch.prompts) // minis
        for first in range(0, len(batch.prompts), size):
            for at in range(first, first + size, micro):
                part = slice(at, at + micro)
                log_probs = self.log_probs(batch[part], shared)
                ratio, gap = (log_probs - log_probs.detach()).exp(), reference[part] - log_probs
                loss = -torch.minimum(ratio, ratio.clamp(0.8, 1.2)) + 0.001 * (gap.exp() - 1 - gap)
                (loss.sum() / batch.answers[first : first + size].numel()).backward()
            torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
