"""Flipped bits in the checkpoints of a run, which then resumes from an older one."""

import json

import pytest
import xxhash

from tests.faults.plug import gone
from tests.tiny import small_run
from tests.trainer.test_checkpoint import flip


def weights_of(folder) -> str:
    return xxhash.xxh3_128((folder / "huggingface" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.long
@pytest.mark.fault("A flipped bit in a shard is found before models load; the run goes on from the older checkpoint")
@pytest.mark.usefixtures("joined")
def test_after_a_flipped_bit_the_older_checkpoint_is_taken(start, tiny_model, arithmetic_files, tmp_path):
    run = tmp_path / "run"
    args = small_run(tiny_model, arithmetic_files, run, trainer__total_training_steps=3, trainer__save_freq=1)
    process = start(args)
    assert (process.communicate(timeout=300), process.returncode)[1] == 0
    expected = {step: weights_of(run / f"global_step_{step}") for step in (1, 2, 3)}
    assert len(set(expected.values())) == 3
    # The driver reads the small files of step 3, and workers the large one of step 2.
    (shard,) = (run / "global_step_3" / "actor").glob("*.distcp")
    flip(shard, 8 * shard.stat().st_size // 2)
    large, manifest = run / "global_step_2" / "large.bin", run / "global_step_2" / "manifest.json"
    large.write_bytes(bytes(5 * 2**20))
    listed = json.loads(manifest.read_text())
    listed["files"]["large.bin"] = {
        "bytes": large.stat().st_size, "xxh3_128": xxhash.xxh3_128(large.read_bytes()).hexdigest()
    }  # fmt: skip
    manifest.write_text(json.dumps(listed))
    flip(large, 12345)
    process = start(args)
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    for words in (
        f"passing over {run}/global_step_3: the contents of actor/{shard.name} have changed since it was saved",
        f"passing over {run}/global_step_2: the contents of global_step_2/large.bin have changed since it was saved",
        f"resuming from {run}/global_step_1: 1 steps are done",
    ):
        assert words in said
    assert said.index("global_step_2/large.bin have changed") < said.index(f"loading {tiny_model} on")
    assert {step: weights_of(run / f"global_step_{step}") for step in (1, 2, 3)} == expected
    assert len(list(run.glob("damaged_global_step_*"))) == 2
    gone(tmp_path)
