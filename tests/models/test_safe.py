"""Files with a payload are refused, and the payload never runs."""

import json
import os
import pickle
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from rltrain.common.device import get_device
from rltrain.common.errors import CheckpointError, ConfigError
from rltrain.config.load import load_config
from rltrain.models.forward import PolicyModel
from rltrain.models.load import load_config as model_config
from rltrain.models.load import read_weights
from rltrain.models.weights.lora import Lora
from rltrain.models.weights.shard import sharded_model
from rltrain.models.weights.spec import ModelSpec
from rltrain.models.weights.state import load_training_state, save_training_state
from rltrain.run.checkpoints.folder import RunFolder
from rltrain.run.checkpoints.manifest import find_damage
from rltrain.run.checkpoints.resume import files_of, find_resume_point
from rltrain.trainer.progress import Progress
from tests.test_house_rules import PACKAGE
from tests.tiny import save_tiny_adapter

pytestmark = pytest.mark.usefixtures("process_group")


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, trace) -> None:
        self.trace = str(trace)

    def __reduce__(self):
        return os.mkdir, (self.trace,)


@pytest.fixture
def payload(tmp_path):
    """A working payload; after the test it must not have run."""
    trace = tmp_path / "it_ran"
    pickle.loads(pickle.dumps(Payload(trace)))
    trace.rmdir()
    yield Payload(trace)
    assert not trace.exists()


@pytest.fixture(scope="module")
def policy(tiny_model, process_group):
    spec = ModelSpec(str(tiny_model), master_dtype=torch.float32, compute_dtype=torch.float32)
    return sharded_model(PolicyModel, spec, get_device("cpu"))


@pytest.fixture
def saved(policy, tmp_path):
    """A folder with the shards of a model and a description of the saved tensors."""
    folder = tmp_path / "actor"
    save_training_state(policy, torch.optim.AdamW(policy.parameters(), fused=False), str(folder))
    return folder


def described(folder) -> Metadata:
    return dcp.FileSystemReader(folder).read_metadata()


def as_bytes(folder, payload):
    """A weight that is not a tensor: torch would unpickle it."""
    found = described(folder)
    name = next(iter(found.state_dict_metadata))
    found.state_dict_metadata[name] = BytesStorageMetadata()
    for index, place in found.storage_data.items():
        if index.fqn == name:
            torch.save(payload, folder / "extra.distcp")
            found.storage_data[index] = replace(place, relative_path="extra.distcp", offset=0, length=10**4)
    return found


def elsewhere(folder, payload):
    found = described(folder)
    index, place = next(iter(found.storage_data.items()))
    return replace(found, storage_data={index: replace(place, relative_path="../../secret")})


METADATA = {
    "itself": lambda folder, payload: payload,
    "inside": lambda folder, payload: replace(described(folder), planner_data=payload),
    "a weight that is no tensor": as_bytes,
    "a file elsewhere": elsewhere,
    "something else": lambda folder, payload: {"state_dict_metadata": {}},
    "globals": b"\x80\x04\x8c\x28torch.distributed.checkpoint.metadata\x8c\x1dMetadata.__init__.__globals__\x93.",
    "a call": b"cos\nsystem\n(S'true'\ntR.",
    "nothing": b"",
    "too deep": b"\x80\x04" + b"(" * 100_000,
}


@pytest.mark.fault("A crafted .metadata is refused, and nothing of it is run")
@pytest.mark.parametrize("kind", METADATA)
def test_a_crafted_metadata_is_refused_and_not_run(policy, saved, payload, kind):
    crafted = METADATA[kind]
    (saved / ".metadata").write_bytes(pickle.dumps(crafted(saved, payload)) if callable(crafted) else crafted)
    # A run looks before anything is started.
    (saved.parent / "progress.json").write_text('{"global_step": 1}')
    (saved.parent / "manifest.json").write_text('{"files": {"progress.json": {"bytes": 18}}}')
    assert f"{saved}/.metadata cannot be read" in find_damage(saved.parent)
    with pytest.raises(CheckpointError, match=r"actor/\.metadata cannot be read"):
        load_training_state(policy, None, str(saved))


