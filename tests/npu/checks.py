"""Checks of the stand-in, run in a process that has it. Each function is one such process."""

import pytest
import torch
from torch.distributed.checkpoint import load

from rltrain.models.files.hashed import HashingWriter, Planner


def is_strict() -> None:
    """Errors on hardware are errors here too."""
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


def is_written_one_tensor_at_a_time(folder: str) -> None:
    """A save without host memory for a full copy needs the memory of one tensor only."""
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
