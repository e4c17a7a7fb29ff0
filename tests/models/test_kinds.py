"""Attention that is not plainly causal, trained on packed sequences, compared with plain transformers one sample at a
time."""

import pytest
import torch

from rltrain.common.device import get_device
from rltrain.models.attention.packing import pack
from rltrain.models.forward import PolicyModel
from rltrain.models.weights.shard import sharded_model
from rltrain.models.weights.spec import ModelSpec
from tests.distance import distance
from tests.models.kinds import KINDS, plain_model
from tests.models.test_forward import TEMPERATURE, by_transformers, gradients_of, make_groups

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("name", KINDS)
def test_packed_log_probs_and_gradients_are_transformers(name, tmp_path):
    plain, batch = plain_model(name), make_groups()
    plain.save_pretrained(tmp_path)
    policy = sharded_model(PolicyModel, ModelSpec(str(tmp_path), gradient_checkpointing=True), get_device("cpu"))
    expected, _ = by_transformers(plain.train(), batch)
    weights = torch.linspace(-1, 1, len(expected))
    (expected * weights).sum().backward()
    of_plain = {name: weight.grad for name, weight in plain.named_parameters() if weight.grad is not None}
    for share in (True, False):
        inputs = pack(batch, torch.device("cpu"), share=share)
        assert inputs.plan.has_prefixes == share
        with torch.no_grad():
            assert distance(policy.eval()(inputs, TEMPERATURE)[0], expected) < 1e-5
        found = policy.train()(inputs, TEMPERATURE)[0]
        assert distance(found, expected) < 1e-5
        (found * weights).sum().backward()
        gradients = gradients_of(policy)
        # Shared states of delta nets round more: 1.0e-5 was seen, where transformers itself is 4e-6 from float64.
        assert distance(gradients, of_plain) < (3e-5 if share and "delta net" in name else 1e-5)
        sinks = {path: gradient for path, gradient in of_plain.items() if path.endswith("sinks")}
        assert distance({path: gradients[path] for path in sinks}, sinks) < 1e-5 if sinks else "sinks" not in name
