"""Tests. Every call of `rltrain.algorithms` in them is checked against the shapes in its annotations."""

import sys

from jaxtyping import install_import_hook

from tests import shapes  # noqa: F401 - the hook looks it up by name

if "pytest" in sys.modules:  # benchmarks also use tests.tiny, without these checks
    install_import_hook("rltrain.algorithms", "tests.shapes.check")
