"""A double of CANN's Python interface: the functions that Ray calls to find the devices of a node."""

import os
from types import SimpleNamespace

_COUNT = int(os.environ["RLTRAIN_STANDIN_NPUS"])
rt = SimpleNamespace(get_device_count=lambda: (_COUNT, 0))


def get_soc_name() -> str:
    return "Ascend910B3"
