"""Coefficient of the entropy bonus in the actor's loss, which a controller may update every step."""

from __future__ import annotations

from collections.abc import Mapping

from rltrain.algorithms.entropy import adapted_entropy_coef, entropy_weight
from rltrain.algorithms.moments import Moments
from rltrain.config.schema import ActorConfig
from rltrain.trainer.progress import Progress


class EntropyBonus:
    """Entropy coefficient: the controller's state (``actor.adaptive_entropy``), or a constant from the config."""

    def __init__(self, cfg: ActorConfig) -> None:
        self.coef = cfg.entropy_coeff
        self._cfg = cfg

    def restore(self, progress: Progress) -> None:
        """Restore the controller's coefficient. A fixed coefficient is read from the config, which may have changed."""
        if progress.entropy_coef is not None and self._cfg.adaptive_entropy.enabled:
            self.coef = progress.entropy_coef

    def weight(self, measured: Mapping[str, Moments]) -> float:
        """Return the coefficient for the step that measured ``measured``, then update the controller."""
        control = self._cfg.adaptive_entropy
        if not control.enabled:
            return self.coef
        entropy = measured["entropy"]
        if not entropy.count:  # all responses are empty
            return 0.0
        weight = entropy_weight(self.coef, entropy.mean, control)
        self.coef = adapted_entropy_coef(self.coef, entropy.mean, control)
        return weight
