"""A Ray whose workers are forked: what they import is most of what a test with two workers takes."""

import pytest

from tests.faults import nursery


@pytest.fixture(scope="module")
def forked_workers():
    """For a Ray that starts while this lasts (`tests.faults.nursery`)."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in nursery.variables().items():
            patch.setenv(name, value)
        yield
