"""A non-finite mini-batch is saved, and the code of docs/recovery.md loads it and computes it again."""

import os
import pickle
import re
from pathlib import Path

import pytest
import torch

from rltrain.common.errors import NonFiniteError
from rltrain.config.load import load_config, to_yaml
from tests.trainer.steps import GAE

pytestmark = pytest.mark.usefixtures("process_group")


def stop(trainer, match, spoiled_weight=None):
    """In a step, make one advantage (or, with a critic, return) of every micro-batch NaN, and a weight infinite."""
    role = trainer.worker.critic if trainer.critic else trainer.worker.actor
    loss, column = role._loss, "returns" if trainer.critic else "advantage"

    def spoiled(micro, **rest):
        values = micro[column] if column == "advantage" else micro.ragged(column).values
        values[0] = torch.nan
        share = loss(micro, **rest)
        if spoiled_weight is not None:
            spoiled_weight.data.fill_(torch.inf)
        return share

    role._loss = spoiled
    with pytest.raises(NonFiniteError, match=match):
        trainer.step(1)


def snippet(folder: Path) -> str:
    """Return the code of docs/recovery.md that loads an incident, for ``folder``."""
    page = (Path(__file__).parents[2] / "docs" / "recovery.md").read_text()
    (lines,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "incidents/" in block)
    return re.sub(r'Path\(".*?"\)', f"Path({str(folder)!r})", lines)


def configured(folder: Path, model: Path) -> Path:
    """Write the part of config.yaml that the code reads."""
    (folder / "config.yaml").write_text(to_yaml(load_config([f"actor_rollout_ref.model.path={model}"]).config))
    return folder


@pytest.mark.parametrize("weights", ["sound", "spoiled"])
def test_the_lines_in_the_docs_find_what_is_not_finite(tiny_trainer, tiny_model, tmp_path, weights, capsys):
    trainer = tiny_trainer(actor_rollout_ref__actor__ppo_mini_batch_size=4)
    weight = list(trainer.worker.actor.policy.parameters())[-1] if weights == "spoiled" else None
    stop(trainer, r"It is kept in .*incidents.nonfinite_actor_.*docs/recovery\.md", weight)
    (folder,) = (tmp_path / "incidents").iterdir()
    exec(snippet(configured(folder, tiny_model)), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 16
    assert all(("log-probs NOT finite" in line) == (weights == "spoiled") for line in lines)
    spoiled = [line for line in lines if "'advantage'" in line]
    assert 1 <= len(spoiled) < 16, "one sample per micro-batch"


def test_the_incident_of_a_critic_is_kept(tiny_trainer, tmp_path):
    stop(tiny_trainer(**GAE), "It is kept in .*incidents.nonfinite_critic_")
    (folder,) = (tmp_path / "incidents").iterdir()
    samples = torch.load(folder / "rank_0.pt", weights_only=True)["samples"]
    assert any(sample["returns"].isnan().any() for sample in samples)


def test_an_incident_that_cannot_be_kept_hides_no_error(tiny_trainer, tiny_model, tmp_path, caplog):
    (tmp_path / "incidents").write_text("a file in the place of the folder")
    stop(tiny_trainer(), r"no optimizer step was made\. The mini-batch could not be kept in .*incidents")
    assert "the weights of the incident could not be kept" in caplog.text


def test_a_crafted_incident_is_refused_and_not_run(tmp_path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "trace"),)

    found = {"samples": [{"prompt": Payload()}]}
    torch.save(found, tmp_path / "rank_0.pt")
    with pytest.raises(pickle.UnpicklingError):
        exec(snippet(tmp_path), {})
    (tmp_path / "rank_0.pt").write_bytes(pickle.dumps(found, protocol=2))
    with pytest.raises(pickle.UnpicklingError):
        exec(snippet(tmp_path), {})
    assert not (tmp_path / "trace").exists()
