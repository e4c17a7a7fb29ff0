"""Tests. Every call of `rltrain.algorithms` in them is checked against the shapes in its annotations."""

import sys

from jaxtyping import install_import_hook

from tests import shapes  # noqa: F401 - the hook looks it up by name

if "pytest" in sys.modules:  # and not in benchmarks, which use tests.tiny
    install_import_hook("rltrain.algorithms", "tests.shapes.check")
