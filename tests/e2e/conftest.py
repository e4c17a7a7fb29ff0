"""One Ray for whole runs that need none of their own: starting one takes seconds, and there are dozens of runs."""

import os

import pytest
from ray.cluster_utils import Cluster


@pytest.fixture(scope="package")
def cluster():
    """Address of a Ray head that lives as long as these tests."""
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    yield found.address
    found.shutdown()


@pytest.fixture(scope="module")
def joined(cluster):
    """Runs of this module join that Ray, as they would on a cluster."""
    os.environ["RAY_ADDRESS"] = cluster
    # It was started without a token, and a run takes one that lies in the home of whoever runs the tests.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    yield
    del os.environ["RAY_ADDRESS"], os.environ["RAY_AUTH_MODE"]
