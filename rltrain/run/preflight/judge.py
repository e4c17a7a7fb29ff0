"""Checks of a judge before a run: its requests, and its server or the length of its messages."""

import asyncio
from dataclasses import replace

from rltrain.common.errors import ConfigError, RltrainError, short
from rltrain.config.schema import ScoringConfig
from rltrain.config.schema.judge import JudgeConfig
from rltrain.data.rows import Rows
from rltrain.rewards.judge.message import Template
from rltrain.rewards.judge.server import JudgeServer, JudgeUnavailable
from rltrain.rewards.processes.judging import Questions, check_judge
from rltrain.run.preflight.models import PreflightResult
from rltrain.workers.judge import judge_encoder

_PATIENCE_S = 5.0
_NAMED = 4


def check_judge_server(judge: JudgeConfig, result: PreflightResult) -> list[str]:
    """Check the judge's server with one cheap request (``/models``). Return a line for the report.

    No response is judged, because that may cost money. An unreachable server is only a note, because it may be started
    later.
    """
    try:
        check_judge(judge)
    except ConfigError as error:
        result.problems.append(str(error))
        return []
    try:
        models = asyncio.run(_models(replace(judge, timeout_s=min(judge.timeout_s, _PATIENCE_S))))
    except JudgeUnavailable as error:
        result.notes.append(f"reward.judge.url={judge.url}: {judge.url}/models does not respond now: {error}")
        return []
    if judge.model not in models:
        named = ", ".join(models[:_NAMED]) + (f" and {len(models) - _NAMED} more" if len(models) > _NAMED else "")
        result.notes.append(
            f"reward.judge.model={judge.model} is not among the models of its server: {named or 'none'}"
        )
        return []
    return [f"judge: {judge.url} responds and has {judge.model}; no response was judged"]


def check_judge_messages(cfg: ScoringConfig, longest: int, rows: dict[str, Rows], result: PreflightResult) -> list[str]:
    """Check the message lengths of a judge on the devices. Return a line for the report.

    One row per data source is checked: its message, with the ground truth as the response, must not have more tokens
    than the longest message.
    """
    lines = {}
    try:
        check_judge(cfg.reward.judge)
        template, encoder = Template(cfg.reward.judge), judge_encoder(cfg.reward_model.model)
        for split in rows.values():
            questions = Questions(split, with_images=False)
            for source, number in split.data_sources().items():
                row = split[number]
                truth = str(row.ground_truth)
                text = template.filled(questions(number).text, truth, row.ground_truth, source, row.extra_info)
                lines[source] = len(encoder.encode([{"role": "user", "content": text}], tools=()))
    except RltrainError as error:
        result.problems.append(str(error))
        return []
    for source, length in lines.items():
        if length > longest:
            result.problems.append(
                f"reward_model.rollout.prompt_length={longest}: the message for a row of {short(source)!r}, with its "
                f"ground truth as the response, already has {length:,} tokens. Raise it."
            )
    lengths = ", ".join(f"{length:,} for {short(source)!r}" for source, length in lines.items())
    room = f"up to {longest:,} tokens; with the ground truth as the response they have {lengths}"
    return [f"judge: {cfg.reward_model.model.path} accepts messages of {room}; no response was judged"] if lines else []


async def _models(judge: JudgeConfig) -> list[str]:
    server = JudgeServer(judge)
    try:
        return await server.models()
    finally:
        await server.close()
