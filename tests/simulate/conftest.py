import pytest

from tests.tiny import save_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("simulate"))
