"""The checks of `test_kinds`, run in a process that has the stand-in."""

import torch
import torch_npu  # noqa: F401 - installs the device

from rltrain.models.attention import packed as attention
from rltrain.models.attention.packing import pack
from rltrain.models.forward import PolicyModel
from rltrain.models.load import empty_model
from tests.distance import distance
from tests.models.kinds import plain_model
from tests.models.test_forward import make_groups


def _policy(name: str, device: str) -> PolicyModel:
    plain = plain_model(name)
    attention.register()
    model = empty_model(plain.config.__class__(**plain.config.to_dict()), attention.NAME, torch.float32)
    model.set_experts_implementation("eager")
    model.load_state_dict(plain.state_dict(), assign=True)
    for path, buffer in plain.named_buffers():
        owner, _, leaf = path.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = buffer
    model.tie_weights()
    return PolicyModel(model.to(device))


def main(*names: str) -> None:
    """Packed log-probs and gradients on the device equal those on the CPU, with shared prompts."""
    for name in names:
        found = []
        for device in ("cpu", "npu"):
            policy = _policy(name, device)
            log_probs = policy(pack(make_groups(), torch.device(device)), 0.7)[0]
            (log_probs * torch.linspace(-1, 1, len(log_probs), device=device)).sum().backward()
            gradients = [parameter.grad.cpu() for parameter in policy.parameters() if parameter.grad is not None]
            found.append(([log_probs.cpu()], gradients))
        for one, other in zip(*found, strict=True):
            assert distance(one, other) < 1e-5, name
