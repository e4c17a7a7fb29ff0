"""The packed forward pass: log-probs of the answers' tokens with their entropy and exact KL, or values and rewards.

Both the log-prob passes and the update go through here, with the same packing, so that an unchanged policy has an
importance ratio of exactly 1. FSDP gathers weights when a module's forward is called; therefore the head is computed
inside the forward of the wrapped module, and the logits never leave it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from rltrain.base.errors import ConfigError
from rltrain.models.attention.packed import PLAN
from rltrain.models.attention.packing import PackedInputs
from rltrain.models.attention.ulysses import GROUP, share_of_row, slice_of_row, whole_row, whole_sum
from rltrain.models.head import (
    ReferenceStates,
    Scaling,
    TokenLogProbs,
    has_fp32_head,
    head_product,
    token_log_probs,
)
from rltrain.models.load import decoder_layers
from rltrain.models.routing import Routing, num_experts
from rltrain.models.vision import read_with_images, tower, tower_numbers


class PackedModel(nn.Module):
    """A Hugging Face model over packed sequences: the unit that FSDP wraps.

    group: the ranks that hold each sequence together (`ulysses`), or None. sees: prompts may have images, so the vision
    tower takes part in every forward.
    """

    sees = False

    def __init__(self, model: PreTrainedModel, group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.model = model
        self.group = group
        # Now, as sharding gives their classes other names.
        self._layers = decoder_layers(model)

    def train(self, mode: bool = True) -> PackedModel:
        """Training recomputes activations, which layers decide, and computes nothing else: noise of a router inside
        them would make the importance ratio of an unchanged policy differ from 1.
        """
        super().train(mode)
        for layer in self._layers:
            for part in layer.children():
                part.eval()
        return self

    def hidden(self, inputs: PackedInputs) -> Tensor:
        """Last hidden states [total, hidden]."""
        # By default, transformers would fill a cache with keys and values that nobody reads.
        arguments = {"use_cache": False, PLAN: inputs.plan, GROUP: self.group}
        if self.sees:
            return read_with_images(self.model, inputs.tokens, inputs.positions, inputs.images, **arguments)
        return trunk(self.model)(
            input_ids=inputs.tokens[None], position_ids=inputs.positions[None], **arguments
        ).last_hidden_state[0]


class PolicyModel(PackedModel):
    """A causal language model whose forward returns log-probs, never logits. Its head must be a plain linear layer."""

    def __init__(self, model: PreTrainedModel, group: ProcessGroup | None = None) -> None:
        super().__init__(model, group)
        # A subclass, such as a linear layer under adapters, computes more than its weight says, and we use the weight
        # alone.
        if type(head := model.get_output_embeddings()) is not nn.Linear:
            raise ConfigError(
                f"{type(model).__name__} has a {type(head).__name__} as its head; rltrain can compute log-probs only "
                "for a linear head without adapters."
            )
        self.routing = Routing(model, model.config) if num_experts(model.config) else None
        """Of a model with experts."""

    def measure_load(self) -> None:
        """Begin to count how many tokens go to each expert in forwards with gradients. Not with compiled layers."""
        if self.routing is not None:
            self.routing.measure_load()

    def load(self) -> Tensor | None:
        """Tokens that went to each expert [layers, experts] on this rank since `measure_load`, which ends.

        They are those of the samples, prompts and answers: a prompt that answers share counts for each of them, and
        neither padding nor what only keeps ranks in step counts. So the sum over ranks does not depend on how samples
        are laid out. None: the model has no experts, or routers that do not show where tokens go.
        """
        return self.routing.load() if self.routing is not None else None

    def balance(self, weights: Tensor | None) -> None:
        """Have forwards with gradients compute the loss on the balance of experts, with these weights [layers, experts]
        (`algorithms.expert_balance`); None: not."""
        if self.routing is not None:
            self.routing.balance(weights)

    def forward(
        self,
        inputs: PackedInputs,
        temperature: float = 1.0,
        with_entropy: bool = False,
        reference: ReferenceStates | None = None,
        with_squares: bool = False,
        with_experts: bool = False,
        *,
        states_only: bool = False,
    ) -> TokenLogProbs | Tensor:
        """Log-probs of the labels under softmax(logits / temperature): the sampling distribution before top-k and
        top-p.

        reference: also return the exact KL to it. with_squares: also the sum over the vocabulary of pi^2.
        with_experts: also where the tokens went. states_only: return the hidden states at the predictors instead.
        Under sequence parallelism these cover this rank's slice only, as do the states in ``reference``.
        """
        total = inputs.plan.num_tokens
        counts = self.routing is not None and self.routing.counts and torch.is_grad_enabled()
        times = slice_of_row(inputs.times_counted(), self.group) if counts else None
        inputs, collect = share_of_row(inputs, self.group)
        hidden, experts = self._routed(inputs, times, record=with_experts)
        if states_only:
            return hidden[inputs.predictors]
        if experts is not None:
            experts = whole_row(experts, total, self.group)[inputs.by_sample()]
        head, config = self.model.get_output_embeddings(), self.model.config
        scaling, states = Scaling.of(config)._replace(temperature=temperature), hidden[inputs.predictors]
        asked = with_entropy, reference, has_fp32_head(config), with_squares
        outputs = token_log_probs(head, states, inputs.labels, scaling, *asked)
        if not inputs.labels.numel():
            # A rank without answer tokens only keeps step: every parameter must stay in its graph.
            outputs = outputs._replace(log_probs=outputs.log_probs + 0.0 * hidden.float().sum())
        others = (values if values is None else collect(values) for values in outputs[1:])
        outputs = TokenLogProbs(collect(outputs.log_probs), *others)._replace(experts=experts)
        balance = self.routing.balance_loss() if self.routing is not None and counts else None
        return outputs if balance is None else outputs._replace(balance_loss=whole_sum(balance, self.group))

    def _routed(self, inputs: PackedInputs, times: Tensor | None, *, record: bool) -> tuple[Tensor, Tensor | None]:
        """The hidden states of tokens that go where ``inputs`` says, and where they went if that is asked. times: how
        often the load counts each token.
        """
        if self.routing is None:
            return self.hidden(inputs), None
        self.routing.replay(inputs.experts)
        if record:
            self.routing.record()
        with self.routing.counting(times):
            hidden = self.hidden(inputs)
        return hidden, self.routing.recorded() if record else None


class ScalarModel(PackedModel):
    """A decoder under a linear head, for critic and reward model: one number per predictor.

    The head is called ``score``, because Hugging Face checkpoints of classifiers call it so.
    """

    def __init__(self, model: PreTrainedModel, group: ProcessGroup | None = None) -> None:
        super().__init__(model, group)
        parameter = next(model.parameters())
        size = model.config.get_text_config().hidden_size
        # Without a bias, as the heads of transformers' sequence classifiers.
        self.score = nn.Linear(size, 1, bias=False, device=parameter.device, dtype=parameter.dtype)

    def forward(self, inputs: PackedInputs) -> Tensor:
        """The head's output at the predictors [answer tokens], in fp32."""
        inputs, collect = share_of_row(inputs, self.group)
        # A larger policy may draw tokens that pad its head: this model reads its own last token.
        rows = self.model.config.get_text_config().vocab_size
        hidden = self.hidden(replace(inputs, tokens=inputs.tokens.clamp(max=rows - 1)))
        # Calling the head would multiply in the compute dtype, to which FSDP casts the gathered weight.
        values = hidden[inputs.predictors].float() @ self.score.weight[0].float()
        return collect(values if inputs.labels.numel() else values + 0.0 * hidden.float().sum())


