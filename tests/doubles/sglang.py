"""What ``import sglang`` finds where this folder stands on PYTHONPATH: the double."""

import sys

from tests.workers.sglang_double import MODULES

sys.modules.update(MODULES)
