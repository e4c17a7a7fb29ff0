"""Makes torchvision importable with PyTorch for CPU when its wheel was built for CUDA.

The operators of such a wheel cannot be loaded with PyTorch for CPU. The import of torchvision then fails at two
operators (nms, qnms), which torchvision registers without checking that they exist. If their names are defined, the
import succeeds: image transforms work, nms does not. setup_env.sh copies this file to site-packages, where a .pth file
loads it, if torchvision cannot be imported without it.
"""

import sys

_KEPT = []


class _Finder:
    """Other imports cost one string comparison; PyTorch is imported only with torchvision."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torchvision":
            return None
        from importlib.machinery import PathFinder  # here, because every interpreter pays for the imports above

        spec = PathFinder.find_spec(name, path, target)
        if spec and spec.loader:
            run = spec.loader.exec_module

            def exec_module(module):
                import torch

                if not _KEPT:  # the names last as long as the library object
                    _KEPT.append(torch.library.Library("torchvision", "DEF"))
                    for operator in ("nms", "qnms"):
                        _KEPT[0].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                run(module)

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder)