def trunk(model: PreTrainedModel) -> nn.Module:
    """The model without its head."""
    base = model.base_model
    if base is not model or model.get_output_embeddings() is None:
        return base
    # Llama 4's text model names the part as it is called in the model with images, and then has none of that name.
    if "model" not in dict(model.named_children()):
        raise ConfigError(
            f"{type(model).__name__} does not separate its decoder from its head (it has no `model`), so log-probs "
            "cannot be computed. Use a model of a family that works (docs/models.md), or the family's text model."
        )
    return model.get_submodule("model")


def final_logits(model: PreTrainedModel, hidden: Tensor, temperature: float = 1.0) -> Tensor:
    """Hidden states [n, hidden] -> logits [n, vocabulary] in fp32, with the scaling that some families apply."""
    head, scaling = model.get_output_embeddings(), Scaling.of(model.config)._replace(temperature=temperature)
    if has_fp32_head(model.config):
        return scaling.apply(head_product(head.weight, head.bias, True)(hidden))
    return scaling.apply(head(hidden))


def model_numbers(policy: PackedModel) -> dict[str, float]:
    """Sizes from which FLOPs are counted.

    num_parameters: all of them; trained_parameters: those with a gradient. matmul_parameters: those that a token is
    multiplied with (the head, not the input embedding or a vision tower; of the experts only those it is routed to).
    expert_parameters: of all experts; idle_share: of those, how many a token is not routed to.
    attention_width: layers x heads x head size. cache_width: numbers that an engine keeps of a token. num_experts: of a
    layer. Where prompts may have images, also those of `tower_numbers`.
    """
    config = policy.model.config.get_text_config()
    settings = config.to_dict()  # a config whose layers differ refuses to be asked for one head size
    total = sum(parameter.numel() for parameter in policy.parameters())
    embedding = next(policy.model.get_input_embeddings().parameters())
    output = policy.model.get_output_embeddings()  # a critic's decoder has none
    tied = output is not None and embedding is next(output.parameters())
    head_size = settings.get("head_dim") or config.hidden_size // config.num_attention_heads
    experts = num_experts(config)
    width = 2 * (settings.get("num_key_value_heads") or config.num_attention_heads) * head_size
    if settings.get("kv_lora_rank"):  # latent attention (DeepSeek-AI 2024): one vector for all heads
        width = settings["kv_lora_rank"] + settings["qk_rope_head_dim"]
    # A recurrent layer sees no pairs of tokens and keeps no keys.
    layers = config.num_hidden_layers - list(settings.get("layer_types") or ()).count("linear_attention")
    idle = 1 - settings.get("num_experts_per_tok", experts) / experts if experts else 0.0
    aside = sum(parameter.numel() for part in tower(policy.model) for parameter in part.parameters())
    aside += 0 if tied else embedding.numel()
    in_experts = sum(weight.numel() for name, weight in policy.named_parameters() if ".experts." in name)
    return {
        "num_parameters": total,
        "trained_parameters": sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad),
        "matmul_parameters": total - aside - round(idle * in_experts),
        "expert_parameters": in_experts,
        "idle_share": idle,
        "attention_width": layers * config.num_attention_heads * head_size,
        "cache_width": layers * width,
        "num_experts": experts,
        **(tower_numbers(policy.model) if policy.sees else {}),
    }
