"""Check of the server of a judge before a run."""

import asyncio
from dataclasses import replace

from rltrain.common.errors import ConfigError
from rltrain.config.schema.judge import JudgeConfig
from rltrain.rewards.judge.server import JudgeServer, JudgeUnavailable
from rltrain.rewards.processes.judging import check_judge
from rltrain.run.preflight.models import PreflightResult

_PATIENCE_S = 5.0
_NAMED = 4


def check_judge_server(judge: JudgeConfig, result: PreflightResult) -> list[str]:
    """Check the judge's keys, and its server with one cheap request (``/models``). Return a line for the report.

    No response is judged, because that may cost money. An unreachable server is only a note, because it may be started
    later.
    """
    try:
        check_judge(judge)
    except ConfigError as error:
        result.problems.append(str(error))
        return []
    if judge.url is None:  # it runs on the devices
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


async def _models(judge: JudgeConfig) -> list[str]:
    server = JudgeServer(judge)
    try:
        return await server.models()
    finally:
        await server.close()
