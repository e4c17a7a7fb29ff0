import os
import pickle
import re
import subprocess
import sys

import pytest

from rltrain.common import plugin
from rltrain.common.errors import ConfigError
from rltrain.common.plugin import load_plugin


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


def test_a_fresh_process_finds_what_was_pickled_by_name(tmp_path):
    """multiprocessing and Ray send a function or an object by the name of its module, whatever its path is."""
    folder = tmp_path / "a_2fb c.d-é"
    folder.mkdir()
    (folder / "neighbour_of_the_pickled.py").write_text("x = 7")
    (folder / "mine-1.py").write_text(
        "from neighbour_of_the_pickled import x\nclass Mine:\n    def __call__(self):\n        return x\n"
    )
    data = pickle.dumps(load_plugin("key", f"{folder}/mine-1.py:Mine")())
    script = f"import pickle, sys; print(pickle.loads({data!r})(), 'torch' in sys.modules, 'ray' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert process.stdout == "7 False False\n", process.stderr


def test_a_file_runs_once_until_it_is_changed(tmp_path):
    """Otherwise classes of one name would differ, and pickle would refuse them."""
    file = tmp_path / "mine.py"
    file.write_text("class Mine: pass\ndef f(): return Mine")
    known, f = (load_plugin("key", f"{file}:{name}") for name in ("Mine", "f"))
    assert f() is known
    file.write_text("class Mine: pass\ndef added(): return Mine")
    os.utime(file, (1, 1))
    assert load_plugin("key", f"{file}:added")() is not known


def test_a_name_leads_nowhere_else(tmp_path, monkeypatch):
    """Files of other kinds are not run, a NAME is not an expression, and a neighbouring file does not replace a
    package."""
    monkeypatch.chdir(tmp_path)
    evil = "open('trace', 'w')\ndef f(): return 7\n"
    for other in ("mine.txt", "mine.pyc", "mine.so", "colorsys.py"):
        (tmp_path / other).write_text(evil)
    (tmp_path / "mine.py").write_text("import colorsys\ndef f(): return colorsys.rgb_to_hsv(0, 0, 0)")
    for other in ("mine.txt", "mine.pyc", "mine.so", ".", "/etc/passwd"):
        with pytest.raises(ConfigError, match=r"is not a Python file|cannot be imported"):
            load_plugin("key", f"{tmp_path / other}:f")
    for name in ("__import__('os').mkdir('trace')", "f.__globals__", "f()", ""):
        with pytest.raises(ConfigError, match="the file has no function"):
            load_plugin("key", f"mine.py:{name}")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert load_plugin("key", "mine.py:f")() == (0, 0, 0)
    assert not (tmp_path / "trace").exists()


def test_a_module_is_imported_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "house").mkdir()
    (tmp_path / "house" / "losses.py").write_text("def f(): return 7")
    monkeypatch.chdir(tmp_path)
    for name in ("house.losses:f", "pkg://house.losses:f", "pkg://house/losses:f", "file://house/losses.py:f"):
        assert load_plugin("key", name)() == 7
    with pytest.raises(ConfigError, match="the module has no function 'g'; it defines f"):
        load_plugin("key", "house.losses:g")
    with pytest.raises(ConfigError, match=r"No module named 'house\.nowhere'"):
        load_plugin("key", "house.nowhere:f")


def test_code_that_needs_verl_says_what_to_do_without_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "verl", None)
    (tmp_path / "mine.py").write_text("from verl.utils.dataset.rl_dataset import RLHFDataset")
    with pytest.raises(ConfigError, match=r"It needs verl\.utils, which is not installed here: install a version of"):
        load_plugin("key", f"{tmp_path}/mine.py:Mine")


def test_a_library_is_imported_once_by_name_or_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("library_by_name", "library_by_file"):
        (tmp_path / f"{name}.py").write_text(
            f"import os\nos.environ['COUNT'] = os.environ.get('COUNT', '') + '{name[11]}'\n"
        )
    monkeypatch.setenv("COUNT", "")
    for _ in range(2):
        plugin.import_libraries("key", ["library_by_name", f"{tmp_path}/library_by_file.py"])
    assert os.environ["COUNT"] == "nf"


@pytest.mark.parametrize(("name", "said"), [("no_file.py", "not a Python file"), ("library_that_fails", "ZeroDiv")])
def test_a_library_that_cannot_be_imported_is_an_error(tmp_path, monkeypatch, name, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "library_that_fails.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=f"^key={re.escape(name)}") as caught:
        plugin.import_libraries("key", [name])
    assert said in str(caught.value)
