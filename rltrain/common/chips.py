"""Peak numbers of accelerators: dense bf16 FLOP/s, memory bandwidth, and memory size.

Utilisation is only as accurate as the peak, and variants of a chip differ by a third. Therefore every variant has a
separate row, and an unlisted name has no peak rather than that of a similar chip.

Sources. NVIDIA: the data sheet of each card; a figure "with sparsity" is halved. H20, H20-3e, H800, A800 and L20 have
no public data sheet from NVIDIA, so server vendors' figures are used. Ascend: the files
``data/platform_config/<name>.ini`` of CANN 8.1, FLOP/s = cores x 16^3 multiply-adds x 2 x clock (910B2: 24 cores of 1.8
GHz). Product names round up: "Atlas 800T A2 376T" includes the vector cores. Bandwidth is from the Atlas A2 and A3
product pages (a 910C has two dies, each a device of 1.6 TB/s).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# Parts of the names of variants without a row.
_OTHERS = {"MIG", "D", "TI", "LAPTOP"}
# All words of a row's name must be in the device's name. The row with the most words is used.
_TABLE = Path(__file__).with_name("chips.txt")


@dataclass(frozen=True)
class Chip:
    """Variant of an accelerator."""

    name: str
    peak_flops: float
    """Dense bf16 FLOP/s."""
    peak_bandwidth: float
    """Bytes/s."""
    memory_bytes: float
    """From the data sheet; drivers show a slightly different size."""

    @property
    def kind(self) -> str:
        """Name in ``trainer.device``."""
        return "cpu" if self.name == "CPU" else "npu" if self.name.startswith("Ascend") else "cuda"


def _rows() -> dict[frozenset[str], Chip]:
    lines = (line.rsplit(maxsplit=3) for line in _TABLE.read_text(encoding="utf-8").splitlines()[1:])
    chips = (Chip(n.strip(), float(f) * 1e12, float(b) * 1e12, float(m) * 1e9) for n, f, b, m in lines)
    return {_words(chip.name): chip for chip in chips}


def _words(name: str) -> frozenset[str]:
    return frozenset(re.split(r"[\s-]+", name.upper()))


CHIPS = _rows()


def find_chip(name: str) -> Chip | None:
    """Return the chip by its name in torch or in a data sheet: "NVIDIA A100-SXM4-80GB", "Ascend910B3", "H100 PCIe".

    None for an unlisted chip or a part of one (MIG).
    """
    words = _words(name)
    fitting = [] if words & _OTHERS else [row for row in CHIPS if row <= words]
    return CHIPS[max(fitting, key=len)] if fitting else None