@pytest.mark.fault("Crafted shards of weights are refused, and nothing of them is run")
def test_a_crafted_shard_is_refused_and_not_run(policy, saved, payload):
    (shard,) = saved.glob("*.distcp")
    for crafted in (pickle.dumps(payload, protocol=2), b""):
        shard.write_bytes(crafted)
        with pytest.raises(CheckpointError, match=f"{saved} cannot be loaded into this model: rank 0") as caught:
            load_training_state(policy, None, str(saved))
        assert "FrameSummary" not in str(caught.value)
    found = described(saved)
    torch.save(payload, shard)  # a whole file of torch's, with a payload in the place of a tensor
    size = shard.stat().st_size
    places = {index: replace(place, offset=0, length=size) for index, place in found.storage_data.items()}
    (saved / ".metadata").write_bytes(pickle.dumps(replace(found, storage_data=places)))
    with pytest.raises(CheckpointError, match="cannot be loaded into this model"):
        load_training_state(policy, None, str(saved))


@pytest.mark.fault("A crafted state of the sampler is refused, and nothing of it is run")
def test_a_crafted_sampler_state_is_refused_and_not_run(tmp_path, payload):
    folder = RunFolder(str(tmp_path / "run"))
    cfg = load_config([f"trainer.default_local_dir={folder.path}", "algorithm.adv_estimator=grpo"]).config
    temporary = folder.begin_save(1, files_of(Progress(), 1, cfg, "rows:1 5 rows"))
    np.savez(temporary / "sampler.npz", seen=np.array([payload], dtype=object))
    folder.commit(temporary, 1)
    temporary = folder.begin_save(0, files_of(Progress(), 0, cfg, "rows:1 5 rows"))
    whole = folder.commit(temporary, 0)
    assert find_resume_point(cfg, folder, None).folder == whole
    shutil.rmtree(whole)
    with pytest.raises(CheckpointError, match=r"sampler.npz cannot be read"):
        find_resume_point(cfg, folder, None)
    folder.release()


@pytest.mark.fault("Crafted weights of a model (.bin) are refused, and nothing of them is run")
@pytest.mark.parametrize("kind", ["pickle", "torch", "torch, a part"])
def test_crafted_weights_of_a_model_are_refused_and_not_run(tiny_model, tmp_path, payload, kind):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if kind == "torch, a part":
        parts = dict.fromkeys(weights, "pytorch_model-00001-of-00001.bin")
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": parts}))
        torch.save(weights | {"extra": payload}, folder / "pytorch_model-00001-of-00001.bin")
    elif kind == "torch":
        torch.save(weights | {"extra": payload}, folder / "pytorch_model.bin")
    else:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(payload, protocol=2))
    with pytest.raises(ConfigError, match=f"the weights of {folder} cannot be read as tensors"):
        read_weights(str(folder), model_config(str(folder)), torch.float32)


@pytest.mark.fault("Crafted adapters (.bin) are refused, and nothing of them is run")
@pytest.mark.parametrize("kind", ["pickle", "torch", "cut off"])
def test_crafted_adapters_are_refused_and_not_run(tiny_model, tmp_path, payload, kind):
    folder = save_tiny_adapter(tmp_path / "adapter", tiny_model)
    if kind == "cut off":
        os.truncate(folder / "adapter_model.safetensors", 100)
    else:
        (folder / "adapter_model.safetensors").unlink()
        file = folder / "adapter_model.bin"
        torch.save(payload, file) if kind == "torch" else file.write_bytes(pickle.dumps(payload, protocol=2))
    lora = Lora("actor_rollout_ref.model", 0, 1, "all-linear", None, str(folder), torch.float32, 0)
    spec = ModelSpec(str(tiny_model), master_dtype=torch.float32, compute_dtype=torch.float32, lora=lora)
    with pytest.raises(ConfigError, match=f"lora_adapter_path={folder} has no weights"):
        sharded_model(PolicyModel, spec, get_device("cpu"))


# What these unpickle this very run has pickled.
OWN_PICKLES = {"common/plugin.py", "config/reader.py", "data/tables.py", "data/stored_images.py"} | {
    "agents/executor_main.py",
    "runtime/exchange.py",  # with a signature of the run
    "runtime/slots/child.py",
}


def test_the_library_unpickles_nothing_of_others():
    unsafe = re.compile(
        r"torch\.load\((?!.*weights_only=True)|(?<!resume_)weights_only=False|allow_pickle=True|pickle\.loads?\("
    )
    found = {str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py") if unsafe.search(file.read_text())}
    assert found == OWN_PICKLES
