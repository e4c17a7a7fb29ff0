"""Training shards -> rollout engine."""

from __future__ import annotations

from rltrain.models.forward import PolicyModel
from rltrain.models.shard import named_weights
from rltrain.workers.rollout.base import RolloutEngine


class WeightSync:
    """Knows which policy version the engine holds, and brings it the current one.

    The version is the number of optimizer updates since the start of the process; an engine that lost its weights has none.
    """

    def __init__(self, policy: PolicyModel, engine: RolloutEngine) -> None:
        self._policy = policy
        self._engine = engine
        self._engine_version: int | None = None

    def needed(self, version: int) -> bool:
        return self._engine_version != version

    def run(self, version: int) -> None:
        """Gather every weight and hand it to the engine (a collective)."""
        self._engine.load_weights(named_weights(self._policy))
        self._engine_version = version

    def lost(self) -> None:
        """The engine has given its weights back."""
        self._engine_version = None
