"""Entry point of ``python -m rltrain.runtime.launch``: see `rltrain.runtime.launch.rendezvous`."""

from __future__ import annotations

import sys

from rltrain.runtime.launch.rendezvous import main

if __name__ == "__main__":
    sys.exit(main())
