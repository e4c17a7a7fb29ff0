"""Embedded rollout engine: a decode loop over the Hugging Face model. It runs wherever torch runs.

A CPU, a new device or a first try should not need an inference server. transformers' `generate` pads, waits for the
longest response and computes a prompt once per response. This engine uses continuous batching over its cache (`kv`),
computes a prompt once for all its responses, and a turn from the end of the previous one (`kv_offload`). With one
process and equal dtypes it generates with the training weights themselves. Left out: CUDA graphs and paged memory; on
accelerators vLLM is the fast engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from rltrain.common.errors import ConfigError
from rltrain.data.images import EncodedPrompt
from rltrain.models.attention.packed import PLAN, STATELESS, packed_attention
from rltrain.models.attention.packed_images import PackedImages
from rltrain.models.attention.packing import AttentionPlan
from rltrain.models.attention.recurrent import bytes_per_row
from rltrain.models.attention.scores import Kind, tempered
from rltrain.models.forward import final_logits, trunk
from rltrain.models.load import empty_model
from rltrain.models.routing import Routing
from rltrain.models.vision import placeholder_ids, read_with_images
from rltrain.models.weights.lora import add_adapters
from rltrain.models.weights.names import Weight
from rltrain.workers.rollout.contract import Job, Key, Sampling, Source
from rltrain.workers.rollout.embedded.kv import ROOM, KeyValues, PromptChunk
from rltrain.workers.rollout.embedded.kv_offload import OffloadedRow, OffloadedRows
from rltrain.workers.rollout.embedded.running import EndedTurn, RunningTurns
from rltrain.workers.rollout.sampling import choose, random_numbers
from rltrain.workers.rollout.settings import EngineSettings

_ATTENTION = "rltrain_rollout"
_CACHE = "rltrain_cache"
# Ended rows stay in the batch up to this share, because removing them means moving the others.
_DEAD = 0.05


class HFRollout:
    """Engine with continuous batching over the model's modules, and one prefill per prompt."""

    names_in_memory = True
    record = None

    def __init__(self, settings: EngineSettings) -> None:
        _register()
        config, self._dtype, self._device = settings.model.load_config(), settings.dtype, settings.device
        model = empty_model(config, _ATTENTION, self._dtype, trust_remote_code=settings.model.trust_remote_code)
        if settings.adapted:
            assert settings.model.lora
            add_adapters(model, settings.model.lora)
        self.model = model.eval()
        self._adapted, self.holds_base = bool(settings.adapted), False
        self._routing = Routing(model, config) if settings.with_experts else None
        self._rollout, self._section, self._longest = settings.rollout, settings.section, settings.longest
        self._stop_texts = settings.stop_texts
        self._max_model_len = settings.max_model_len
        self._memory_share = settings.rollout.gpu_memory_utilization / settings.engines_sharing_memory
        self._is_end = np.zeros(config.get_text_config().vocab_size, dtype=bool)
        never = torch.tensor(placeholder_ids(config), dtype=torch.long, device=settings.device.torch_device)
        self._never = never if len(never) else None
        # A tokenizer may have end tokens beyond the model's vocabulary; these cannot be sampled.
        self._is_end[[token for token in settings.eos_token_ids if token < len(self._is_end)]] = True
        self._block = self._device.cache_columns
        self._most_rows = self._row_bytes = self._cache_bytes = 0

    def wake_weights(self) -> None:
        """Do nothing: memory is allocated by `load_weights`."""

    def wake_cache(self) -> None:
        """Set the maximum number of running responses.

        The cache fits even if every response reaches max_model_len and no two share a prompt. Keys and values
        themselves exist only during a `generate`.
        """
        self._cache_bytes = int(self._memory_share * self._device.free_memory_bytes())
        # A response that begins in the middle of a block uses part of one more block.
        longest = (self._max_model_len + self._block) * bytes_per_token(self.model.config, self._dtype)
        self._row_bytes = longest + bytes_per_row(self.model.config, self._dtype)
        self._most_rows = min(self._rollout.max_num_seqs, int(self._cache_bytes / ROOM / self._row_bytes))

    def load_weights(self, weights: Iterator[Weight]) -> None:
        """Keep the tensors without a copy: with one process and equal dtypes they are the training weights."""
        for name, values, _ in weights:
            path, _, leaf = name.rpartition(".")
            module, values = self.model.get_submodule(path), values.to(self._device.torch_device)
            # The module gets the tensors without a copy, which would need memory for a second model.
            if leaf in module._parameters:
                module._parameters[leaf] = nn.Parameter(values, requires_grad=False)
            else:
                module._buffers[leaf] = values
        # Tied weights are sent once, under their first name.
        self.model.tie_weights()
        if missing := [name for name, parameter in self.model.named_parameters() if parameter.is_meta]:
            raise RuntimeError(
                f"the weight sync left {len(missing)} weights of the rollout engine empty: {missing[:3]}"
            )
        self.holds_base = self._adapted

    def sleep(self) -> bool:
        # On a CPU unchanged weights are kept, because there is only host memory. On other devices they are sent again;
        # with one process they are the trainer's tensors.
        if self.holds_base and self._device.is_cpu:
            return False
        self.model.to("meta")
        self.holds_base = False
        return True

    @torch.inference_mode()
    def log_probs(self, text: EncodedPrompt) -> Tensor:
        ids = torch.from_numpy(text.tokens.astype(np.int64)).to(self._device.torch_device)
        hidden = self._read(ids, [(text, 0, len(ids))], {PLAN: AttentionPlan.of_lengths([len(ids)])})[:-1]
        return torch.log_softmax(final_logits(self.model, hidden), -1).gather(-1, ids[1:, None])[:, 0].cpu()

    @torch.inference_mode()
    def generate(self, source: Source, sampling: Sampling) -> None:
        kv, offloaded = KeyValues(self._device.torch_device, self._block), OffloadedRows()
        turns = RunningTurns(sampling.max_tokens, self._max_model_len, source, self._stop_texts(sampling.stop))
        # Mask of the tokens in each row's context, for a repetition penalty.
        seen = self._seen_of([]) if sampling.repetition_penalty != 1 else None
        rows = np.zeros(0, dtype=np.int64)
        hidden = torch.empty(0, self.model.config.get_text_config().hidden_size, dtype=self._dtype)
        hidden = hidden.to(self._device.torch_device)
        while True:
            if jobs := self._take(source, turns.num_running):
                kept = offloaded.take(jobs)
                new = turns.add(jobs, {key: row.length for key, row in kept.items()})
                rows = np.concatenate([rows, new])
                self._trim(offloaded, kv, source, sum(len(job.samples) for job in jobs))
                last, experts = self._prefill(jobs, kv, kept)
                hidden = torch.cat([hidden, last])
                if self._routing:
                    turns.record_experts(new, experts)
                seen = None if seen is None else torch.cat([seen, self._seen_of(jobs)])
                del kept
            if not len(rows):
                if source.wait():
                    continue
                return self._refuse_oversized(source)
            tokens, ended = self._sample(hidden, rows, turns, sampling, seen)
            self._offload(ended, kv, offloaded, source)
            if turns.num_running and source.stopped():
                return turns.abort()
            running = ~turns.ended[rows]
            if not running.any() or running.mean() < 1 - _DEAD:
                order = kv.drop_dead_rows(running)
                places = torch.from_numpy(order).to(tokens.device)
                rows, tokens = rows[order], tokens[places]
                seen = None if seen is None else seen[places]
            if len(rows):
                kv.begin_step()
                # Minus one, because the count includes the token just sampled, which is computed next.
                columns = turns.prompt_lengths + turns.shifts + turns.lengths
                positions = torch.from_numpy(columns[rows] - 1)
                self._record_routing()
                hidden = self._forward(tokens[:, None], positions[:, None], **{_CACHE: kv})[:, 0]
                if (routed := self._recorded_routing()) is not None:
                    turns.record_experts(rows, routed[:, None])
            else:
                hidden = hidden[:0]

    def _offload(self, ended: Sequence[EndedTurn], kv: KeyValues, offloaded: OffloadedRows, source: Source) -> None:
        """Offload the cache of ended turns, if another turn follows."""
        for turn in ended:
            if source.is_pending(*turn.key):
                offloaded.put(turn, kv.copy_of(turn.row))
        self._trim(offloaded, kv, source)

    def _trim(self, offloaded: OffloadedRows, kv: KeyValues, source: Source, num_new: int = 0) -> None:
        """Drop offloaded rows that are no longer needed or do not fit next to the batch. num_new: rows to be added to
        the batch.
        """
        if len(offloaded):
            offloaded.drop_ended(source)
            offloaded.fit(self._cache_bytes - kv.num_bytes - num_new * self._row_bytes)

    def _take(self, source: Source, num_running: int) -> list[Job]:
        room = self._most_rows - num_running
        return source.next_jobs(room) if room > 0 else []

    def _refuse_oversized(self, source: Source) -> None:
        """Raise ConfigError if the source has jobs, but all are too large for the cache."""
        most = self._most_rows
        # Request jobs with the limit of the settings. If there are any, they are too large.
        if most < self._rollout.max_num_seqs and (jobs := source.next_jobs(self._rollout.max_num_seqs)):
            key = f"{self._section}."
            raise ConfigError(
                f"the memory for keys and values holds {most} responses of up to {self._max_model_len} tokens at once, "
                f"but {len(jobs[0].samples)} responses to one prompt must be generated together. Raise "
                f"{key}gpu_memory_utilization, lower {key}{self._longest}"
                + (f", or set {key}max_num_seqs={most}, which cuts them into several parts." if most else ".")
            )

    def _sample(
        self, hidden: Tensor, rows: NDArray[np.int64], turns: RunningTurns, sampling: Sampling, seen: Tensor | None
    ) -> tuple[Tensor, list[EndedTurn]]:
        """Sample and record one token per row. Returns the tokens [rows], and the turns that ended."""
        noise = torch.from_numpy(random_numbers(turns.seeds[rows], (turns.given + turns.lengths)[rows])).to(
            hidden.device
        )
        tokens, log_probs = choose(final_logits(self.model, hidden), noise, sampling, self._never, seen)
        if seen is not None:
            seen.scatter_(-1, tokens[:, None], True)
        drawn = tokens.cpu().numpy()
        ends = self._is_end[drawn] & (not sampling.ignore_eos)
        return tokens, turns.write(rows, drawn, log_probs.cpu().numpy(), ends)

    def _seen_of(self, jobs: Sequence[Job]) -> Tensor:
        """Return a mask of the tokens in prompt and given tokens [responses, vocabulary]."""
        texts = [text for job in jobs for text in job.begun or [job.asked] * len(job.samples)]
        seen = torch.zeros(len(texts), len(self._is_end), dtype=torch.bool)
        for row, text in zip(seen, texts, strict=True):
            row[torch.from_numpy(text.tokens.astype(np.int64))] = True
        return seen.to(self._device.torch_device)

    def _prefill(
        self, jobs: Sequence[Job], kv: KeyValues, kept: Mapping[Key, OffloadedRow] | None = None
    ) -> tuple[Tensor, list[NDArray[np.integer[Any]]]]:
        """Compute the prompts, in packs within the token budget. kept: cached beginnings of the prompts.

        Returns the last hidden state of each response's context [rows, h], and the routing of its tokens if needed.
        """
        texts: list[EncodedPrompt] = []
        counts, begun = [], []
        for job in jobs:
            # Samples with given tokens have different texts, which are computed separately.
            parts = job.begun or [job.asked]
            texts += parts
            counts += [1] * len(parts) if job.given else [len(job.samples)]
            begun += [(kept or {}).get((job.prompt_index, sample)) for sample in job.samples.tolist()[: len(parts)]]
        prompts = [torch.from_numpy(text.tokens.astype(np.int64)) for text in texts]
        lengths = [len(prompt) for prompt in prompts]
        places = kv.add(lengths, counts, begun)
        last = []
        routed: list[list[NDArray[np.integer[Any]]]] = [[] for _ in texts]
        for pack in self._packs(lengths, [row.length if row else 0 for row in begun]):
            kv.begin_prefill([PromptChunk(places[number], start, stop) for number, start, stop in pack])
            tokens = torch.cat([prompts[number][start:stop] for number, start, stop in pack])
            num_tokens = [stop - start for _, start, stop in pack]
            arguments = {_CACHE: kv, PLAN: AttentionPlan.of_lengths(num_tokens)}
            self._record_routing()
            hidden = self._read(tokens, [(texts[number], start, stop) for number, start, stop in pack], arguments)
            ends = np.cumsum(num_tokens) - 1
            if (experts := self._recorded_routing()) is not None:
                for (number, _, _), part in zip(pack, np.split(experts, ends[:-1] + 1), strict=True):
                    routed[number].append(part)
            # Chunks are in the order of the prompts, so the last states of the prompts are in this order too.
            last += [hidden[end] for end, (number, _, stop) in zip(ends, pack, strict=True) if stop == lengths[number]]
        self._check_layers(kv)
        states = torch.stack(last).repeat_interleave(torch.tensor(counts, device=last[0].device), 0)
        whole = [np.concatenate(parts) for parts in routed if parts]
        return states, [part for part, count in zip(whole, counts, strict=bool(whole)) for _ in range(count)]

    def _read(
        self, tokens: Tensor, parts: Sequence[tuple[EncodedPrompt, int, int]], arguments: dict[str, Any]
    ) -> Tensor:
        """Return the last hidden states [total, h] of ``tokens`` [total]: parts (start, stop) of texts."""
        laid, spans, positions, end = [], [], [], 0
        for text, start, stop in parts:
            places = torch.arange(start, stop)
            images = text.images
            if images is not None:
                # Skip images outside of the part: their positions would be wrong, and encoding them would be wasted
                # work.
                if ((images.places >= start) & (images.places < stop)).any():
                    laid.append((images, end - start))
                    spans.append(range(end, end + stop - start))
                if images.positions is not None:
                    places = torch.tensor(images.positions[:, start:stop])
            positions.append(places)
            end += stop - start
        device = self._device.torch_device
        if any(part.dim() > 1 for part in positions):
            positions = [part.expand(3, -1) for part in positions]
        rows, packed = torch.cat(positions, -1).to(device), PackedImages.of(laid, spans)
        # A part of a long prompt contains some or none of its images.
        if packed is None or (packed := packed.within(0, end)) is None:
            return self._forward(tokens[None], rows[None] if rows.dim() == 1 else rows[:, None], **arguments)[0]
        return read_with_images(self.model, tokens.to(device), rows, packed, use_cache=False, **arguments)

    def _record_routing(self) -> None:
        if self._routing:
            self._routing.record()

    def _recorded_routing(self) -> NDArray[np.integer[Any]] | None:
        """Return the routing since `_record_routing` [tokens, layers, experts per token], or None if not needed."""
        return self._routing.recorded().cpu().numpy() if self._routing else None

    def _check_layers(self, kv: KeyValues) -> None:
        text = self.model.config.get_text_config()
        stateless = sum(kind in STATELESS for kind in getattr(text, "layer_types", None) or ())
        expected = text.num_hidden_layers - stateless
        if kv.num_layers < expected:
            raise ConfigError(
                f"{kv.num_layers} of the {expected} layers of {type(self.model).__name__} keep keys and values "
                f"through transformers' attention interface; {self._section}.name=hf requires this of all layers."
            )

    def _packs(self, lengths: Sequence[int], begun: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
        """Yield packs of prompt chunks (number, start, stop) to compute together.

        A chunk is the part of a prompt after its first ``begun`` tokens, or a piece of a long one.
        """
        budget = self._rollout.max_num_batched_tokens
        pack: list[tuple[int, int, int]] = []
        filled = 0
        for number, (first, stop) in enumerate(zip(begun, lengths, strict=True)):
            length = stop - first
            if pack and filled + length > budget:
                yield pack
                pack, filled = [], 0
            if length > budget and self._rollout.enable_chunked_prefill:
                for start in range(first, stop, budget):
                    yield [(number, start, min(start + budget, stop))]
            else:
                pack.append((number, first, stop))
                filled += length
        if pack:
            yield pack

    def _forward(self, tokens: Tensor, positions: Tensor, **arguments: Any) -> Tensor:
        """Run the model: [rows, tokens] -> last hidden states [rows, tokens, h]."""
        device = self._device.torch_device
        return trunk(self.model)(
            input_ids=tokens.to(device), position_ids=positions.to(device), use_cache=False, **arguments
        ).last_hidden_state


def rollout_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    rltrain_cache: KeyValues | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention over the cache. Without a cache, and in complete prompts, call the packed attention."""
    if rltrain_cache is not None:
        kind = Kind.of(module, scaling, sliding_window, softcap, s_aux)
        layer = rltrain_cache.call_of(int(module.layer_idx))  # type: ignore[arg-type]
        if not rltrain_cache.is_prefill:
            query = tempered(module, query, rltrain_cache.places)
            return rltrain_cache.decode(layer, query, key, value, kind), None
        rltrain_cache.store(layer, key, value)
        if rltrain_cache.continues:
            query = tempered(module, query, rltrain_cache.places)
            return rltrain_cache.prefill_rest(layer, query, kind), None
    return packed_attention(
        module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, softcap=softcap,
        s_aux=s_aux, **others,
    )  # fmt: skip


def _register() -> None:
    AttentionInterface.register(_ATTENTION, rollout_attention)


def bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values of one token, over all layers that have them."""
    text = config.get_text_config()
    # Gemma 4's config has several head sizes, and reading a single one raises an error.
    layers = getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers
    recurrent = [kind == "linear_attention" for kind in getattr(text, "layer_types", None) or ()]
    return dtype.itemsize * sum(_numbers_per_token(layer) for layer in layers[sum(recurrent) :])


def _numbers_per_token(layer: Any) -> int:
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    size = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
    if getattr(layer, "qk_nope_head_dim", None):  # multi-head latent attention, whose keys are cached at full width
        heads, size = layer.num_attention_heads, layer.qk_nope_head_dim + layer.qk_rope_head_dim
    return heads * (size + (getattr(layer, "v_head_dim", None) or size))
