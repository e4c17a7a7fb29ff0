"""The packed forward pass: log-probs of the answers' tokens under the policy, their entropy and exact KL; values and scores.

Both the log-prob passes and the update go through here, with the same packing, so an unchanged policy has ratio 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from rltrain.batch import Batch
from rltrain.models.attention import PLAN, AttentionPlan, Segment
from rltrain.models.head import ReferenceStates, Scaling, TokenScores, token_scores
from rltrain.models.ulysses import GROUP, share_of_row


@dataclass(frozen=True)
class PackedInputs:
    """One micro-batch as the model sees it.

    tokens, positions: [total]; plan: who sees whom (host integers). predictors, labels: [answer tokens], the place of the
    hidden state that predicts each answer token, and that token.
    """

    tokens: Tensor
    positions: Tensor
    plan: AttentionPlan
    predictors: Tensor
    labels: Tensor


def joins(prompt_length: Any, answer_length: Any) -> Any:
    """Whether an answer shares its prompt with the others: where the prompt is too short, the saving is not worth the gathering."""
    return 16 * prompt_length >= answer_length


def pack(batch: Batch, device: torch.device, *, share: bool = True) -> PackedInputs:
    """``tokens`` (prompt and answer, ragged), ``prompt_length`` -> packed inputs. An empty batch packs to one dummy token.

    With ``share``, consecutive samples with the same prompt share its tokens: the prompt once, then the answers that see it,
    positions going on from its end; the prompt's last state predicts the first token of each. The last token of an answer
    predicts nothing and is left out.
    """
    if not len(batch):
        one = torch.zeros(1, dtype=torch.long, device=device)
        return PackedInputs(one, one, AttentionPlan.of_lengths([1]), one[:0], one[:0])
    values, starts = batch.ragged("tokens").values, batch.ragged("tokens").offsets.tolist()
    prompts, answers = _lengths(batch)
    owners = _owners(batch) if share else list(range(len(batch)))
    num_sharing = Counter(owners)
    laid = _Laid()
    places: dict[int, tuple[int, int]] = {}
    predictors, labels = [], []
    for sample, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        start, own = starts[sample], max(answer - 1, 0)
        owner = owners[sample]
        if num_sharing[owner] == 1:
            end = laid.add(start, prompt + own) - own
            predictors.append(torch.arange(end - 1, end - 1 + answer))
        else:
            if owner not in places:
                end = laid.add(start, prompt)
                places[owner] = (end - prompt, end)
            prefix = places[owner]
            end = laid.add(start + prompt, own, prefix) if own else 0
            predictors.append(torch.cat([torch.tensor([prefix[1] - 1] * (answer > 0)), torch.arange(end - own, end)]))
        labels.append(values[start + prompt : start + prompt + answer])
    return PackedInputs(
        tokens=values[torch.cat(laid.rows)].long().to(device),
        positions=torch.cat(laid.positions).to(device),
        plan=AttentionPlan(tuple(laid.segments)),
        predictors=torch.cat(predictors).long().to(device),
        labels=torch.cat(labels).long().to(device),
    )


class _Laid:
    """Segments as they are laid one behind the other."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.segments: list[Segment] = []

    def add(self, row: int, length: int, prefix: tuple[int, int] = (0, 0)) -> int:
        """``length`` tokens from place ``row`` of the batch on. Returns where they end."""
        start = self.segments[-1].stop if self.segments else 0
        self.segments.append(Segment(start, start + length, prefix))
        self.rows.append(torch.arange(row, row + length))
        self.positions.append(torch.arange(length) + self.segments[-1].prefix_length)
        return start + length


def _lengths(batch: Batch) -> tuple[list[int], list[int]]:
    """Tokens of prompt and answer of each sample."""
    prompts = batch.dense("prompt_length")
    return prompts.tolist(), (batch.ragged("tokens").lengths - prompts).tolist()


def _owners(batch: Batch) -> list[int]:
    """A number for each sample: the same for consecutive ones with one prompt, but for those that do not `join` them."""
    rows = batch.ragged("tokens").rows()
    prompts, answers = _lengths(batch)
    owners: list[int] = []
    first = 0
    for sample, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if prompt != prompts[first] or not torch.equal(rows[first][:prompt], rows[sample][:prompt]):
            first = sample
        owners.append(first if joins(prompt, answer) else -1 - sample)
    return owners


