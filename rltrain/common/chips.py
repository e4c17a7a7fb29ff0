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

# Parts of the names of variants without a row.
_OTHERS = {"MIG", "D", "TI", "LAPTOP"}
# All words of a row's name must be in the device's name. The row with the most words is used.
_TABLE = """
name                 TFLOP/s   TB/s    GB
H100                   989.4   3.35    80
H100 PCIe              756     2.0     80
H100 NVL               835     3.9     94
H200                   989.4   4.8    141
H200 NVL               835     4.8    141
GH200 480GB            989.4   4.0     96
H800                   989.4   3.35    80
H800 PCIe              756     2.0     80
H20                    148     4.0     96
H20 3e                 148     4.8    141
B200                   2250    8.0    180
GB200                  2500    8.0    186
A100 40GB              312     1.555   40
A100 SXM4 80GB         312     2.039   80
A100 PCIe 80GB         312     1.935   80
A800 40GB              312     1.555   40
A800 SXM4 80GB         312     2.039   80
A800 PCIe 80GB         312     1.935   80
A10                    125     0.6     24
A40                    149.7   0.696   48
L4                     121     0.3     24
L20                    119.5   0.864   48
L40                    181     0.864   48
L40S                   362     0.864   48
RTX A6000              154.8   0.768   48
RTX 6000 Ada           364.2   0.96    48
RTX 3090               71      0.936   24
RTX 4090               165.2   1.008   24
Ascend910B1            363.7   1.6     64
Ascend910B2            353.9   1.6     64
Ascend910B2C           353.9   1.6     64
Ascend910B3            294.9   1.6     64
Ascend910B4            245.8   0.8     32
Ascend910B4 1          245.8   1.6     64
Ascend910_9391         363.7   1.6     64
Ascend910_9392         363.7   1.6     64
Ascend910_9381         353.9   1.6     64
Ascend910_9382         353.9   1.6     64
Ascend910_9372         294.9   1.6     64
Ascend910_9362         245.8   1.6     64
"""


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
    lines = (line.rsplit(maxsplit=3) for line in _TABLE.strip().splitlines()[1:])
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
