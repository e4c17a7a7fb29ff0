"""Check that rltrain computes a model as transformers does, on a small copy, before anything is loaded.

Families differ in ways that a list of layers does not show: noise in training, states that leak between samples of a
row, heads that are not a single matrix. Their results would be silently wrong. So a small copy is computed in two ways:
plainly, one sample at a time, and packed with a shared prompt, in evaluation and in training with gradients. It is also
decoded by the embedded engine. This takes a second on the CPU for any model size, and reads no weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch, DictionaryColumn
from rltrain.common.columns.ragged import Ragged
from rltrain.common.device import get_device
from rltrain.common.errors import ConfigError
from rltrain.config.schema.rollout import RolloutConfig
from rltrain.models.attention.packing import pack
from rltrain.models.forward import PackedModel, PolicyModel, ScalarModel, final_logits, trunk
from rltrain.models.routing import Routing, num_experts
from rltrain.models.weights.names import Weight
from rltrain.models.weights.shard import empty_packed
from rltrain.models.weights.spec import ModelSpec
from rltrain.run.preflight.small import random_model, small_copy
from rltrain.workers.rollout.contract import Job, Sampling, Turn
from rltrain.workers.rollout.embedded.engine import HFRollout
from rltrain.workers.rollout.queue import Replica
from rltrain.workers.rollout.settings import EngineSettings

# Tolerances relative to the spread of all numbers. Rounding stays under 1e-5 for every family in docs/models.md, and
# the smallest mistake found was 0.1.
_FAR, _FAR_GRADIENT = 1e-3, 1e-2
# Lengths of two responses that share a prompt, and of one response to another prompt. They are longer than the windows
# and chunks of a small copy.
_PROMPTS, _ANSWERS, _PROMPT_OF = (9, 6), (7, 4, 8), (0, 0, 1)
# Tokens below the special tokens of a small copy.
_TOKENS = range(2, 48)
# Response length of the embedded engine, and the chunk size of its prefill, in tokens.
_NEW_TOKENS, _CHUNK = 6, 5
_OUTSIDE = "computes attention outside of transformers' attention interface, so packed sequences cannot be trained"
_ELSE = "Use a supported family (docs/models.md)."


@dataclass(frozen=True)
class Differences:
    """Differences between packed and plain numbers, relative to their spread; None: not computed."""

    evaluation: float = 0.0
    training: float = 0.0
    gradient: float = 0.0
    decoding: float | None = None


@dataclass(frozen=True)
class _Verdict:
    problem: str | None = None
    unknown: str | None = None


_tried: dict[tuple[Any, ...], _Verdict] = {}


class Wrong(Exception):
    """Error in the outputs of a model. The text completes a sentence that starts with the model's name."""


class CannotTry(Exception):
    """Reason why no small copy of the model can be computed."""


def check_numbers(kind: type[Any], spec: ModelSpec, config: Any, *, decodes: bool) -> str | None:
    """Raise ConfigError if rltrain would compute the model differently from transformers.

    decodes: check the embedded engine too. Returns a sentence if no small copy can be computed, else None.
    """
    key = (kind, decodes, spec.gradient_checkpointing, config.to_json_string())
    if key not in _tried:
        try:
            differences(kind, spec, config, decodes=decodes)
            _tried[key] = _Verdict()
        except Wrong as error:
            _tried[key] = _Verdict(problem=str(error))
        except CannotTry as error:
            _tried[key] = _Verdict(unknown=str(error))
    verdict, name = _tried[key], f"{spec.section}.path={spec.path}"
    if verdict.problem:
        raise ConfigError(f"{name}: {type(config).__name__.removesuffix('Config')} {verdict.problem}")
    return verdict.unknown and f"{name}: its outputs could not be checked: {verdict.unknown}"


def check_routing(key: str, spec: ModelSpec, config: Any) -> None:
    """Raise ConfigError if the model does not expose the router indices that ``key`` needs."""
    if not num_experts(config):
        raise ConfigError(f"{key}: {type(config).__name__.removesuffix('Config')} has no experts. Remove it.")
    tried: Routing | None = None
    # A small copy of some families does not run. Then the run raises this at its first step.
    with suppress(Exception), torch.no_grad():
        small = small_copy(config)
        model = random_model(small, decoder_only=False, trust_remote_code=spec.trust_remote_code).eval()
        routing = Routing(model, small)
        routing.record()
        model(torch.arange(3, 6)[None])
        tried = routing
    if tried:
        tried.recorded(key)


