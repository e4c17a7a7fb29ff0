"""A judge before a run: whether what it is asked can be made, and whether its server is there."""

import asyncio
from dataclasses import replace

from rltrain.base.errors import ConfigError
from rltrain.config.schema import Config
from rltrain.config.schema.judge import JudgeConfig
from rltrain.rewards.judge.server import JudgeServer, Unanswered
from rltrain.rewards.processes.judged import check_judge
from rltrain.run.preflight.models import Findings

_PATIENCE_S = 5.0
_NAMED = 4


def look_at_judge(cfg: Config, found: Findings) -> list[str]:
    """What to say of the judge. One cheap request (``/models``) is made, and no answer is judged: that may cost money.

    A server that is not there now is worth a note, since it may be there when the run is.
    """
    judge = cfg.reward.judge
    try:
        check_judge(cfg)
    except ConfigError as error:
        found.problems.append(str(error))
        return []
    try:
        models = asyncio.run(_models(replace(judge, timeout_s=min(judge.timeout_s, _PATIENCE_S))))
    except Unanswered as error:
        found.notes.append(f"reward.judge.url={judge.url}: {judge.url}/models does not answer now: {error}")
        return []
    if judge.model not in models:
        named = ", ".join(models[:_NAMED]) + (f" and {len(models) - _NAMED} more" if len(models) > _NAMED else "")
        found.notes.append(f"reward.judge.model={judge.model} is not among the models of its server: {named or 'none'}")
        return []
    return [f"judge: {judge.url} answers and has {judge.model}; no answer was judged"]


async def _models(judge: JudgeConfig) -> list[str]:
    server = JudgeServer(judge)
    try:
        return await server.models()
    finally:
        await server.close()
