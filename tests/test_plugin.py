import sys

import pytest

from rltrain.plugin import load_plugin


@pytest.fixture(autouse=True)
def clean_path():
    before = list(sys.path)
    yield
    sys.path[:] = before
    load_plugin.cache_clear()


def test_files_of_one_name_in_two_folders_do_not_collide(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        code = f"import dataclasses\n@dataclasses.dataclass\nclass Own: pass\ndef f(): return {name!r}"
        (tmp_path / name / "mine.py").write_text(code)
    one, two = (load_plugin("key", f"{tmp_path}/{name}/mine.py:f") for name in ("one", "two"))
    assert (one(), two()) == ("one", "two")
    assert sys.modules[one.__module__].f is one


def test_a_plugin_imports_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_a_plugin.py").write_text("x = 7")
    (tmp_path / "mine.py").write_text("from neighbour_of_a_plugin import x\ndef f():\n    return x")
    assert load_plugin("key", f"{tmp_path}/mine.py:f")() == 7
    assert sys.path[-1] == str(tmp_path)
