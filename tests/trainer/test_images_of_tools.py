"""Images of tools and environments between turns: the recorded and trained numbers equal transformers'."""

import importlib.util
import json

import numpy as np
import pytest
import torch

if not importlib.util.find_spec("torchvision"):
    pytest.skip("torchvision is not installed (scripts/test.sh installs it)", allow_module_level=True)
from transformers import AutoModelForImageTextToText

from rltrain.common.columns import names as c
from rltrain.config.load import load_config
from rltrain.models.vision import tower
from rltrain.run.preflight.models import PreflightResult, check_images
from rltrain.run.report.sample_writer import _bounded
from rltrain.run.report.samples import one_line
from rltrain.trainer.plan import ImageSizes
from tests.distance import distance
from tests.local import local_trainer
from tests.seeing_tools import CHAT, OWN, TURNS, seeing_run
from tests.tiny import small_run, write_arithmetic
from tests.tiny_vision import FAMILIES, IMAGE
from tests.trainer.steps import ACTOR, Moved, numbers_of, weights

pytestmark = pytest.mark.usefixtures("process_group")
R = "actor_rollout_ref__rollout__"
# Answers of two turns, with room for words.
FEW = {TURNS + "max_assistant_turns": 2, R + "n": 2, "data__max_response_length": 250}


@pytest.fixture
def make(vision_models, picture_files, tmp_path):
    """make(family, who, **changes): return a trainer whose turns get replies from a tool or an environment of
    ``OWN``."""

    def trainer(family, who, code=OWN, **changes):
        run = seeing_run(tmp_path, family, who, code)
        return local_trainer(small_run(vision_models[family], picture_files, tmp_path, **run | changes))

    return trainer


def expected_log_probs(model, batch):
    """Return the log-probs of the policy's tokens of each response, by transformers' own forward over ids and pixels of
    the whole sample."""
    prompts, images, own_images = batch.dictionary(c.PROMPT), batch.dictionary(c.IMAGES), batch[c.RESPONSE_IMAGES]
    rows = zip(
        prompts.index.tolist(), images.index.tolist(), own_images,
        batch.ragged(c.RESPONSE).rows(), batch.ragged(c.RESPONSE_MASK).rows(), strict=True,
    )  # fmt: skip
    for prompt, place, own, answer, mask in rows:
        tokens = torch.cat([prompts.values[prompt], answer]).long()[None]
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        seen = [each for each in (images.values[place], own) if each]
        if seen:
            inputs["pixel_values"] = torch.cat([torch.tensor(each.pixel_values) for each in seen])
            if seen[0].grids is not None:
                inputs["image_grid_thw"] = torch.cat([torch.tensor(each.grids) for each in seen])
                inputs["mm_token_type_ids"] = (tokens == IMAGE).int()
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits[0, len(tokens[0]) - len(answer) - 1 : -1]
        log_probs = torch.log_softmax(logits, -1).gather(-1, answer.long()[:, None])[:, 0]
        yield log_probs[mask]


# Turns of tools, and of an environment.
PLAYED = [("qwen2_5_vl", "Room"), ("qwen3_vl", "Walk")]
SOMETIMES = [(family, who) for family in FAMILIES for who in ("Room", "Walk") if (family, who) not in PLAYED]


@pytest.mark.parametrize(
    ("family", "who"), [*PLAYED, *(pytest.param(*each, marks=pytest.mark.long) for each in SOMETIMES)]
)
def test_log_probs_of_trajectories_with_images_equal_transformers(make, vision_models, family, who):
    trainer = make(family, who)
    batch, texts, numbers = trainer.worker.rollout.generate(trainer.experience_task())
    per_sample = numbers.per_sample
    assert not per_sample[c.AGENT_FAILED].any()
    assert per_sample[c.ANSWER_IMAGES].max() >= 2
    own_images = batch[c.RESPONSE_IMAGES]
    assert [len(each) if each else 0 for each in own_images] == per_sample[c.ANSWER_IMAGES].tolist()
    for answer, mask, own in zip(
        batch.ragged(c.RESPONSE).rows(), batch.ragged(c.RESPONSE_MASK).rows(), own_images, strict=True
    ):
        places = np.flatnonzero(answer.numpy() == IMAGE).tolist()
        assert places == (own.places.tolist() if own else [])
        assert not mask[places].any()
    model = AutoModelForImageTextToText.from_pretrained(vision_models[family], attn_implementation="eager").eval()
    expected = torch.cat(list(expected_log_probs(model, batch)))
    recorded = batch.ragged(c.ROLLOUT_LOG_PROBS).values
    assert distance(recorded, expected) < 1e-5
    for sizes in ([len(batch)], [1] * len(batch)):
        learnt, _ = trainer.worker.actor.log_probs(batch, sizes)
        assert distance(learnt.ragged(c.OLD_LOG_PROBS).values, expected) < 1e-5
    # What a scorer is told, and what is kept, has no file in it.
    told = next(text.trajectory_info["messages"] for text in texts if len(text.trajectory_info["messages"]) > 1)
    assert {"type": "image"} in told[1]["content"]
    assert len(json.dumps(told[1])) < 200
    (kept,) = _bounded(told[1:2])
    sample = {"question": "2+2=?", "answer": "", "messages": json.dumps([told[0], kept]), "ground_truth": "4"}
    assert "<image>" in one_line(sample | {"score": 0.0})


