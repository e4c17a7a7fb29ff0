"""The weight of the entropy bonus in the actor's loss, which a controller may change from step to step."""

from __future__ import annotations

from collections.abc import Mapping

from rltrain.algorithms.entropy import adapted_entropy_coef, entropy_weight
from rltrain.algorithms.moments import Moments
from rltrain.config.schema import ActorConfig
from rltrain.trainer.progress import Progress


class EntropyBonus:
    """Holds what the controller has found (``actor.adaptive_entropy``); without it the weight is the config's."""

    def __init__(self, cfg: ActorConfig) -> None:
        self.coef = cfg.entropy_coeff
        self._cfg = cfg

    def restore(self, progress: Progress) -> None:
        """Go on with what the controller had found; a fixed weight follows the config, which may have changed."""
        if progress.entropy_coef is not None and self._cfg.adaptive_entropy.enabled:
            self.coef = progress.entropy_coef

    def weight(self, measured: Mapping[str, Moments]) -> float:
        """That of a step in whose old_log_prob pass ``measured`` was found; then the controller moves."""
        control = self._cfg.adaptive_entropy
        if not control.enabled:
            return self.coef
        entropy = measured["entropy"]
        if not entropy.count:  # all answers are empty
            return 0.0
        weight = entropy_weight(self.coef, entropy.mean, control)
        self.coef = adapted_entropy_coef(self.coef, entropy.mean, control)
        return weight
