"""Judge: a generative reward model whose replies score responses.

It shares the device in time like every role. Its weights are sharded over all ranks like the reference's and may be
offloaded. For a call, the weights are sent to an engine of the policy's type by the policy's weight sync (including the
canary), and freed when another phase begins. Messages are dealt to the ranks by length, not pulled from a shared queue,
so that batches, and therefore every bit of a reply, depend only on the messages.

Left out: images, and engines that allocate their memory at startup, because a process can have only one of these.
"""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch, DictionaryColumn
from rltrain.common.columns.ragged import Ragged
from rltrain.common.errors import ConfigError, DataError, replace_surrogates
from rltrain.common.seeds import name_seed
from rltrain.config.budgets import judge_lengths
from rltrain.config.passes import JUDGE_PHASE
from rltrain.config.schema import Config
from rltrain.config.schema.model import RewardModelModelConfig
from rltrain.config.schema.rollout import RolloutConfig
from rltrain.config.step_passes import StepPasses
from rltrain.data.chat import ChatEncoder
from rltrain.data.images import EncodedPrompt
from rltrain.models.weights.spec import Specs
from rltrain.rewards.judge.reply import Reply
from rltrain.workers.inference_models import load_role, measure
from rltrain.workers.interface.results import JudgeNumbers
from rltrain.workers.interface.roles import Judge
from rltrain.workers.rollout.contract import Job, RolloutEngine, Sampling
from rltrain.workers.rollout.conversations import Conversations
from rltrain.workers.rollout.queue import JobQueue, Replica
from rltrain.workers.rollout.settings import EngineSettings, make_engine
from rltrain.workers.state.offload_manager import OffloadManager
from rltrain.workers.state.weight_sync import EngineNames, WeightSync

# Every rank is a separate engine with separate messages.
_ALONE = Replica(number=0, count=1, member=0, size=1)
_HELLO = [{"role": "user", "content": "Is this answer right?"}]
_NAMES = EngineNames("the judge's engine", "reward_model.model.path", "")


def judge_encoder(model: RewardModelModelConfig) -> ChatEncoder:
    """Return the encoder of a generative reward model. Raises ConfigError without a tokenizer or chat template."""
    kwargs = dict(model.apply_chat_template_kwargs)
    encoder = ChatEncoder(model.path or "", trust_remote_code=model.trust_remote_code, template_kwargs=kwargs)
    try:
        _ = encoder.tokenizer
    except DataError as error:
        raise ConfigError(f"reward_model.model.path={model.path}: {error}") from error
    return encoder


