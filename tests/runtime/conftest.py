"""A Ray with forked workers, because their imports take most of the time of a test with two workers."""

import pytest

from tests.faults import nursery


@pytest.fixture(scope="module")
def forked_workers():
    """Workers of a Ray started inside this context are forked (`tests.faults.nursery`)."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in nursery.variables().items():
            patch.setenv(name, value)
        yield
