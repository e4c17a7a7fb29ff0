"""Keys under reward and custom_reward_function: scorers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from rltrain.config.schema.algorithm import FILTER_METRICS, AlgorithmConfig
from rltrain.config.schema.engines import ENGINES
from rltrain.config.schema.fields import key, section
from rltrain.config.schema.judge import JudgeConfig
from rltrain.config.schema.model import RewardModelConfig

_REMOTE = {"url": "reward.url is not set"}
_LEAST_SCORER_MEMORY_MB = 256


@dataclass
class CustomRewardConfig:
    """The user's reward function."""

    path: str | None = None
    """Python file with the function; null: the built-in scorer of each data_source."""
    name: str = "compute_score"
    """Function (data_source, solution_str, ground_truth, extra_info) -> number, or dict with 'score'."""
    reward_kwargs: dict[str, Any] = key({})
    """Free-form: further keyword arguments of the function."""


@dataclass
class RewardConfig:
    """Placement and limits of scorers."""

    num_workers: int | None = key(None, least=1)
    """Processes that score responses; null: one per core not used by the devices' workers, at most 16 per node and 64
    in total."""
    timeout_s: float = key(10.0, least=0.01)
    """Time limit in seconds for scoring one response; then its scorer is killed and the response counts as failed."""
    on_error: float = 0.0
    """Score of a response that could not be scored (counted in reward/error_rate)."""
    weights: dict[str, Any] = key({})
    """Free-form: the rule reward as a weighted sum of numbers that the scorer returns (weights.acc=0.9
    weights.format=0.1); {}: its score."""
    overlap: bool = True
    """Score the responses to a prompt as soon as the last of them has ended, while others are still being generated."""
    memory_limit_mb: int = key(4096, least=0)
    """Address space of a scorer's process in MiB; a response that exceeds it counts as failed. 0: no limit."""
    allow_code_execution: bool = False
    """Allow scorers to run programs that the model wrote. rewards.md of the documentation lists the limits."""
    allow_unsandboxed_code: bool = False
    """Run such programs even on a kernel without user namespaces and Landlock, where only checks inside Python limit
    them.
    """
    url: str | None = None
    """Address of a remote scorer (http://host:port/path), which scores the responses instead of local processes."""
    url_concurrency: int = key(8, least=1, only_with=_REMOTE)
    """Number of responses that each of num_workers (null: one per node) sends to reward.url at once."""
    url_headers: dict[str, Any] = key({}, only_with=_REMOTE)
    """Free-form: headers for reward.url, such as url_headers.Authorization='Bearer ${oc.env:TOKEN}'; masked in
    config.yaml."""
    judge: JudgeConfig = section(
        JudgeConfig,
        only_with={"judge.url or reward_model.judges": "neither reward.judge.url nor a generative reward model is set"},
    )
    """A model that judges responses."""

    @property
    def is_elsewhere(self) -> bool:
        """True if scoring mostly waits for a server."""
        return self.url is not None or self.judge.url is not None


@dataclass(frozen=True)
class ScoringConfig:
    """The sections that scorers read."""

    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)


def reward_problems(config: ScoringConfig, max_response_length: int) -> Iterator[str]:
    """Yield one line for every broken rule about scorers and the reward model."""
    yield from _reward_model(config, max_response_length)
    yield from _scorers(config)
    yield from _judge(config)


