"""A configuration that has been read: its values, and what is known of how they were written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from rltrain.config.schema import Config
from rltrain.config.schema.keys import followed

_KEYS = re.compile(r"\b[a-z]\w*(?:\.\w+)+")


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration that was read, and how it was written."""

    config: Config
    """Resolved."""
    explicit: frozenset[str] = frozenset()
    """The keys the user set, in our spelling."""
    warnings: tuple[str, ...] = ()
    """Renames, and keys without effect."""
    written: Mapping[str, str] = field(default_factory=dict)
    """The user's spelling of each key that was set by another name."""

    def as_written(self, text: str, *, follow: bool = True) -> str:
        """A message with the keys as the user wrote them: by the user's name, and (``follow``) in place of a key that
        has the value of another one, that one."""

        def origin(match: re.Match[str]) -> str:
            key = match[0]
            while follow and key not in self.explicit and (source := followed(key)):
                key = source
            return self.written.get(key, key)

        return _KEYS.sub(origin, text)
