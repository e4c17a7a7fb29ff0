from functools import cache

import pytest

from tests.data.turns.families import save_family


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    """The encoder of a family, by name."""
    return cache(lambda name: save_family(tmp_path_factory.mktemp(name), name))
