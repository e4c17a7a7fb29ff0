"""Packed forward pass: log-probs of response tokens with entropy and exact KL, or values and rewards.

The log-prob passes and the update both use this forward pass, so that an unchanged policy has an importance ratio of
exactly 1. FSDP gathers weights when a module's forward is called. Therefore the head is computed inside the forward of
the wrapped module, and the logits never leave it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rltrain.common.errors import ConfigError
from rltrain.models.attention.packed import PLAN
from rltrain.models.attention.packing import PackedInputs
from rltrain.models.attention.ring import RING, Ring
from rltrain.models.attention.ulysses import GROUP, gather_row, share_of_row, slice_of_row, sum_over_group
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
from rltrain.models.tensor_layers import local
from rltrain.models.vision import read_with_images, tower, tower_numbers


class PackedModel(nn.Module):
    """Hugging Face model over packed sequences: the unit that FSDP wraps.

    group: the ranks that share each sequence (`ulysses`), or None. ring: the rings among them, or None. sees: True if
    prompts may have images. Every forward then uses the vision tower.
    """

    sees = False
    ring: Ring | None = None

    def __init__(self, model: PreTrainedModel, group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.model = model
        self.group = group
        self.tensor_size = 1
        """Number of ranks that share each matrix (tensor parallelism)."""
        # The layers are collected now, because sharding renames their classes.
        self._layers = decoder_layers(model)

    def train(self, mode: bool = True) -> PackedModel:
        """Set training mode for the layers, so that they recompute activations, but not for their children, because
        router noise would make the importance ratio of an unchanged policy differ from 1.
        """
        super().train(mode)
        for layer in self._layers:
            for part in layer.children():
                part.eval()
        return self

    def hidden(self, inputs: PackedInputs) -> Tensor:
        """Compute the last hidden states [total, hidden]."""
        # By default, transformers would fill a cache with unused keys and values.
        arguments = {"use_cache": False, PLAN: inputs.plan, GROUP: self.group, RING: self.ring}
        if self.sees:
            return read_with_images(self.model, inputs.tokens, inputs.positions, inputs.images, **arguments)
        return trunk(self.model)(
            input_ids=inputs.tokens[None], position_ids=inputs.positions[None], **arguments
        ).last_hidden_state[0]


class PolicyModel(PackedModel):
    """Causal language model whose forward returns log-probs, never logits. Its head must be a plain linear layer."""

    def __init__(self, model: PreTrainedModel, group: ProcessGroup | None = None) -> None:
        super().__init__(model, group)
        # A subclass, such as a linear layer with adapters, computes more than a product with its weight, but only the
        # weight is used here.
        if type(head := model.get_output_embeddings()) is not nn.Linear:
            raise ConfigError(
                f"{type(model).__name__} has a {type(head).__name__} as its head; log-probs can be computed only with "
                "a linear head without adapters."
            )
        self.routing = Routing(model, model.config) if num_experts(model.config) else None
        """Routing of a model with experts; otherwise None."""

    def measure_load(self) -> None:
        """Start counting the tokens of each expert in forwards with gradients. Layers must not be compiled."""
        if self.routing is not None:
            self.routing.measure_load()

    def load(self) -> Tensor | None:
        """Return the tokens of each expert [layers, experts] on this rank since `measure_load`, and stop counting.

        They are the tokens of the samples, prompts and responses: a shared prompt counts once per response, and padding
        and dummy tokens do not count. The sum over ranks therefore does not depend on the packing. None: the model has
        no experts, or its routers do not expose their choice.
        """
        load = self.routing.load() if self.routing is not None else None
        # The ranks of a tensor-parallel group see the same tokens, and the first one counts them.
        if load is not None and self.tensor_size > 1 and dist.get_rank() % self.tensor_size:
            load.zero_()
        return load

    def balance(self, weights: Tensor | None) -> None:
        """Make forwards with gradients compute the load-balancing loss of the experts (`algorithms.expert_balance`).

        weights: [layers, experts], or None to disable.
        """
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
        """Compute log-probs of the labels under softmax(logits / temperature), the distribution before top-k and top-p.

        reference: also return the exact KL to it. with_squares: also return the sum over the vocabulary of pi^2.
        with_experts: also return the experts of the tokens. states_only: return only the hidden states at the
        predictors. Under sequence parallelism, these states and the states in ``reference`` cover only this rank's
        slice.
        """
        total = inputs.plan.num_tokens
        counts = self.routing is not None and self.routing.counts and torch.is_grad_enabled()
        times = slice_of_row(inputs.times_counted(), self.group) if counts else None
        inputs, collect = share_of_row(inputs, self.group)
        hidden, experts = self._routed(inputs, times, record=with_experts)
        if states_only:
            return hidden[inputs.predictors]
        if experts is not None:
            experts = gather_row(experts, total, self.group)[inputs.by_sample()]
        head, config = self.model.get_output_embeddings(), self.model.config
        scaling, states = Scaling.of(config)._replace(temperature=temperature), hidden[inputs.predictors]
        asked = with_entropy, reference, has_fp32_head(config), with_squares
        outputs = token_log_probs(head, states, inputs.labels, scaling, *asked)
        if not inputs.labels.numel():
            # On a rank without response tokens, every parameter must still be in the graph.
            outputs = outputs._replace(log_probs=outputs.log_probs + 0.0 * hidden.float().sum())
        others = (values if values is None else collect(values) for values in outputs[1:])
        outputs = TokenLogProbs(collect(outputs.log_probs), *others)._replace(experts=experts)
        balance = self.routing.balance_loss() if self.routing is not None and counts else None
        return outputs if balance is None else outputs._replace(balance_loss=sum_over_group(balance, self.group))

    def _routed(self, inputs: PackedInputs, times: Tensor | None, *, record: bool) -> tuple[Tensor, Tensor | None]:
        """Compute hidden states with the experts in ``inputs``. With ``record``, also return the experts used.

        times: number of times that each token counts for the load.
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
    """Decoder with a linear head, for critic and reward model: one number per predictor.

    The head is called ``score``, as in Hugging Face checkpoints of classifiers.
    """

    def __init__(self, model: PreTrainedModel, group: ProcessGroup | None = None) -> None:
        super().__init__(model, group)
        parameter = next(model.parameters())
        size = model.config.get_text_config().hidden_size
        # The head has no bias, like the heads of transformers' sequence classifiers.
        self.score = nn.Linear(size, 1, bias=False, device=parameter.device, dtype=parameter.dtype)

    def forward(self, inputs: PackedInputs) -> Tensor:
        """Compute the head's output at the predictors [response tokens], in fp32."""
        inputs, collect = share_of_row(inputs, self.group)
        # The policy may have a larger vocabulary and sample tokens from the padding rows of its head. They are replaced
        # by this model's last token.
        rows = self.model.config.get_text_config().vocab_size
        hidden = self.hidden(replace(inputs, tokens=inputs.tokens.clamp(max=rows - 1)))
        # The head is not called, because the product would be in the compute dtype, to which FSDP casts the gathered
        # weight.
        values = hidden[inputs.predictors].float() @ self.score.weight[0].float()
        return collect(values if inputs.labels.numel() else values + 0.0 * hidden.float().sum())