def differences(kind: type[Any], spec: ModelSpec, config: Any, *, decodes: bool) -> Differences:
    """Compute a small copy of ``config`` in both ways and compare all numbers.

    Raises `Wrong`, `CannotTry`, ConfigError.
    """
    spec = replace(spec, master_dtype=torch.float32, compute_dtype=torch.float32, lora=None, longest=32, tower="rests")
    if not isinstance(spec.gradient_checkpointing, bool | str):
        spec = replace(spec, gradient_checkpointing=True)  # a small copy has fewer layers
    samples = trial_samples()
    try:
        small = small_copy(config)
        plain = random_model(small, decoder_only=kind is ScalarModel, trust_remote_code=spec.trust_remote_code)
        expected, gradient = _with_gradient(plain, lambda: plain_scores(plain, samples))
    except Exception as error:  # model code may fail on sizes that it was not written for
        raise CannotTry(f"a small copy of it does not run ({_first_line(error)})") from error
    if not all(bool(tensor.isfinite().all()) for tensor in (expected, *gradient.values())):
        raise CannotTry("a small copy of it computes numbers that are not finite")
    try:
        packed = _packed(kind, spec, small, plain)
        return _compared(packed, plain, samples, expected, gradient, spec, small, decodes)
    except (Wrong, ConfigError):
        raise
    except Exception as error:
        # Families without `_supports_attention_backend` may also work. If one fails, its missing attention interface is
        # the reason.
        why = "fails on packed sequences" if getattr(plain, "_supports_attention_backend", True) else _OUTSIDE
        raise Wrong(f"{why} ({_first_line(error)}). {_ELSE}") from error


def _compared(
    packed: PackedModel, plain: Any, samples: Batch, expected: Tensor, gradient: dict[str, Tensor], spec: ModelSpec,
    small: Any, decodes: bool,
) -> Differences:  # fmt: skip
    with torch.no_grad():
        evaluation = distance(packed_scores(packed.eval(), samples), expected)
        if not evaluation <= _FAR:  # also raises for NaN
            raise Wrong(f"{_why(packed, plain, samples, expected)}. {_ELSE}")
    scores, own = _with_gradient(packed.model, lambda: packed_scores(packed.train(), samples))
    training = distance(scores, expected)
    if not training <= _FAR:
        raise Wrong(f"computes different outputs in training and in evaluation mode (off by {training:.2g}). {_ELSE}")
    total = torch.cat([grad.flatten() for grad in gradient.values()]).norm()
    differ = [(own.get(name, 0 * grad) - grad).norm() / (grad.norm() + 0.01 * total) for name, grad in gradient.items()]
    off = float(torch.stack(differ).max())  # NaN if any is NaN
    if not off <= _FAR_GRADIENT:
        raise Wrong(f"gets wrong gradients on packed sequences (off by {off:.2g} of their size). {_ELSE}")
    decoding = _decoded(small, spec, plain) if decodes else None
    if decoding is not None and not decoding <= _FAR:
        raise Wrong(
            f"is decoded wrongly by actor_rollout_ref.rollout.name=hf (log-probs are off by {decoding:.2g} of their "
            f"spread). Use actor_rollout_ref.rollout.name=vllm, or a supported family (docs/models.md)."
        )
    return Differences(evaluation, training, off, decoding)


def _why(packed: PackedModel, plain: Any, samples: Batch, expected: Tensor) -> str:
    """Return the reason for wrong packed outputs, found by computing parts of them."""
    row = _rows(samples)[0][None]
    if isinstance(packed, PolicyModel):
        logits = final_logits(plain, trunk(plain)(input_ids=row, use_cache=False).last_hidden_state)
        if not distance(logits, plain(input_ids=row, use_cache=False).logits.float()) <= _FAR:
            return "has a head that is more than a matrix, and log-probs need one that is"
    alone = torch.cat([packed_scores(packed, samples.select([number])) for number in range(len(samples))])
    if not distance(alone, expected) <= _FAR:
        return _OUTSIDE
    return "treats a packed row as one text, like models with recurrent layers or with their own position counts"


def trial_samples() -> Batch:
    """Return three short responses to two prompts."""
    rng = np.random.default_rng(0)
    prompts, answers = (
        Ragged.from_rows([torch.from_numpy(rng.integers(_TOKENS.start, _TOKENS.stop, length)) for length in lengths])
        for lengths in (_PROMPTS, _ANSWERS)
    )
    return Batch(
        {
            c.PROMPT: DictionaryColumn(prompts, torch.tensor(_PROMPT_OF)),
            c.RESPONSE: answers,
            c.RESPONSE_MASK: answers.like(torch.ones(len(answers.values), dtype=torch.bool)),
        }
    )


def _rows(samples: Batch) -> list[Tensor]:
    column = samples.dictionary(c.PROMPT)
    prompts: Any = column.values
    answers = samples.ragged(c.RESPONSE).rows()
    return [torch.cat([prompts[index], answer]).long() for index, answer in zip(column.index, answers, strict=True)]


