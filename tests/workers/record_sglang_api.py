"""What SGLang takes, as the installed version says: ``python -m tests.workers.record_sglang_api`` writes
sglang_api.json.
"""

import inspect
import json
from pathlib import Path

FILE = Path(__file__).with_name("sglang_api.json")
# What the adapter calls.
METHODS = (
    "async_generate", "generate", "begin_weight_update", "update_weights_from_tensor", "end_weight_update",
    "flush_cache",
    "release_memory_occupation", "resume_memory_occupation", "shutdown",
)  # fmt: skip


def record() -> dict:
    """Names of parameters and fields."""
    import sglang
    from sglang.srt import constants
    from sglang.srt.managers.io_struct import FlushCacheReqOutput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.model_executor.model_runner_components.weight_updater import LocalSerializedTensor
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    def parameters(owner: type, name: str) -> list[str]:
        return [parameter for parameter in inspect.signature(getattr(owner, name)).parameters if parameter != "self"]

    return {
        "version": sglang.__version__,
        **{f"Engine.{name}": parameters(sglang.Engine, name) for name in METHODS},
        "TokenizerManager.abort_request": parameters(TokenizerManager, "abort_request"),
        "MultiprocessingSerializer.serialize": parameters(MultiprocessingSerializer, "serialize"),
        "LocalSerializedTensor": list(inspect.signature(LocalSerializedTensor).parameters),
        "monkey_patch_torch_reductions": list(inspect.signature(monkey_patch_torch_reductions).parameters),
        "FlushCacheReqOutput": list(FlushCacheReqOutput.__struct_fields__),
        "memory tags": [constants.GPU_MEMORY_TYPE_WEIGHTS, constants.GPU_MEMORY_TYPE_KV_CACHE],
        "SamplingParams": list(SamplingParams.__struct_fields__),
        "ServerArgs": list(ServerArgs.__struct_fields__),
    }


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in record().items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
