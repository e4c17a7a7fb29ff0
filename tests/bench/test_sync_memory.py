"""The memory of a weight sync in addition to shards and engine."""

from pathlib import Path
from statistics import median

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.weight_sync import measure, model_config

BUCKET_MIB = 4


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of resident memory are read from /proc")
@pytest.mark.long
@pytest.mark.parametrize("vocabulary", [6000, 24_000])
def test_a_sync_takes_a_bucket_and_at_most_one_weight(tmp_path, vocabulary):
    """This holds for any number of syncs. The engine's weights are a few buckets; the larger embedding alone
    is three."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(model_config(256, layers=4, vocabulary=vocabulary)).save_pretrained(tmp_path)
    embedding = vocabulary * 256 * 2 / 2**20
    found, size = measure(tmp_path, "in buckets", ranks=2, bucket_mib=BUCKET_MIB, syncs=10, dtype=torch.bfloat16)
    beyond = [peak - size for _, peak in found[2:]]
    assert size > 2 * BUCKET_MIB
    assert max(beyond) < BUCKET_MIB + (embedding if embedding > BUCKET_MIB else 0)
    assert median(beyond[4:]) < median(beyond[:4]) + 0.5, "it does not grow"
