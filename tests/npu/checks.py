"""What the tests of the stand-in run in a process that has it. Each function is one such process."""

import pytest
import torch
import torch_npu
from torch.distributed.checkpoint import load
from transformers import AutoModelForCausalLM, Qwen3Config

from rltrain.base.device import detect, get_device
from rltrain.models.files.hashed import HashingWriter, Planner

_SMALL = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True,
}  # fmt: skip


def _trained(device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**_SMALL), attn_implementation="eager").to(device)
    assert model.lm_head.weight is model.model.embed_tokens.weight, "moving keeps tied weights one"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(24).reshape(2, 12).to(device)
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach().cpu(), *(weight.detach().cpu() for weight in model.parameters())]


def trains() -> None:
    """A model trained on the device has the weights of one trained on the CPU, bit for bit."""
    assert detect() == "npu"
    assert get_device("auto").count == 2
    for own, expected in zip(_trained("npu"), _trained("cpu"), strict=True):
        assert torch.equal(own, expected)


def is_strict() -> None:
    """What is an error on hardware is one here."""
    there, here = torch.ones(3, device="npu"), torch.ones(3)
    for wrong in (
        lambda: there + here,
        lambda: here[torch.tensor([1], device="npu")],
        lambda: torch.cat([there, here]),
        lambda: torch.nn.functional.embedding(torch.tensor([1]), there[:, None]),
        lambda: torch.where(here > 0, there, there),
        lambda: there @ torch.ones(3, device="npu:1"),
    ):
        with pytest.raises((RuntimeError, IndexError), match="same device"):
            wrong()
    assert (there + torch.tensor(2.0)).device.type == "npu", "a number on the host may enter a kernel"
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(3, device="npu:2")
    assert torch.empty(1000, device="npu").isnan().all(), "memory that nobody has written is no zeros"


def counts_memory() -> None:
    """Live bytes, peak, cache and cap are counted per device and owner; 1 MiB is the cap here."""
    standin = torch_npu.npu.standin
    standin.exchange_owner(3)
    weights = torch.zeros(1 << 16, device="npu")
    standin.exchange_owner(0)
    passing = torch.zeros(1 << 17, device="npu")
    assert torch.npu.memory_allocated() == 3 << 18
    assert torch.npu.memory_allocated(1) == 0
    del passing
    assert torch.npu.memory_allocated() == standin.by_owner(0)[3] == 1 << 18
    assert standin.by_owner_at_peak(0)[:4] == [1 << 19, 0, 0, 1 << 18]
    assert torch.npu.mem_get_info() == (1 << 18, 1 << 20), "the cache still holds what was freed"
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info() == (3 << 18, 1 << 20)
    assert torch.npu.max_memory_allocated() == 3 << 18
    torch.npu.reset_peak_memory_stats()
    assert torch.npu.max_memory_allocated() == 1 << 18
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 1048576 bytes"):
        torch.zeros(1 << 18, device="npu")
    weights.resize_(0)
    weights.untyped_storage().resize_(0)
    assert torch.npu.memory_allocated() == 0


def is_written_one_tensor_at_a_time(folder: str) -> None:
    """A save for which the host has no room takes that of one tensor, not of all."""
    state = {str(each): torch.full((1 << 16,), float(each), device="npu") for each in range(8)}
    planner, writer, given = Planner(), HashingWriter(folder), []
    planner.set_up_planner(state, None, True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    (plan,) = writer.prepare_global_plan(plans)
    resolve = planner.resolve_data

    def resolve_data(item):
        given.append(resolve(item))
        assert sum(each.untyped_storage().nbytes() for each in given) == 1 << 18
        return given[-1]

    planner.resolve_data = resolve_data
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    planner.drop()
    assert [each.untyped_storage().nbytes() for each in given] == [0] * len(state)
    writer.finish(metadata, [results])
    found = {name: torch.zeros(1 << 16) for name in state}
    with pytest.warns(UserWarning, match="single process"):
        load(found, checkpoint_id=folder, no_dist=True)
    for name, each in found.items():
        assert torch.equal(each, state[name].cpu()), name
