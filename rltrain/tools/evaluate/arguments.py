"""Arguments of ``rltrain evaluate``. No import here takes seconds, so that a missing argument is reported at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from rltrain.config.schema.arguments import listed, read_arguments, required
from rltrain.config.schema.fields import key

_ANSWERS = "actor_rollout_ref.rollout.val_kwargs."
# Short names of keys below _ANSWERS.
_SHORT = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "stop")
_OTHER_WORDS = {
    "trainer.val_only": "an evaluation does not train",
    "trainer.default_local_dir": "out=FOLDER sets the folder of the results",
    "trainer.resume_mode": "model=CHECKPOINT sets the weights",
    "trainer.resume_from_path": "model=CHECKPOINT sets the weights",
    "trainer.resume_weights_only": "model=CHECKPOINT sets the weights",
    "trainer.samples_freq": "all responses are saved",
    "trainer.samples_max_prompts": "all responses are saved",
    "data.val_files": "data=FILES sets them",
    "actor_rollout_ref.model.path": "model=PATH sets it",
}


@dataclass(frozen=True)
class Arguments:
    """Arguments of the command that are not keys of the trainer."""

    model: list[str] = required("a Hugging Face folder, a checkpoint or a run")
    data: list[str] = required("one or more data files")
    out: str | None = None
    n: int = key(0, least=1)
    """Responses per prompt; 0: as in val_kwargs."""


# All names without a dot that the command accepts.
NAMES = (*(each.name for each in fields(Arguments)), *_SHORT)


def split_arguments(words: Sequence[str], problems: Sequence[str]) -> tuple[Arguments, list[str]]:
    """Return the arguments, and the words that are keys of the trainer. Raises ConfigError with all errors."""
    foreign = [word for word in words if word.partition("=")[0] in _OTHER_WORDS]
    wrong = [*problems, *(f"{word}: {_OTHER_WORDS[word.partition('=')[0]]}. Leave the key out." for word in foreign)]
    rest = list[str]()
    wrong += [
        f"{word}: results go into one folder." for word in words if word[:4] == "out=" and len(listed(word[4:])) > 1
    ]
    own = read_arguments(
        Arguments, [word for word in words if word not in foreign], others=rest, elsewhere=_SHORT, problems=wrong
    )
    rest = [f"{_ANSWERS}{word}" if word.partition("=")[0] in _SHORT else word for word in rest]
    rest += [f"{_ANSWERS}n={own.n}"] if own.n else []
    return own, rest
