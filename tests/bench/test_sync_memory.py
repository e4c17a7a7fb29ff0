"""What a weight sync takes beside shards and engine."""

from pathlib import Path
from statistics import median

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.weight_sync import measure, model_config

BUCKET_MIB = 4


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of resident memory are read from /proc")
def test_a_sync_takes_no_more_than_a_bucket_however_often(tmp_path):
    """The engine's weights are more than four buckets."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(model_config(hidden=256, layers=4, vocabulary=24_000)).save_pretrained(tmp_path)
    found, size = measure(tmp_path, "in buckets", ranks=2, bucket_mib=BUCKET_MIB, syncs=10, dtype=torch.bfloat16)
    beyond = [peak - size for _, peak in found[2:]]
    assert size > 4 * BUCKET_MIB
    assert max(beyond) < BUCKET_MIB
    assert median(beyond[4:]) < median(beyond[:4]) + 0.5, "it does not grow"
