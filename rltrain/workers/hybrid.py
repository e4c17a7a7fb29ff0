"""Hybrid worker: one process per device that hosts all roles, which share the device in time.

Engine and training weights seldom fit on a device together, and separate devices per role would be idle part of the
time. So all roles live in one process, and `OffloadManager` moves their memory per phase. Left out: worker groups for
single roles.
"""

from __future__ import annotations

from typing import Any

from rltrain.common.columns.batch import Batch
from rltrain.common.device import get_device
from rltrain.common.errors import ConfigError
from rltrain.common.plugin import EXTERNAL_LIB, import_libraries
from rltrain.common.versions import check_node
from rltrain.config.budgets import budgets
from rltrain.config.memory_keys import memory_keys
from rltrain.config.schema import Config
from rltrain.config.schema.engines import ENGINES
from rltrain.config.schema.rollout import RolloutConfig
from rltrain.config.step_passes import StepPasses
from rltrain.data.chat import chat_encoder
from rltrain.data.prompts import PromptStore
from rltrain.data.rows import Rows
from rltrain.models.forward import model_numbers
from rltrain.models.weights.spec import specs_of
from rltrain.workers.actor_ref import ActorRefWorker
from rltrain.workers.critic import CriticWorker
from rltrain.workers.demonstrations import DemonstrationWorker
from rltrain.workers.diagnostics.full_device import device_is_full, is_out_of_memory
from rltrain.workers.diagnostics.links import LinksWorker
from rltrain.workers.diagnostics.profiling import Profiler
from rltrain.workers.interface.results import PassNumbers
from rltrain.workers.interface.roles import Advantages, Models
from rltrain.workers.interface.tasks import TurnAdvantages
from rltrain.workers.judge import JudgeWorker
from rltrain.workers.reference import ReferenceWorker
from rltrain.workers.reward_model import RewardModelWorker
from rltrain.workers.rollout_worker import RolloutWorker, log_prob_gap_limit
from rltrain.workers.state.offload_manager import OffloadManager
from rltrain.workers.updates.token_advantages import spread_over_turns, token_advantages


class HybridWorker(Models, Advantages):
    """Worker process. ``roles``: targets of the driver's calls; each class has its Protocol as a base."""

    def __init__(self, cfg: Config, prompts: dict[str, PromptStore], rows: dict[str, Rows] | None = None) -> None:
        self._cfg = cfg
        import_libraries(EXTERNAL_LIB, cfg.actor_rollout_ref.model.external_lib)
        self._prompts = prompts
        self._rows = rows
        device = get_device(cfg.trainer.device)
        self.roles: list[object] = [self, LinksWorker(cfg.trainer.device), Profiler(device)]

    def init_models(self, passes: StepPasses) -> dict[str, Any]:
        """Load the models of ``passes.roles`` and the rollout engine. Returns sizes of the models and rates of the
        device."""
        device = get_device(self._cfg.trainer.device)
        device.activate()
        if not device.is_cpu:
            engine = None if passes.supervised else ENGINES[self._cfg.actor_rollout_ref.rollout.name].package
            check_node(device.kind, device.name, engine)
        self.offloader = offloader = OffloadManager(device)
        specs = specs_of(self._cfg, device, passes)
        self.actor = actor = ActorRefWorker(self._cfg, specs, passes, offloader)
        self.rollout = (
            DemonstrationWorker(self._prompts, chat_encoder(self._cfg), images=passes.images)
            if passes.supervised
            else RolloutWorker(
                self._cfg, passes, offloader, self._prompts, actor.policy, lambda: actor.num_updates,
                actor.text_log_probs, self._rows,
            )
        )  # fmt: skip
        self.roles += [self.actor, self.rollout, *([self.actor.inference_models] if passes.trains else [])]
        if passes.reference_moves:
            self.roles.append(
                ReferenceWorker(self._cfg.actor_rollout_ref.ref, actor.policy, actor.reference, offloader)
            )
        if "critic" in passes.roles:
            self.critic = CriticWorker(self._cfg.critic, self._cfg.trainer, specs, passes, offloader)
            self.roles.append(self.critic)
        if "reward_model" in passes.roles:
            assert self._rows is not None
            budget = budgets(self._cfg)["reward"]
            self.reward_model = RewardModelWorker(budget, specs, passes, offloader, self._rows)
            self.roles.append(self.reward_model)
        if "judge" in passes.roles:
            self.judge = JudgeWorker(self._cfg, specs, passes, offloader)
            self.roles.append(self.judge)
        assert passes.roles <= offloader.models.keys(), f"no worker loads {passes.roles - offloader.models.keys()}"
        if passes.trains and not passes.supervised:
            check_room(self._cfg.actor_rollout_ref.rollout, offloader)
        sizes = self.actor.sizes()
        for role, model in offloader.models.items():
            sizes |= {f"{role}_{name}": number for name, number in model_numbers(model).items()}
        return sizes | {"log_prob_gap_limit": log_prob_gap_limit(self._cfg, device)}

    def explain(self, error: Exception) -> Exception:
        """Convert an error for the user: an out-of-memory error lists memory by owner and the keys that reduce it."""
        if is_out_of_memory(error):
            return device_is_full(error, memory_keys(self._cfg, self.offloader.phase), self.offloader)
        return error

    def advantages(self, batch: Batch, kl_coef: float) -> tuple[Batch, PassNumbers]:
        """Compute token advantages and returns of this rank's samples."""
        return token_advantages(batch, self._cfg.algorithm, kl_coef)

    def spread_over_turns(self, batch: Batch, turns: TurnAdvantages) -> tuple[Batch, PassNumbers]:
        """Spread turn advantages over the tokens of this rank's samples."""
        return spread_over_turns(batch, turns)


def check_room(rollout: RolloutConfig, offloader: OffloadManager) -> None:
    """Raise ConfigError if the second generation would lack memory. Call with all models loaded and the engine asleep.

    An engine checks its memory share only when it starts. Optimizers allocate their state in the first update, and keep
    it during generation unless it is offloaded.
    """
    device = offloader.device
    if device.is_cpu or not ENGINES[rollout.name].package:  # the embedded engine uses whatever memory is free
        return
    offloader.enter_phase("gen")
    free, total = device.free_memory_bytes(), device.total_memory_bytes()
    engine = rollout.gpu_memory_utilization * total if rollout.free_cache_engine else 0.0
    to_come = offloader.future_optimizer_bytes()
    if engine + to_come > free:
        key = "actor_rollout_ref.rollout.gpu_memory_utilization"
        fits = max(free - to_come, 0) / total - 0.005
        lower = f"Set {key}={fits:.2f}, or" if engine and fits > 0.05 else "Set"
        raise ConfigError(
            f"after the first update this device would lack {(engine + to_come - free) / 2**30:.1f} GiB to generate: "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free, {key}={rollout.gpu_memory_utilization} requests "
            f"{engine / 2**30:.1f}, and the optimizer will need {to_come / 2**30:.1f}. {lower} "
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True (critic.model.fsdp_config likewise)."
        )
