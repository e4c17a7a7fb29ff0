"""A shared Ray for runs that do not need their own, because starting one takes seconds and there are dozens of runs.
For the same reason its workers are forked (`tests.faults.nursery`)."""

import os

import pytest
from ray.cluster_utils import Cluster

from tests.faults import nursery


@pytest.fixture(scope="package")
def cluster():
    """Address of a Ray head that runs during these tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in nursery.variables().items():
            patch.setenv(name, value)
        found = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    yield found.address
    found.shutdown()


@pytest.fixture(scope="module")
def joined(cluster):
    """Runs of this module join that Ray, as on a cluster."""
    os.environ["RAY_ADDRESS"] = cluster
    yield
    del os.environ["RAY_ADDRESS"]