class JudgeWorker(Judge):
    """Shard of the judge, and an engine with all its weights."""

    def __init__(self, cfg: Config, specs: Specs, passes: StepPasses, offloader: OffloadManager) -> None:
        self._rollout = cfg.reward_model.rollout
        # Checks for an abort cost a little per token, so they run only if the configuration sets a stop notice.
        self._can_be_aborted = cfg.trainer.stop_notice_s is not None
        self._longest_message, self._longest_reply = judge_lengths(cfg)
        self.offloader, device = offloader, offloader.device
        self._encoder, spec = judge_encoder(cfg.reward_model.model), specs["judge"][1]
        self.model = load_role("judge", specs, passes, offloader)
        self._vocabulary = spec.load_config().get_text_config().vocab_size
        rollout = self._rollout
        settings = EngineSettings(
            rollout=RolloutConfig(
                name=rollout.name,
                gpu_memory_utilization=rollout.gpu_memory_utilization,
                max_num_seqs=rollout.max_num_seqs,
                max_num_batched_tokens=rollout.max_num_batched_tokens,
            ),
            model=spec,
            dtype=spec.compute_dtype,
            device=device,
            replica=_ALONE,
            eos_token_ids=self._encoder.eos_token_ids,
            max_model_len=self._longest_message + self._longest_reply,
            engines_sharing_memory=cfg.trainer.n_gpus_per_node if device.is_cpu else 1,
            images=False,
            section="reward_model.rollout",
            longest="response_length",
        )
        offloader.enter_phase(JUDGE_PHASE)
        self.engine: RolloutEngine = make_engine(settings)
        self._weight_sync = WeightSync(
            self.model,
            self.engine,
            device,
            spec.compute_dtype,
            bucket_bytes=cfg.actor_rollout_ref.rollout.update_weights_bucket_megabytes << 20,
            # Engine and shards have the same dtype; see `log_prob_gap_limit`.
            gap_limit=1e-3 if spec.compute_dtype == torch.float32 else 0.1,
            canary=EncodedPrompt(np.array(self._encoder.encode(_HELLO, tools=()), dtype=np.int32)),
            log_probs=self._text_log_probs,
            names=_NAMES,
        )
        offloader.add_engine(self._release, JUDGE_PHASE)

    def replies(self, batch: Batch, seed: int, reading: int) -> tuple[list[Reply], JudgeNumbers]:
        """Generate replies to the messages of this rank. Messages that are too long get an error text instead.

        A reply is a function of ``seed``, the message and ``reading``.
        """
        started = time.perf_counter()
        self.offloader.enter_phase(JUDGE_PHASE, whole=True)
        if self._weight_sync.version is None:
            self._weight_sync.run(0, lambda: None)
        texts = batch[c.JUDGE_MESSAGE] if len(batch) else []
        assert isinstance(texts, list)
        conversations = [[{"role": "user", "content": text}] for text in texts]
        messages = self._encoder.encode_batch(conversations, tools=()) if texts else []
        jobs = [
            _job(prompt_index, tokens, name_seed(seed, "judge", str(reading), text))
            for prompt_index, (tokens, text) in enumerate(zip(messages, texts, strict=True))
            if len(tokens) <= self._longest_message
        ]
        source = self._answered(jobs)
        answers = {answer.prompt_index: answer for answer in source.all}
        written = [
            answers[prompt_index].tokens.tolist() if prompt_index in answers else []
            for prompt_index in range(len(texts))
        ]
        replies = [
            Reply(replace_surrogates(text).strip(), "an empty reply", answers[prompt_index].truncated)
            if prompt_index in answers
            else Reply("", no_prompt=self._too_long(len(messages[prompt_index])))
            for prompt_index, text in enumerate(self._encoder.decode_batch(written) if written else [])
        ]
        num_tokens = sum(len(job.prompt) + len(written[job.prompt_index]) for job in jobs)
        self.offloader.device.synchronize()
        return replies, JudgeNumbers(num_tokens, time.perf_counter() - started)

    def _answered(self, jobs: list[Job]) -> Conversations:
        # Start with the longest prompts, so that no long reply runs alone at the end.
        jobs = sorted(jobs, key=lambda job: -len(job.prompt))
        store, key = dist.distributed_c10d._get_default_store(), f"judge/{dist.get_rank()}"
        queue = JobQueue(jobs, len(jobs), _ALONE, store, key, can_end=self._can_be_aborted)
        source, rollout = Conversations(queue, self._vocabulary), self._rollout
        greedy, temperature = rollout.temperature == 0, rollout.temperature or 1.0
        self.engine.generate(source, Sampling(self._longest_reply, temperature, rollout.top_k, rollout.top_p, greedy))
        if (num_left := len(jobs) - sum(not answer.aborted for answer in source.all)) and not queue.stopped():
            raise RuntimeError(f"the judge's engine '{rollout.name}' aborted {num_left} of the requested replies")
        return source

    def _too_long(self, length: int) -> str:
        return (
            f"the message to the judge has {length:,} tokens, and reward_model.rollout.prompt_length allows "
            f"{self._longest_message:,}"
        )

    def _text_log_probs(self, text: EncodedPrompt) -> Tensor:
        """Return log pi(token) at temperature 1 of all tokens but the first, computed as in a pass."""
        tokens, index = torch.from_numpy(text.tokens), torch.zeros(1, dtype=torch.long)
        answers = Ragged.from_rows([tokens[1:]])
        mask = answers.like(torch.ones_like(answers.values, dtype=torch.bool))
        prompts = DictionaryColumn(Ragged.from_rows([tokens[:1]]), index)
        batch = Batch({c.PROMPT: prompts, c.RESPONSE: answers, c.RESPONSE_MASK: mask})
        return measure(self.model, [batch], self.offloader.device, 1.0)[0]

    def _release(self) -> None:
        if self.engine.sleep():
            self._weight_sync.lost()


def _job(prompt_index: int, tokens: list[int], seed: int) -> Job:
    seeds = np.array([seed], dtype=np.uint64)
    return Job(prompt_index, np.zeros(1, dtype=np.int64), np.array(tokens, dtype=np.int32), seeds)
