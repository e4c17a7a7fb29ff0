"""Rules of the profiling keys."""

from __future__ import annotations

from collections.abc import Iterator

from rltrain.config.passes import step_phases
from rltrain.config.schema import Config


def profile_problems(config: Config) -> Iterator[str]:
    """Yield errors for steps, phases and ranks that a run does not have."""
    trainer = config.trainer
    last = trainer.total_training_steps
    for step in trainer.profile_steps or ():
        if step < 1 or (last is not None and step > last):
            steps = f"from 1 to trainer.total_training_steps={last}" if last is not None else "counted from 1"
            yield f"trainer.profile_steps={trainer.profile_steps}: there is no step {step}. Steps are {steps}."
    for name in trainer.profile_phases:
        if name not in step_phases():
            yield (
                f"trainer.profile_phases={trainer.profile_phases}: there is no phase {name!r}. A step may have "
                f"{', '.join(step_phases())}."
            )
    devices = trainer.nnodes * trainer.n_gpus_per_node
    for rank in trainer.profile_ranks:
        if not 0 <= rank < devices:
            yield (
                f"trainer.profile_ranks={trainer.profile_ranks}: there is no rank {rank}. With "
                f"{devices} devices (trainer.nnodes x trainer.n_gpus_per_node) ranks are 0 to {devices - 1}."
            )
