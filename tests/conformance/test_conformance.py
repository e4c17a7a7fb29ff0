"""Everything that the adapters use exists in all supported versions of vllm, vllm-ascend, sglang and torch_npu."""

import ast
import json
import re
from pathlib import Path

import pytest

from tests.conformance import record
from tests.conformance.api import parameters, refusal
from tests.conformance.uses import PACKAGES, Package
from tests.conformance.wheels import Unreachable

API = json.loads(record.FILE.read_text())
# A missing adapter uses nothing.
each_package = pytest.mark.parametrize("name", [name for name in PACKAGES if record.scans(PACKAGES[name])])


def words(*lists: str) -> set[str]:
    return set(" ".join(lists).replace("?", "").split())


def texts(package: Package) -> set[str]:
    found = {text for scan in record.scans(package).values() for text in scan.texts()}
    return {text for text in found if re.fullmatch(package.only, text)}


def calls(package: Package) -> list[tuple[str, int, tuple[str, ...]]]:
    """Return for each call: the path of the callee, the number of positional arguments and the keywords."""
    paths = {path.replace(":", ".").split(".")[-1]: path for path in record.listed(package)}
    made = [use for scan in record.scans(package).values() for use in scan.calls()]
    return [(paths.get(use.name, use.name), *use[1:]) for use in made if ":" in use.name or use.name in paths]


@each_package
def test_every_use_of_an_adapter_is_listed(name):
    package = PACKAGES[name]
    known = words(*package.attributes.values(), *package.texts.values(), package.ours)
    assert not texts(package) - known, f"not listed in uses.py: {sorted(texts(package) - known)}"
    used = texts(package).union(*(scan.attributes() for scan in record.scans(package).values()))
    assert not known - used, f"listed in uses.py and not used: {sorted(known - used)}"


@each_package
def test_every_version_has_all_that_is_listed(name):
    package, api = PACKAGES[name], API[name]
    optional = {path for path in record.listed(package) if path.endswith("?")}
    missing = [
        f"{path} in {versions}" for path, found in api["takes"].items() for versions, takes in found.items()
        if takes is None and f"{path}?" not in optional
    ]  # fmt: skip
    for place, wanted in package.texts.items():
        must = {word for word in wanted.split() if not word.endswith("?")}
        for versions, found in api["texts"][place].items():
            missing += [f"{text} of {place} in {versions}" for text in must - set(found.split())]
    assert not missing


@each_package
def test_every_version_takes_the_arguments(name):
    package, refused = PACKAGES[name], []
    for path, num_positional, keywords in calls(package):
        sure = set(keywords) - words(package.optional)
        for versions, takes in API[name]["takes"][path].items():
            if takes is not None and (why := refusal(takes.split(), num_positional, sorted(sure))):
                refused.append(f"{path} in {versions} {why}")
    assert not refused


@pytest.mark.parametrize(
    ("name", "ours"),
    [(name, ours) for name, package in PACKAGES.items() for ours in package.called],
)
def test_our_methods_stand_in_for_theirs(name, ours):
    theirs = PACKAGES[name].called[ours]
    file, _, path = ours.partition(":")
    own = record.own_parameters(file, path)
    assert all(own == takes.split() for takes in API[name]["takes"][theirs].values())


# It downloads a wheel of each and reads them; what the adapters use is compared with the record in every run.
@pytest.mark.long
@each_package
def test_the_record_is_what_the_wheels_say(name):
    try:
        assert record.record(PACKAGES[name]) == API[name], "make conformance records what the wheels say now"
    except Unreachable as error:
        pytest.skip(f"no package index: the recorded file is checked, not the wheels ({error})")


@pytest.mark.parametrize("name", ["npu_fusion_attention", "npu_rms_norm", "npu_rotary_mul", "npu_swiglu"])
def test_doubles_of_kernels_take_what_the_real_ones_take(name):
    file = Path(__file__).parents[1] / "npu/doubles/torch_npu/kernels.py"
    double = next(node for node in ast.parse(file.read_text()).body if getattr(node, "name", "") == name)
    for takes in API["torch-npu" if name == "npu_fusion_attention" else "kernels"]["takes"][
        f"torch_npu:{name}"
    ].values():
        # Its last arguments may be left out, since nobody could use them unnoticed.
        assert takes.split()[: len(parameters(double))] == parameters(double)