def reward_terms(config: ScoringConfig, algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield errors for an estimator that normalizes each number of the scorer separately (GDPO).

    It excludes every other way to combine rewards.
    """
    model = config.reward_model
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if weights is not None and len(weights) != len(keys):
        yield f"algorithm.gdpo_reward_weights={weights}: give one weight for each of gdpo_reward_keys={keys}."
    if not algorithm.estimator.reward_terms:
        return
    chosen = f"algorithm.adv_estimator={algorithm.adv_estimator}"
    if not keys:
        yield f"{chosen} needs algorithm.gdpo_reward_keys, the numbers a scorer returns, such as [acc,format]."
    other_terms = {
        "algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
        "reward_model.enable": model.classifies,
        "reward.weights": bool(config.reward.weights),
        "reward_model.overlong_buffer.enable": model.reward_manager == "dapo" and model.overlong_buffer.enable,
    }
    for term in (term for term, on in other_terms.items() if on):
        yield f"{chosen} uses gdpo_reward_keys only, so {term} would be ignored. Leave it out, or use grpo."


def asked_of_scorers(model: RewardModelConfig, algorithm: AlgorithmConfig, sampler: str) -> Iterator[str]:
    """Yield errors for settings that read the numbers of a scorer, without a scorer. sampler: the prompt sampler's
    name."""
    metric = algorithm.filter_groups.metric
    asking = {
        f"algorithm.adv_estimator={algorithm.adv_estimator}": algorithm.estimator.reward_terms,
        f"data.sampler.name={sampler}": sampler == "solve_rate",
        f"algorithm.filter_groups.metric={metric}": (algorithm.filter_groups.enable and metric not in FILTER_METRICS),
    }
    for setting in (setting for setting, asks in asking.items() if asks and not model.runs_scorers):
        yield _needs_scorer(model, setting)


def _needs_scorer(model: RewardModelConfig, setting: str) -> str:
    return (
        f"{setting} needs a scorer, but with a reward model no scorer runs unless reward_model.rule_weight is set (got "
        f"{'null' if model.rule_weight is None else model.rule_weight})."
    )


def _reward_model(config: ScoringConfig, max_response_length: int) -> Iterator[str]:
    model, buffer = config.reward_model, config.reward_model.overlong_buffer
    if model.classifies and model.rule_weight is None and config.custom_reward_function.path:
        # verl 0.5 takes the model's score. Its main branch takes the score of the function, which calls the model over
        # HTTP.
        yield (
            f"reward_model.enable=True and custom_reward_function.path={config.custom_reward_function.path} both score "
            "responses, and verl's versions differ in which one counts. Set reward_model.rule_weight=0 for the model "
            "only, reward_model.rule_weight=1 for the sum, or leave reward_model.enable out for the function. A "
            "function that asks the model to judge in words becomes reward_model.model.type=generative with "
            "reward.judge.prompt and reward.judge.parse."
        )
    if not model.runs_scorers:
        if model.weight == 0:
            yield "reward_model.weight=0 without reward_model.rule_weight means no reward. Set one of them."
        if config.reward.weights:
            yield _needs_scorer(model, f"reward.weights={config.reward.weights}")
    if model.reward_manager == "batch" and not config.custom_reward_function.path:
        needs = "custom_reward_function.path, a function that takes lists"
        yield f"reward_model.reward_manager=batch needs {needs}. Or use naive."
    if model.enable and not model.model.path:
        kind = "a chat model" if model.judges else "a sequence classifier with one label"
        yield f"reward_model.enable=True needs reward_model.model.path, {kind}."
    limit, named = max_response_length, "data.max_response_length"
    if buffer.max_resp_len:
        limit, named = buffer.max_resp_len, "reward_model.overlong_buffer.max_resp_len"
    if model.reward_manager == "dapo" and buffer.enable and not 0 < buffer.len <= limit:
        yield f"reward_model.overlong_buffer.len={buffer.len}: it must be at least 1 and at most {named}={limit}."


def _scorers(config: ScoringConfig) -> Iterator[str]:
    reward = config.reward
    if 0 < reward.memory_limit_mb < _LEAST_SCORER_MEMORY_MB:
        least = f"0 (no limit) or at least {_LEAST_SCORER_MEMORY_MB}"
        yield f"reward.memory_limit_mb={reward.memory_limit_mb}: a scorer's process needs more. Use {least}."
    if reward.url is None:
        return
    if config.custom_reward_function.path:
        yield "reward.url and custom_reward_function.path both define the score. Keep one of them."
    if not _is_address(reward.url):
        yield f"reward.url={reward.url!r} is not a URL. Use the form http://host:port/path."


def _judge(config: ScoringConfig) -> Iterator[str]:
    judge, custom = config.reward.judge, config.custom_reward_function.path
    if judge.url is not None:
        yield from _served_judge(config.reward, judge.url)
    if config.reward_model.judges:
        yield from _judge_on_devices(config)
    if judge.url is None and not config.reward_model.judges:
        return
    if custom and not judge.runs_rule:
        yield (
            f"custom_reward_function.path={custom} is not called: with reward.judge.rule=none only the judge scores. "
            "Set reward.judge.rule=first or beside, or leave the function out."
        )
    if judge.rule == "beside" and "judge" not in config.reward.weights:
        yield (
            "reward.judge.rule=beside needs reward.weights for the scores of judge and scorer, such as "
            "reward.weights.score=0.5 reward.weights.judge=0.5."
        )
    if judge.rule == "first" and "judge" in config.reward.weights:
        yield (
            "reward.weights.judge needs a judge score for every response, but with reward.judge.rule=first the judge "
            "skips responses that the scorer accepts. Set reward.judge.rule=beside, or leave the weight out."
        )


def _judge_on_devices(config: ScoringConfig) -> Iterator[str]:
    generative, rollout = "reward_model.model.type=generative", config.reward_model.rollout
    for other_key, other in (("reward.judge.url", config.reward.judge.url), ("reward.url", config.reward.url)):
        if other is not None:
            yield f"{other_key} and {generative} both define the score. Keep one of them."
    if not ENGINES[rollout.name].embedded:
        yield (
            f"reward_model.rollout.name={rollout.name}: the judge's engine runs next to the policy's in every worker, "
            "and only the embedded engine supports that. Use reward_model.rollout.name=hf, or serve the judge "
            "elsewhere and set reward.judge.url and reward.judge.model."
        )
    if config.reward.judge.images:
        yield (
            f"reward.judge.images=True: a judge on the run's devices ({generative}) reads texts only. Leave it out, or "
            "serve the judge elsewhere and set reward.judge.url and reward.judge.model."
        )


def _served_judge(reward: RewardConfig, url: str) -> Iterator[str]:
    judge = reward.judge
    if not _is_address(url):
        yield f"reward.judge.url={url!r} is not a URL. Use the form http://host:port/v1."
    if not judge.model:
        yield "reward.judge.url needs reward.judge.model, the model's name at that server."
    if reward.url is not None:
        yield "reward.url and reward.judge.url both define the score. Keep one of them."
    taken = sorted({"model", "messages", "stream", "n"} & judge.request.keys())
    if taken:
        yield f"reward.judge.request.{taken[0]} is set by rltrain. Leave it out."
    if reward.num_workers is not None and reward.num_workers > judge.max_concurrency:
        yield (
            f"reward.num_workers={reward.num_workers} processes cannot share reward.judge.max_concurrency="
            f"{judge.max_concurrency} requests. Lower the former or raise the latter."
        )
    if judge.api_key_env is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", judge.api_key_env):
        # The key itself may be written here, so it is not printed.
        yield "reward.judge.api_key_env is not the name of an environment variable. Give a name such as JUDGE_API_KEY."


def _is_address(url: str) -> bool:
    try:
        address = urlsplit(url)
        # Reading `port` raises ValueError too, if it is not a number.
        return address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:
        return False
