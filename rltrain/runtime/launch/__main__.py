"""Entry point of ``python -m rltrain.runtime.launch``: see `rltrain.runtime.launch.gather`."""

from __future__ import annotations

import sys

from rltrain.runtime.launch.gather import main

if __name__ == "__main__":
    sys.exit(main())
