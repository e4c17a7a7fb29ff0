"""Makes torchvision importable with PyTorch for CPU when its wheel was built for CUDA.

The operators of such a wheel cannot be loaded with PyTorch for CPU. The import of torchvision then fails at two
operators (nms, qnms), which torchvision registers without checking that they exist. If their names are defined, the
import succeeds: image transforms work, nms does not. setup_env.sh copies this file to site-packages, where a .pth file
loads it, if torchvision cannot be imported without it.
"""

import sys

_KEPT = []


class _Finder:
    """Finder that defines the missing operators when torchvision is imported. For other imports it only compares a
    string."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torchvision":
            return None
        # imported here, because every interpreter executes the imports at the top
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec and spec.loader:
            run = spec.loader.exec_module

            def exec_module(module):
                import torch

                if not _KEPT:  # create the library object once; the names exist as long as it does
                    _KEPT.append(torch.library.Library("torchvision", "DEF"))
                    for operator in ("nms", "qnms"):
                        _KEPT[0].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                run(module)

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder)
