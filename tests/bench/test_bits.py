"""The guard of refactorings notices a single changed weight."""

import pytest
import torch
from torch.distributed import checkpoint

from bench.bits import weights_digest


def save(folder, weight):
    for role in ("actor", "critic"):
        checkpoint.save({"model": {"a": weight, "b": torch.ones(2)}}, checkpoint_id=folder / role, no_dist=True)
    return folder


@pytest.mark.filterwarnings("ignore")
def test_the_digest_depends_on_every_bit_of_the_weights(tmp_path):
    weight = torch.linspace(0, 1, 7)
    digests = [weights_digest(save(tmp_path / name, weight.clone())) for name in ("one", "same")]
    weight[3] = torch.nextafter(weight[3], torch.tensor(1.0))
    digests.append(weights_digest(save(tmp_path / "other", weight)))
    assert digests[0] == digests[1] != digests[2]