def pack_whole(rows: Sequence[Sequence[int]], device: torch.device) -> PackedInputs:
    """Rows of token ids, with the last token of each as the place that is asked for. No rows pack to one dummy token."""
    if not rows:
        return pack(Batch(), device)
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.tensor([token for row in rows for token in row])
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    ends = lengths.cumsum(0) - 1
    return PackedInputs(
        tokens.to(device),
        positions.to(device),
        AttentionPlan.of_lengths(lengths.tolist()),
        ends.to(device),
        tokens[ends].to(device),
    )


class PackedModel(nn.Module):
    """A Hugging Face model over packed sequences: the unit that FSDP wraps. ``group``: ranks that hold each sequence together."""

    def __init__(self, model: PreTrainedModel, group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.model = model
        self.group = group

    def hidden(self, inputs: PackedInputs) -> Tensor:
        """Last hidden states [total, hidden]."""
        return self.model.base_model(
            input_ids=inputs.tokens[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            **{PLAN: inputs.plan, GROUP: self.group},
        ).last_hidden_state[0]


class PolicyModel(PackedModel):
    """A causal language model whose forward returns log-probs, never logits."""

    def forward(
        self,
        inputs: PackedInputs,
        temperature: float = 1.0,
        with_entropy: bool = False,
        reference: ReferenceStates | None = None,
        *,
        states_only: bool = False,
    ) -> TokenScores | Tensor:
        """Scores of the labels. pi is softmax(logits / temperature): what was sampled from, before top-k and top-p.

        ``reference``: also the exact KL to it. ``states_only``: the hidden states at the predictors instead,
        which like those of ``reference`` are those of this rank's slice of the row.
        """
        inputs, collect = share_of_row(inputs, self.group)
        hidden = self.hidden(inputs)
        if states_only:
            return hidden[inputs.predictors]
        head, scaling = (
            self.model.get_output_embeddings(),
            Scaling.of(self.model.config)._replace(temperature=temperature),
        )
        scores = token_scores(head, hidden[inputs.predictors], inputs.labels, scaling, with_entropy, reference)
        if not inputs.labels.numel():
            # Keeps every parameter in the graph when there is no answer token at all (a rank that only keeps step).
            scores = scores._replace(log_probs=scores.log_probs + 0.0 * hidden.float().sum())
        rest = (each if each is None else collect(each) for each in (scores.entropy, scores.kl))
        return TokenScores(collect(scores.log_probs), *rest)


class ScalarModel(PackedModel):
    """A decoder under a linear head: one number at every place that is asked for. Critic and reward model."""

    def __init__(self, model: PreTrainedModel, group: ProcessGroup | None = None) -> None:
        super().__init__(model, group)
        parameter = next(model.parameters())
        size = model.config.get_text_config().hidden_size
        self.score = nn.Linear(size, 1, bias=False, device=parameter.device, dtype=parameter.dtype)

    def forward(self, inputs: PackedInputs) -> Tensor:
        """The head's output at the predictors [answer tokens], in fp32."""
        inputs, collect = share_of_row(inputs, self.group)
        hidden = self.hidden(inputs)
        values = hidden[inputs.predictors].float() @ self.score.weight[0].float()
        return collect(values if inputs.labels.numel() else values + 0.0 * hidden.float().sum())


def final_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Hidden states [n, hidden] -> logits [n, vocabulary] in fp32, with the scaling some families apply after the head."""
    return Scaling.of(model.config).apply(model.get_output_embeddings()(hidden))


def model_numbers(policy: PackedModel) -> dict[str, int]:
    """num_parameters, and trained_parameters of them; matmul_parameters that a token meets (without the input embedding,
    with the head, of the experts those that it is sent to);
    attention_width = layers x heads x head size."""
    config = policy.model.config.get_text_config()
    known = config.to_dict()  # a config whose layers differ refuses to be asked for one head size
    total = sum(parameter.numel() for parameter in policy.parameters())
    embedding = next(policy.model.get_input_embeddings().parameters())
    tied = embedding is next(policy.model.get_output_embeddings().parameters())
    head_size = known.get("head_dim") or config.hidden_size // config.num_attention_heads
    experts = next(
        (known[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if known.get(name)), 0
    )
    idle = 1 - known.get("num_experts_per_tok", experts) / experts if experts else 0.0
    in_experts = sum(weight.numel() for name, weight in policy.named_parameters() if ".experts." in name)
    return {
        "num_parameters": total,
        "trained_parameters": sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad),
        "matmul_parameters": (total if tied else total - embedding.numel()) - round(idle * in_experts),
        "attention_width": config.num_hidden_layers * config.num_attention_heads * head_size,
    }
