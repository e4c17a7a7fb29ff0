"""A double of torch_npu: importing it makes the stand-in device torch's ``npu`` with the backend ``hccl``."""

import os

import torch

if "RLTRAIN_STANDIN_NPUS" not in os.environ:
    raise ImportError("torch_npu is the double of the tests, and RLTRAIN_STANDIN_NPUS is not set")

from torch_npu import npu
from torch_npu.kernels import npu_fusion_attention, npu_rms_norm, npu_rotary_mul, npu_swiglu

__all__ = ["npu", "npu_fusion_attention", "npu_rms_norm", "npu_rotary_mul", "npu_swiglu"]
__version__ = torch.__version__.split("+")[0]
