"""Replacement for the package sglang if this folder is on PYTHONPATH."""

import sys

from tests.workers.sglang_double import MODULES

sys.modules.update(MODULES)
