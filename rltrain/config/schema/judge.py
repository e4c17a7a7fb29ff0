"""Keys under reward.judge: a model that judges answers, behind an OpenAI-compatible server or on the run's devices."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from rltrain.config.schema.fields import key

# What `parse` may be: the scorer reads the reply, or a function of the user's, or else a regular expression.
BY_RULE = "rule"
_FUNCTION = re.compile(r".+\.py:[A-Za-z_]\w*")
_SERVED = {"url": "the judge is on the run's devices (reward_model.model.type=generative), and no server is asked"}


@dataclass
class JudgeConfig:
    """A model that judges answers, behind any OpenAI-compatible server or on the run's devices."""

    url: str | None = None
    """Address of the server's API, such as http://host:port/v1; null: no judge, or with
    reward_model.model.type=generative one on the run's devices."""
    model: str | None = key(None, only_with=_SERVED)
    """The model's name at that server."""
    prompt: str | None = None
    """File with a Jinja template of the message to the judge, with question, answer, ground_truth, data_source and
    extra_info; null: one that fits parse."""
    parse: str | None = None
    """What makes a score of the judge's reply. null: yes, no or a number from 0 to 1 in its last box or line. A regular
    expression: such a word or any number, in its last match. rule: the reply is an answer that the scorer of the
    data_source compares. FILE.py:NAME: your function, called as a reward function with the reply as solution_str."""
    rule: Literal["none", "beside", "first"] = "none"
    """What the scorer of the data_source does. none: the judge alone decides. beside: it runs too, and reward.weights
    weighs its numbers and the judge's, called judge. first: only what it does not call right is judged."""
    images: bool = False
    """Send the images of the prompt along."""
    request: dict[str, Any] = key({"temperature": 0}, only_with=_SERVED)
    """Free-form: further fields of a request, such as temperature, max_tokens or seed."""
    max_concurrency: int = key(32, least=1, only_with=_SERVED)
    """Requests under way at once, over all of reward.num_workers (null: one per node)."""
    rate_limit_per_min: float | None = key(None, over=0, only_with=_SERVED)
    """Requests begun per minute, over all of reward.num_workers; null: as many as there are."""
    timeout_s: float = key(60.0, least=0.01, only_with=_SERVED)
    """Seconds that one request may take. It is tried again, up to five times, and whenever the server names a time."""
    deadline_s: float = key(600.0, least=0.01, only_with=_SERVED)
    """Seconds that a step waits for the judge once it has all answers; what is not judged then counts as failed."""
    max_tokens_total: int | None = key(None, least=1)
    """Tokens of prompts and replies that one start of the run may use; then it ends. null: no limit."""
    cache: str | None = key(None, only_with=_SERVED)
    """SQLite file, made where it is missing, of replies that had a score: the same model, message and request are not
    asked again. null: none."""
    api_key_env: str | None = key(None, only_with=_SERVED)
    """Name of the environment variable with the server's key, which is read where answers are scored and stored
    nowhere. null: no key."""

    @property
    def function(self) -> tuple[str, str] | None:
        """File and name of the function that reads a reply, None where none does."""
        file, _, name = (self.parse or "").rpartition(":")
        return (file, name) if _FUNCTION.fullmatch(self.parse or "") else None

    @property
    def runs_rule(self) -> bool:
        """Whether the scorer of the data source is needed."""
        return self.rule != "none" or self.parse == BY_RULE
