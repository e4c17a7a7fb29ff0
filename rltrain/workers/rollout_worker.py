"""Rollout role of a worker process: syncs the current weights to its engine replica, and generates.

The payload per response stays in the object store, with each prompt stored once. `response_mask` marks the tokens that
the policy sampled, not a tool's (`rollout/conversations.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.agents.chat import TurnLimits
from rltrain.agents.pool import ExecutorPool
from rltrain.agents.toolbox import ToolSources
from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch, DictionaryColumn
from rltrain.common.device import Device, resolve_dtype
from rltrain.common.errors import ConfigError, NonFiniteError
from rltrain.common.seeds import sample_seeds
from rltrain.config.agents import several_turns
from rltrain.config.budgets import longest_text
from rltrain.config.schema import Config
from rltrain.config.schema.engines import ENGINES
from rltrain.config.step_passes import StepPasses
from rltrain.data.chat import ChatEncoder, chat_encoder
from rltrain.data.images import SLOT, EncodedPrompt, blank_image
from rltrain.data.media.videos import video_settings
from rltrain.data.prompts import PromptStore
from rltrain.data.rows import Rows
from rltrain.data.turns.detect import format_of
from rltrain.models.forward import PackedModel
from rltrain.models.weights.lora import ranks_of
from rltrain.models.weights.spec import actor_spec
from rltrain.rewards.processes.log import PrintLog
from rltrain.runtime.slots.limits import Limits
from rltrain.workers.interface.results import WAIT, Array, GenerationNumbers, SyncReport
from rltrain.workers.interface.roles import Rollout
from rltrain.workers.interface.tasks import Finished, GenerateTask
from rltrain.workers.rollout.answering import Answering
from rltrain.workers.rollout.contract import Job, RolloutEngine
from rltrain.workers.rollout.conversations import (
    Conversation,
    Conversations,
    answer_numbers,
    begun_conversations,
    payload_of,
    routed_experts_of,
    turn_numbers,
)
from rltrain.workers.rollout.images import TaskImages
from rltrain.workers.rollout.queue import JobQueue, abort, make_replica, samples_per_job
from rltrain.workers.rollout.settings import EngineSettings, make_engine
from rltrain.workers.rollout.trajectory_info import per_turn, texts_with_trajectories
from rltrain.workers.rollout.waiting import read_answers, write_answers
from rltrain.workers.state.offload_manager import OffloadManager
from rltrain.workers.state.weight_sync import WeightSync

# After every sync, engine and trainer are compared on this many tokens of a prompt, after its images.
_CANARY_TOKENS = 64
# If more than this share of an engine's responses are damaged, the others are not trusted either.
_MOST_DAMAGED = 0.01
_NOTHING = np.zeros(0, dtype=np.int32)
# Partial responses by prompt index and sample.
Open = dict[tuple[int, int], Conversation]


class RolloutWorker(Rollout):
    """Rollout role. Every method except `take_finished` and `abort` is called on all ranks.

    policy: the training weights. version: number of optimizer steps so far. text_log_probs: the trainer's log-probs of
    a text. rows: rows of the prompts, for multi-turn runs.
    """

    def __init__(
        self,
        cfg: Config,
        passes: StepPasses,
        offloader: OffloadManager,
        prompts: dict[str, PromptStore],
        policy: PackedModel,
        version: Callable[[], int],
        text_log_probs: Callable[[EncodedPrompt], Tensor],
        rows: dict[str, Rows] | None = None,
    ) -> None:
        self._rollout, self._max_response_length = cfg.actor_rollout_ref.rollout, cfg.data.max_response_length
        # Checks for an abort cost a little per token, so they run only if the configuration sets a stop notice.
        self._can_be_aborted = cfg.trainer.stop_notice_s is not None
        self._with_experts = passes.router_replay == "R3"
        self._images, self._images_between_turns = passes.images, passes.images_between_turns
        self.offloader = offloader
        self._device = offloader.device
        self._prompts = prompts
        for store in prompts.values():
            if store.stored_images:
                store.stored_images.check_files_exist()
        self._version = version
        self.encoder = chat_encoder(cfg)
        self._max_model_len = self._rollout.max_model_len or longest_text(cfg)
        self._replica = make_replica(self._rollout.tensor_model_parallel_size)
        # If one member of the replica takes all jobs, the members need no synchronisation.
        alone = ENGINES[self._rollout.name].leader_serves
        self._serving_replica = replace(self._replica, size=1, group=None) if alone else self._replica
        self._rows = rows or {}
        self._answering = self._make_answering() if several_turns(self._rollout) else None
        self._agent_log = PrintLog(Path(cfg.trainer.default_local_dir) / "agents.log")
        # The process group's store holds the replicas' shared counters, so no other server is needed.
        self._store = dist.distributed_c10d._get_default_store()
        self._finished: SimpleQueue[tuple[Job, list[str]] | None] = SimpleQueue()
        dtype = resolve_dtype(self._rollout.dtype, self._device)
        merge = cfg.actor_rollout_ref.model.merges
        self.engine = self._make_engine(cfg, dtype, {} if merge else ranks_of(policy.model))
        self.weight_sync = WeightSync(
            policy,
            self.engine,
            self._device,
            dtype,
            bucket_bytes=self._rollout.update_weights_bucket_megabytes << 20,
            gap_limit=log_prob_gap_limit(cfg, self._device),
            canary=_canary(prompts, self.encoder if passes.images else None),
            log_probs=text_log_probs,
            merge=merge,
        )
        offloader.add_engine(self._release, "sync", "gen")

    def _make_engine(self, cfg: Config, dtype: torch.dtype, adapted: dict[str, int]) -> RolloutEngine:
        model = actor_spec(cfg, self._device, self._images)
        self._vocabulary = model.load_config().get_text_config().vocab_size
        self.offloader.enter_phase("gen")  # an engine measures the free memory at its start
        settings = EngineSettings(
            rollout=self._rollout,
            model=model,
            dtype=dtype,
            device=self._device,
            replica=self._replica,
            eos_token_ids=self._answering.stop_token_ids if self._answering else self.encoder.eos_token_ids,
            max_model_len=self._max_model_len,
            engines_sharing_memory=cfg.trainer.n_gpus_per_node if self._device.is_cpu else 1,
            images=self._images,
            max_pixels=cfg.data.max_pixels,
            videos=video_settings(cfg.data) if any(store.has_videos for store in self._prompts.values()) else None,
            adapted=adapted,
            with_experts=self._with_experts,
            decode=lambda tokens: self.encoder.decode_batch([tokens], special=True)[0],
        )
        return make_engine(settings)

    def _make_answering(self) -> Answering:
        turns = self._rollout.multi_turn
        allowed = (turns.allow_code_execution, turns.allow_unsandboxed_code)
        limits = Limits(turns.tool_timeout_s, turns.tool_memory_mb, *allowed)
        number = turns.num_tool_processes
        terms = TurnLimits.of(turns, images=self._images_between_turns)
        executors = ExecutorPool(ToolSources.of(turns), terms, limits, number) if self._replica.is_leader else None
        call_format = format_of(turns.format, self.encoder)
        return Answering(turns, self.encoder, call_format, self._serving_replica, executors, self._max_model_len)

    def _release(self) -> None:
        if self.engine.sleep():
            # An engine without weights has no version, so the next generation syncs even without an update in between.
            self.weight_sync.lost()

    def generate(self, task: GenerateTask, begun: Batch | None = None) -> tuple[Batch, list[str], GenerationNumbers]:
        """Generate responses with the current weights. Returns payload columns, texts, and numbers.

        begun: `columns.ANSWER` of partial responses, and their ``slot``; the returned columns include their tokens.
        Samples are ordered by slot. One rank per replica returns the replica's responses, the others none.
        """
        reshard_s, sync = self._bring_weights()
        started = time.perf_counter()
        keep = task.is_learnt_from and self._replica.is_leader
        task_images = TaskImages(self._prompts[task.split], task.rows, keep=keep) if self._images else None
        open_answers = {} if begun is None else self._open(task, begun)
        queue = self._queue(task, open_answers, task_images)
        tell = self._hand_out if task.stream and self._replica.is_leader else None

        def finished(job: Job, conversations: list[Conversation]) -> None:
            if task_images:
                task_images.on_job_end(job)
            if tell:
                tell(job, conversations)

        source, num_begun_anew = self._converse(task, queue, open_answers, finished, task_images)
        # Ranks without results also report the end, because the driver polls every rank until it does so.
        if task.stream:
            self._finished.put(None)
        self._device.synchronize()
        # Unless the run stops, all responses are needed, so an aborted one is an engine error.
        num_aborted = sum(answer.aborted for answer in source.all)
        if num_aborted and not queue.stopped():
            raise RuntimeError(f"the rollout engine '{self._rollout.name}' aborted {num_aborted} requested responses")
        seconds = {"reshard": reshard_s, "generate_sequences": time.perf_counter() - started}
        seconds |= {"read_images": task_images.seconds} if task_images else {}
        seconds |= {WAIT: source.waited_s} if self._answering else {}
        numbers = GenerationNumbers(
            seconds,
            sync,
            num_begun_anew=num_begun_anew,
            num_follow_up_tokens=source.num_follow_up_tokens,
            num_reused_tokens=source.num_reused_tokens,
        )
        if not source.all or not self._replica.is_leader:
            return Batch(), [], numbers
        self._refuse_damaged(source)
        # Sort by slot, because the order of completion depends on timing.
        answers = sorted(source.all, key=lambda answer: (answer.prompt_index, answer.sample))
        payload = payload_of(answers)
        if self._with_experts and task.is_learnt_from:
            payload.update({c.ROUTED_EXPERTS: routed_experts_of(answers)})
        # The trainer reads pixels only if the responses are trained on.
        if task_images and task.is_learnt_from:
            index = payload.dictionary(c.PROMPT).index
            images = [
                task_images.of(prompt_index)
                for prompt_index in dict.fromkeys(answer.prompt_index for answer in answers)
            ]
            own = [answer.images for answer in answers]
            payload.update({c.IMAGES: DictionaryColumn(images, index), c.RESPONSE_IMAGES: own})
            numbers = replace(numbers, image_bytes=sum(each.nbytes for each in (*images, *own) if each))
        texts = self._texts(answers)
        per_sample = answer_numbers(answers, task.num_samples)
        if self._answering:
            per_sample |= turn_numbers(answers) | per_turn(answers)
            numbers = replace(numbers, failure=next((answer.failed for answer in answers if answer.failed), ""))
        return payload, texts, replace(numbers, per_sample=per_sample, num_damaged=source.num_damaged)

    def _converse(
        self,
        task: GenerateTask,
        queue: JobQueue,
        open_answers: Open,
        finished: Callable[[Job, list[Conversation]], None],
        task_images: TaskImages | None,
    ) -> tuple[Conversations, int]:
        """Run the engine until the queue is empty. Returns all conversations, and the number of trajectories that a
        later step restarts.
        """
        images_of = task_images.of if task_images else lambda prompt_index: None
        if not self._answering:
            source = Conversations(queue, self._vocabulary, open_answers, finished, images=images_of)
            self.engine.generate(source, task.sampling)
            return source, 0
        rows, places = self._rows[task.split], task.rows.tolist()
        seeds = sample_seeds(task.seed, task.step, places, 1, "environment")
        self._answering.begin(lambda prompt_index: rows[places[prompt_index]], seeds)
        answering = (self._answering, task.sampling.max_tokens)
        source = Conversations(queue, self._vocabulary, open_answers, finished, answering, images_of)
        self.engine.generate(source, task.sampling)
        num_begun_anew = source.discard_interrupted()
        self._answering.reset()
        self._agent_log.append(f"replica {self._replica.number}", self._answering.printed())
        return source, num_begun_anew

    def _bring_weights(self) -> tuple[float, SyncReport | None]:
        """Sync the weights if the policy has a new version. Returns seconds, and the report if there was a sync."""
        started = time.perf_counter()
        version = self._version()
        report = None
        if self.weight_sync.version != version:
            self.offloader.enter_phase("sync", whole=True)
            report = self.weight_sync.run(version, free_training_copy=lambda: self.offloader.enter_phase("gen"))
        else:
            self.offloader.enter_phase("gen")
        self._device.synchronize()
        return time.perf_counter() - started, report

    def _open(self, task: GenerateTask, begun: Batch) -> Open:
        prompts = [self._prompts[task.split].prompt(row) for row in task.rows.tolist()]
        answers = begun_conversations(begun, prompts, task.num_samples)
        return {(answer.prompt_index, answer.sample): answer for answer in answers}

    def _queue(self, task: GenerateTask, open_answers: Open, task_images: TaskImages | None) -> JobQueue:
        size = samples_per_job(len(task.rows), task.num_samples, self._replica.count, self._rollout.max_num_seqs)
        seeds = sample_seeds(task.seed, task.step, task.rows.tolist(), task.num_samples, task.split)
        seeds = seeds.reshape(-1, task.num_samples)
        # All ranks build the same list, because replicas exchange indices into it.
        jobs = []
        for prompt_index in range(len(task.rows)) if task.order is None else task.order.tolist():
            prompt = self._prompts[task.split].prompt(int(task.rows[prompt_index]))
            mask = None if task.pending_mask is None else task.pending_mask[prompt_index]
            pending = np.arange(task.num_samples) if mask is None else np.flatnonzero(mask)
            for first in range(0, len(pending), size):
                samples = pending[first : first + size]
                answers = [open_answers.get((prompt_index, sample)) for sample in samples.tolist()]
                given = tuple(answer.tokens if answer else _NOTHING for answer in answers) if any(answers) else None
                jobs.append(Job(prompt_index, samples, prompt, seeds[prompt_index, samples], given))
        num_dealt = min(len(jobs), self._replica.count * (self._rollout.max_num_seqs // size))
        prepare = task_images.prepare if task_images else list
        key = f"rollout/{task.call}"
        target = task.target_complete, task.num_required
        can_end = self._can_be_aborted
        return JobQueue(jobs, num_dealt, self._serving_replica, self._store, key, *target, prepare, can_end=can_end)

    def _hand_out(self, job: Job, answers: list[Conversation]) -> None:
        self._finished.put((job, self._texts(answers)))

    def _texts(self, answers: list[Conversation]) -> list[str]:
        if self._answering:
            return texts_with_trajectories(answers, self.encoder.decode_batch)
        return self.encoder.decode_batch([answer.tokens.tolist() for answer in answers])

    def take_finished(self, wait_s: float) -> tuple[list[str], Finished]:
        """Return the texts of jobs that ended since the last call. Waits up to ``wait_s`` for the first one.

        Called from a thread other than the generating one.
        """
        finished: list[tuple[Job, list[str]]] = []
        done = False
        try:
            item = self._finished.get(timeout=wait_s)
            while item is not None:
                finished.append(item)
                item = self._finished.get_nowait()
            done = True
        except Empty:
            pass
        texts = [text for _, job_texts in finished for text in job_texts]
        nothing = np.zeros(0, dtype=np.int64)
        places = np.concatenate([nothing, *(np.full(len(job.samples), job.prompt_index) for job, _ in finished)])
        samples = np.concatenate([nothing, *(job.samples for job, _ in finished)])
        return texts, Finished(places, samples, done)

    def save_answers(self, batch: Batch, file: str) -> None:
        """See `write_answers`."""
        write_answers(batch, file)

    def load_answers(self, file: str) -> tuple[Batch, list[str], dict[str, Array]]:
        """Load responses (see `read_answers`) with their texts. Raises ConfigError if one exceeds the current limit."""
        payload, numbers = read_answers(file, self._prompts["train"], images=self._images)
        limit, lengths = self._max_response_length, numbers[c.RESPONSE_LENGTH] + (1 - numbers[c.COMPLETE])
        if (longest := int(lengths.max(initial=0))) > limit:
            raise ConfigError(
                f"data.max_response_length={limit}: partial responses in the checkpoint (rollout.tail=carry_over) are "
                f"already longer. Set it to at least {longest}."
            )
        texts = self.encoder.decode_batch([row.tolist() for row in payload.ragged(c.RESPONSE).rows()])
        return payload, texts, numbers

    def abort(self) -> None:
        abort(self._store)

    def _refuse_damaged(self, source: Conversations) -> None:
        """Raise NonFiniteError if more than a few responses are damaged. A few do no harm: they are empty, without a
        loss."""
        if source.num_damaged > _MOST_DAMAGED * len(source.all):
            raise NonFiniteError(
                f"{source.num_damaged} of {len(source.all)} responses of the rollout engine '{self._rollout.name}' "
                "have "
                f"token ids outside the vocabulary of {self._vocabulary} ({source.num_unknown} tokens) or non-finite "
                "log-probs: its weights or the engine are damaged. At the first step, check the files of "
                "actor_rollout_ref.model.path; later, resume from an older checkpoint with "
                "trainer.resume_mode=resume_path."
            )


def log_prob_gap_limit(cfg: Config, device: Device) -> float:
    """Return the largest mean |log pi_engine - log pi_trainer| of a correct engine (``rollout.log_prob_gap_limit``)."""
    rollout, fsdp = cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.actor.fsdp_config
    if rollout.log_prob_gap_limit is not None:
        return rollout.log_prob_gap_limit
    # Two correct implementations differ only by rounding, which is far coarser in half precision than in float32.
    exact = all(resolve_dtype(name, device) == torch.float32 for name in (rollout.dtype, fsdp.compute_dtype))
    return 1e-3 if exact else 0.1


def _canary(prompts: dict[str, PromptStore], seeing: ChatEncoder | None) -> EncodedPrompt:
    """Return the start of the first prompt, at least two tokens. For a model with images: a prompt with an image, up
    to shortly after it."""
    if seeing:
        store = next((store for store in prompts.values() if store.has_images), None)
        if store:
            # Choose the prompt with the fewest image tokens, because this forward pass has no token budget.
            tokens = np.where(store.num_images > 0, store.image_tokens, np.iinfo(np.int64).max)
            prompt = store.encoded(int(tokens.argmin()))
        else:  # no prompt has images; tools may return some
            prompt = seeing.encode_prompt([{"role": "user", "content": SLOT}], [blank_image()])
        if len(prompt.tokens) > prompt.image_end:
            return prompt.until(prompt.image_end + _CANARY_TOKENS)
    first = next((store.prompt(0) for store in prompts.values() if len(store)), np.zeros(1, dtype=np.int32))
    # The first token of a text has no log-prob, so a single token cannot be compared.
    return EncodedPrompt((first if len(first) > 1 else first.repeat(2))[:_CANARY_TOKENS])