def trunk(model: PreTrainedModel) -> nn.Module:
    """Return the model without its head. Raises ConfigError if the model does not separate them."""
    base = model.base_model
    if base is not model or model.get_output_embeddings() is None:
        return base
    # Llama 4's text model has the `base_model_prefix` of the vision model, but no attribute of that name.
    if "model" not in dict(model.named_children()):
        raise ConfigError(
            f"{type(model).__name__} does not separate its decoder from its head (it has no `model`), so log-probs "
            "cannot be computed. Use a model of a supported family (docs/models.md), or the text model of this family."
        )
    return model.get_submodule("model")


def final_logits(model: PreTrainedModel, hidden: Tensor, temperature: float = 1.0) -> Tensor:
    """Map hidden states [n, hidden] to logits [n, vocabulary] in fp32, with the scaling of the model's family.

    Under tensor parallelism they are the logits of this rank's part of the vocabulary.
    """
    head, scaling = model.get_output_embeddings(), Scaling.of(model.config)._replace(temperature=temperature)
    if has_fp32_head(model.config) or isinstance(head.weight, DTensor):
        in_fp32 = has_fp32_head(model.config)
        return scaling.apply(head_product(local(head.weight), local(head.bias), in_fp32)(hidden))
    return scaling.apply(head(hidden))


def model_numbers(policy: PackedModel) -> dict[str, float]:
    """Return model sizes for counting FLOPs.

    num_parameters: number of all parameters. trained_parameters: number of parameters with a gradient.
    matmul_parameters: weights that a token is multiplied with (with the head and the token's routed experts, without
    the input embedding and the vision tower). expert_parameters: of all experts; idle_share: fraction of them that a
    token is not routed to. attention_width: layers x heads x head size. cache_width: numbers that an engine caches per
    token. num_experts: per layer. If prompts may have images, also the sizes of `tower_numbers`.
    """
    config = policy.model.config.get_text_config()
    settings = config.to_dict()  # a config with heterogeneous layers raises when asked for one head size
    total = sum(parameter.numel() for parameter in policy.parameters())
    embedding = next(policy.model.get_input_embeddings().parameters())
    output = policy.model.get_output_embeddings()  # a critic's decoder has no head
    tied = output is not None and embedding is next(output.parameters())
    head_size = settings.get("head_dim") or config.hidden_size // config.num_attention_heads
    experts = num_experts(config)
    width = 2 * (settings.get("num_key_value_heads") or config.num_attention_heads) * head_size
    if settings.get("kv_lora_rank"):  # latent attention (DeepSeek-AI 2024): one vector for all heads
        width = settings["kv_lora_rank"] + settings["qk_rope_head_dim"]
    # A recurrent layer has no attention pairs and no cached keys.
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
