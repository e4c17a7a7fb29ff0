"""Entry point of ``python -m rltrain.controller.launch``: see `rltrain.controller.launch.gather`."""

from __future__ import annotations

import sys

from rltrain.controller.launch.gather import main

if __name__ == "__main__":
    sys.exit(main())