def test_a_step_learns_behind_images_of_tools_however_it_is_cut(make):
    found = []
    for cut in ({}, {ACTOR + "use_dynamic_bsz": False, ACTOR + "ppo_micro_batch_size_per_gpu": 3}):
        trainer = make("qwen2_5_vl", "Room", **cut)
        moved = Moved(trainer)
        metrics = trainer.step(1).metrics
        found.append((moved.by_role(), metrics))
        assert metrics["agent/images"] > 16
        assert metrics["rollout/log_prob_gap/mean"] < 1e-5
        assert metrics["perf/balance/images_share"] <= 1
    (one, of_one), (other, of_other) = found
    assert one[0].norm() > 0.02
    assert distance(one, other) < 1e-4
    one, other = ({name: of[name] for name in of if "tool_s" not in name} for of in map(numbers_of, (of_one, of_other)))
    assert one == pytest.approx(other, abs=2e-4, rel=2e-4)


def test_tools_may_show_what_no_prompt_does(make, tmp_path):
    texts = write_arithmetic(tmp_path / "texts.parquet", range(24))
    on = {"data__train_files": texts, "data__val_files": texts}
    trainer = make("qwen3_vl", "Room", **FEW, **on, **{TURNS + "images": True})
    parts = tower(trainer.worker.actor.policy.model)
    before = [weights(part) for part in parts]
    metrics = trainer.step(1).metrics
    assert metrics["agent/images"] > 0
    assert metrics["agent/tool_errors"] == 0
    assert metrics["training/rollout_probs_diff_mean"] < 1e-4
    assert not all(torch.equal(weights(part), then) for part, then in zip(parts, before, strict=True))


@pytest.mark.parametrize(
    ("images", "shown", "words"),
    [
        (False, "image", "Error: the tool returned an image that cannot be shown"),
        (True, "{'type': 'image', 'bytes': b'\\x89PNG\\r\\n\\x1a\\n' + 40 * b'x'}", "Error: image 1 of "),
        (True, "{'type': 'image', 'path': 'no/such.png'}", "Error: ValueError: image 1 of "),
    ],
)
def test_an_image_that_cannot_be_shown_is_text_for_the_policy(make, images, shown, words):
    code = OWN.replace("return [image, ", f"return [{shown}, ")
    trainer = make("qwen3_vl", "Room", code, **FEW, **{TURNS + "images": images})
    batch, texts, numbers = trainer.worker.rollout.generate(trainer.experience_task())
    results = [
        message["content"]
        for text in texts
        for message in text.trajectory_info["messages"]
        if message["role"] == "tool"
    ]
    assert results
    assert all(result.startswith(words) for result in results)
    assert numbers.per_sample[c.TOOL_ERRORS].sum() == len(results)
    assert not any(batch[c.RESPONSE_IMAGES])


def test_what_takes_no_image_is_told_before_the_run(vision_models, tiny_model, picture_files, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "blind.jinja").write_text(CHAT.replace("PLACEHOLDER", ""))
    run = {TURNS + "environment": f"{tmp_path}/own.py:Walk"}
    cfg = load_config(small_run(tiny_model, picture_files, tmp_path, **run, **{TURNS + "images": True})).config
    check_images(cfg, found := PreflightResult())
    assert ["it is a text-only model" in problem for problem in found.problems] == [True]
    run |= {"actor_rollout_ref__model__custom_chat_template": tmp_path / "blind.jinja"}
    for shown, told in ((True, "problems"), ("null", "notes")):
        run |= {TURNS + "images": shown}
        cfg = load_config(small_run(vision_models["qwen3_vl"], picture_files, tmp_path, **run)).config
        check_images(cfg, found := PreflightResult(images=ImageSizes(most_images=1)))
        assert ["it writes 0 placeholders" in words for words in getattr(found, told)] == [True]
