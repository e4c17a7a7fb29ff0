"""Keys under reward.judge: a model that judges responses.

It runs behind an OpenAI-compatible server or on the run's devices.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from rltrain.config.schema.fields import key

# Forms of `parse`: the scorer, a user's function, or else a regular expression reads the reply.
BY_RULE = "rule"
_FUNCTION = re.compile(r".+\.py:[A-Za-z_]\w*")
_SERVED = {"url": "the judge runs on the run's devices (reward_model.model.type=generative), so no server is used"}


@dataclass
class JudgeConfig:
    """A model that judges responses, behind any OpenAI-compatible server or on the run's devices."""

    url: str | None = None
    """Address of the server's API, such as http://host:port/v1; null: no judge, or with
    reward_model.model.type=generative one on the run's devices."""
    model: str | None = key(None, only_with=_SERVED)
    """The model's name at that server."""
    prompt: str | None = None
    """File with a Jinja template of the message to the judge, with question, answer, ground_truth, data_source and
    extra_info; null: one that fits parse."""
    parse: str | None = None
    """Conversion of the judge's reply to a score. null: yes, no or a number from 0 to 1 in its last box or line. A
    regular expression: such a word or any number, in its last match. rule: the scorer of the data_source compares the
    reply as if it were a response. FILE.py:NAME: a user's function, called as a reward function with the reply as
    solution_str."""
    rule: Literal["none", "beside", "first"] = "none"
    """Role of the scorer of the data_source. none: only the judge decides. beside: both run, and reward.weights weighs
    the scorer's numbers and the judge's, called judge. first: only responses that the scorer does not call right are
    judged."""
    images: bool = False
    """Send the images of the prompt too."""
    request: dict[str, Any] = key({"temperature": 0}, only_with=_SERVED)
    """Free-form: further fields of a request, such as temperature, max_tokens or seed."""
    max_concurrency: int = key(32, least=1, only_with=_SERVED)
    """Concurrent requests, over all of reward.num_workers (null: one per node)."""
    rate_limit_per_min: float | None = key(None, over=0, only_with=_SERVED)
    """Requests started per minute, over all of reward.num_workers; null: no limit."""
    timeout_s: float = key(60.0, least=0.01, only_with=_SERVED)
    """Timeout of one request in seconds. It is retried up to five times, and whenever the server specifies when to
    retry."""
    deadline_s: float = key(600.0, least=0.01, only_with=_SERVED)
    """Seconds that a step waits for the judge after all responses have ended; responses that are not judged by then
    count as failed."""
    max_tokens_total: int | None = key(None, least=1)
    """Limit of the tokens of prompts and replies in one start of the run, which then ends. null: no limit."""
    cache: str | None = key(None, only_with=_SERVED)
    """SQLite file of replies that had a score, created if missing: the same model, message and request are not sent
    again. null: none."""
    api_key_env: str | None = key(None, only_with=_SERVED)
    """Name of the environment variable with the server's key, which is read by the scoring processes and stored
    nowhere. null: no key."""

    @property
    def function(self) -> tuple[str, str] | None:
        """File and name of the function that reads a reply; None if there is none."""
        file, _, name = (self.parse or "").rpartition(":")
        return (file, name) if _FUNCTION.fullmatch(self.parse or "") else None

    @property
    def runs_rule(self) -> bool:
        """True if the scorer of the data source is needed."""
        return self.rule != "none" or self.parse == BY_RULE
