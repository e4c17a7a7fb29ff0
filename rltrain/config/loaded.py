"""A loaded configuration: its values, and the spelling of its keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from rltrain.config.schema import Config
from rltrain.config.schema.keys import followed

_KEYS = re.compile(r"\b[a-z]\w*(?:\.\w+)+")


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration as loaded, with the user's spelling of keys."""

    config: Config
    """The resolved configuration."""
    explicit: frozenset[str] = frozenset()
    """Keys set by the user, in rltrain's spelling."""
    warnings: tuple[str, ...] = ()
    """Notes on renamed keys and keys without effect."""
    written: Mapping[str, str] = field(default_factory=dict)
    """The user's spelling of each key that was set by another name."""

    def as_written(self, text: str, *, follow: bool = True) -> str:
        """Return a message with the user's spelling of keys.

        follow: replace a key whose value follows another key by that key.
        """

        def origin(match: re.Match[str]) -> str:
            key = match[0]
            while follow and key not in self.explicit and (source := followed(key)):
                key = source
            return self.written.get(key, key)

        return _KEYS.sub(origin, text)