def plain_scores(model: Any, samples: Batch) -> Tensor:
    """Return log-probs of the response tokens, or a critic's values, computed one sample at a time."""
    lengths = samples.ragged(c.RESPONSE).lengths.tolist()
    return torch.cat([plain_tail(model, row, length) for row, length in zip(_rows(samples), lengths, strict=True)])


def plain_tail(model: Any, row: Tensor, length: int) -> Tensor:
    """Return the scores of the last ``length`` tokens of ``row``."""
    output = model(input_ids=row[None], use_cache=False)
    if not hasattr(output, "logits"):
        states = output.last_hidden_state[0, -length - 1 : -1]
        return states @ _head(states.shape[-1])
    logits = output.logits[0, -length - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(-1, row[-length:, None])[:, 0]


def packed_scores(packed: PackedModel, samples: Batch) -> Tensor:
    """Return the scores of `plain_scores`, computed by the packed forward."""
    output = packed(pack(samples, torch.device("cpu")))
    return output.log_probs if isinstance(packed, PolicyModel) else output


def _with_gradient(model: Any, scores: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the scores, and the gradients of a weighted sum of them by weight name."""
    outputs = scores()
    (outputs * torch.linspace(-1, 1, len(outputs))).sum().backward()
    return outputs.detach(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def _packed(kind: type[Any], spec: ModelSpec, small: Any, plain: Any) -> PackedModel:
    """Return the model as a worker builds it, with the weights of ``plain``."""
    packed = empty_packed(kind, spec, small).to_empty(device="cpu")
    packed.model.tie_weights()
    weights = dict(_weights(plain))
    with torch.no_grad():
        for name, target in _weights(packed.model):
            target.copy_(weights[name])
        if isinstance(packed, ScalarModel):
            packed.score.weight.copy_(_head(packed.score.in_features))
    return packed


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers(remove_duplicate=False)  # longrope temporarily holds one buffer under two names


def _head(size: int) -> Tensor:
    """Return the weights [size] of the critic's head."""
    return torch.linspace(-1, 1, size).sin()


def distance(found: Tensor, expected: Tensor) -> float:
    """Return ||found - expected|| relative to the spread of ``expected``."""
    return float((found - expected).norm() / (expected - expected.mean()).norm())


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


# -- the embedded engine -----------------------------------------------------------------------------------------------


class _Jobs:
    """Job queue that hands out all jobs at once."""

    may_stop = False

    def __init__(self, jobs: list[Job]) -> None:
        self.turns: list[Turn] = []
        self._jobs = jobs

    def next_jobs(self, most: int) -> list[Job]:
        jobs, self._jobs = self._jobs, []
        return jobs

    def on_turn_end(self, turn: Turn) -> None:
        self.turns.append(turn)

    def is_pending(self, prompt_index: int, sample: int) -> bool:
        return False

    def wait(self) -> bool:
        return False

    def stopped(self) -> bool:
        return False


@dataclass(frozen=True)
class _InMemory(ModelSpec):
    config: Any = None

    def load_config(self) -> Any:
        return copy.deepcopy(self.config)  # every model sets the attention implementation in its config


def _decoded(small: Any, spec: ModelSpec, plain: Any) -> float:
    """Return the distance of the engine's log-probs of its responses from the plain model's.

    One prompt is prefilled at once, the other in chunks.
    """
    rollout = RolloutConfig(name="hf", max_num_batched_tokens=_CHUNK)
    model = _InMemory(spec.path, trust_remote_code=spec.trust_remote_code, config=small)
    alone, cpu = Replica(number=0, count=1, member=0, size=1), get_device("cpu")
    engine = HFRollout(EngineSettings(rollout, model, torch.float32, cpu, alone, [], max_model_len=32))
    engine.load_weights(Weight(name, values.detach()) for name, values in _weights(plain))
    engine.wake_cache()
    prompts = [
        row[:length].numpy().astype(np.int32) for row, length in zip(_rows(trial_samples())[1:], (9, 4), strict=True)
    ]
    samples = np.arange(2)
    jobs = [
        Job(prompt_index, samples, prompt, np.uint64(7 * prompt_index) + samples.astype(np.uint64))
        for prompt_index, prompt in enumerate(prompts)
    ]
    source = _Jobs(jobs)
    engine.generate(source, Sampling(_NEW_TOKENS))
    with torch.no_grad():
        expected = [
            plain_tail(plain, torch.tensor([*prompts[turn.prompt_index].tolist(), *turn.tokens]), len(turn.tokens))
            for turn in source.turns
        ]
    return distance(torch.tensor([number for turn in source.turns for number in turn.log_probs]), torch.cat(expected))
