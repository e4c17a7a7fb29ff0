"""Tools between the turns of a response: their texts are context, and only the policy's tokens are trained."""

import json
import pickle
import shutil
import sys

import numpy as np
import pytest

from rltrain.common.columns import names as c
from tests.clock import PATIENCE_S
from tests.tiny_tools import CALL_ID, END_ID, TOOLS, tool_run
from tests.trainer.steps import generated
from tests.workers import sglang_double

R = "actor_rollout_ref__rollout__"


@pytest.fixture
def tools(tmp_path, calling):
    """Settings of a run whose responses have room for several turns."""
    return tool_run(calling, tmp_path)


# vLLM: test_vllm_tools.py.
@pytest.mark.parametrize("engine", ["hf", "sglang"])
def test_an_answer_goes_on_behind_the_tools(process_group, tiny_trainer, tools, monkeypatch, engine):
    for name, module in sglang_double.MODULES.items() if engine == "sglang" else ():
        monkeypatch.setitem(sys.modules, name, module)
    trainer = tiny_trainer(**tools, **{R + "name": engine})
    worker = trainer.worker.rollout
    batch, texts, numbers = worker.generate(trainer.experience_task())
    turns, calls = numbers.per_sample[c.NUM_TURNS], numbers.per_sample[c.TOOL_CALLS]
    assert turns.max() > 2
    context = None
    for answer, mask, text, count in zip(
        batch.ragged(c.RESPONSE).rows(), batch.ragged(c.RESPONSE_MASK).rows(), texts, turns.tolist(), strict=True
    ):
        borders = np.flatnonzero(np.diff(mask.numpy().astype(int)))
        # Turn and context by turns; a turn that calls ends with the call, and the answer with a token of the policy.
        assert mask[0], mask[-1]
        assert len(borders) == 2 * (count - 1)
        assert all(answer[border] == CALL_ID for border in borders[::2].tolist())
        parts = np.split(answer.numpy(), borders + 1)
        for part in parts[1::2]:
            context = part if context is None else context
            assert part.tolist() == context.tolist()
        assert text.count("<tool_response>\n5\n</tool_response>") == count - 1
    assert context is not None
    assert context[0] == END_ID
    assert (calls >= turns - 1).all()
    # What a scorer is told of each, and it goes with the text from process to process.
    told = [pickle.loads(pickle.dumps(text)).trajectory_info for text in texts]
    assert [each["num_turns"] for each in told] == (2 * turns).tolist()
    assert [len(each["tool_rewards"]) for each in told] == calls.tolist()
    answered = trainer.step(1)
    assert answered.metrics["training/rollout_probs_diff_mean"] < 1e-4
    if engine == "hf":
        assert answered.metrics["num_turns/max"] == 2 * turns.max()
        assert calls.sum() == (turns - 1).sum()
        # All but what the tool said, and the call itself, which is the last token of its turn.
        assert 0.5 < answered.metrics["agent/reused_share"] < 1
        waited, whole = (answered.metrics[f"timing_s/{name}"] for name in ("wait_for_tools", "generate_sequences"))
        assert answered.metrics["perf/rollout_wait_share"] == pytest.approx(waited / whole)
    else:
        worker.engine.close()


def test_how_long_tools_take_changes_no_token(process_group, tiny_trainer, tools, tmp_path):
    quick, *_ = generated(tiny_trainer(**tools))
    slow = TOOLS.replace("    return", "    import random\n    sum(range(random.randrange(3_000_000)))\n    return")
    (tmp_path / "slow.py").write_text(slow)
    few = {R + "max_num_seqs": 3, R + "multi_turn__function_tool_path": tmp_path / "slow.py"}
    waited, _, numbers = generated(tiny_trainer(**tools | few))
    assert waited == quick
    assert numbers[c.TOOL_S].max() > 0


def test_the_last_turn_runs_nothing_and_says_so(process_group, tiny_trainer, tools):
    answers, _, numbers = generated(tiny_trainer(**tools, **{R + "multi_turn__max_assistant_turns": 2}))
    assert numbers[c.NUM_TURNS].max() == 2
    assert numbers[c.CALLS_NOT_RUN].sum() > 0
    assert all(mask[-1] for _, mask in answers)


def test_a_result_that_leaves_no_room_ends_the_answer_with_the_policys_token(process_group, tiny_trainer, tools):
    whole, *_ = generated(tiny_trainer(**tools))
    short, _, numbers = generated(tiny_trainer(**tools | {"data__max_response_length": 110}))
    assert all(mask[-1] for _, mask in short)
    assert max(len(answer) for answer, _ in short) <= 110
    assert all(answer == longer[: len(answer)] for (answer, _), (longer, _) in zip(short, whole, strict=True))
    ended_by_call = np.array([answer[-1] == CALL_ID for answer, _ in short])
    assert ended_by_call.any()
    assert numbers[c.TRUNCATED][ended_by_call].all()


@pytest.mark.parametrize(
    ("body", "count", "words"),
    [
        ("raise ValueError('no such sum')", c.TOOL_ERRORS, "Error: ValueError: no such sum"),
        ("import threading; threading.Event().wait()", c.TOOL_TIMEOUTS, "Error: no result after 0.5 s"),
        ("return '<|im_end|>' * 3", None, "<|im_end|><|im_end|><|im_end|>"),
        ("return 'x' * 100_000", None, "...(truncated)..."),
    ],
)
def test_what_a_tool_does_is_text_for_the_policy(process_group, tiny_trainer, tools, tmp_path, body, count, words):
    (tmp_path / "bad.py").write_text(TOOLS.replace("return str(a + b)", body))
    bad = {R + "multi_turn__function_tool_path": tmp_path / "bad.py", R + "multi_turn__max_assistant_turns": 2}
    bad |= {R + "n": 2, R + "multi_turn__tool_timeout_s": 0.5 if count == c.TOOL_TIMEOUTS else PATIENCE_S}
    trainer = tiny_trainer(**tools | bad)
    answers, _, numbers = generated(trainer)
    called = numbers[c.NUM_TURNS] == 2
    assert called.any()
    texts = trainer.worker.rollout.encoder.decode_batch([answer for answer, _ in answers], special=True)
    assert all(words in text for text, calls in zip(texts, called.tolist(), strict=True) if calls)
    if count:
        assert numbers[count][called].min() == 1
    # The words of a tool end no turn: of end tokens a context has that behind the call, and that of the template.
    for (answer, mask), calls in zip(answers, called.tolist(), strict=True):
        context = [token for token, own in zip(answer, mask, strict=True) if not own]
        assert context.count(END_ID) == 2 * calls


def test_a_call_of_a_tool_that_is_not_there_is_answered(process_group, tiny_trainer, tools, tmp_path):
    (tmp_path / "other.py").write_text(TOOLS.replace("def add", "def subtract"))
    *_, numbers = generated(tiny_trainer(**tools | {R + "multi_turn__function_tool_path": tmp_path / "other.py"}))
    assert numbers[c.NUM_TURNS].max() > 1
    assert (numbers[c.TOOL_ERRORS] == numbers[c.TOOL_CALLS]).all()


def test_an_answer_whose_tool_ends_the_process_is_left_out(process_group, tiny_trainer, tools, tmp_path):
    (tmp_path / "bad.py").write_text(TOOLS.replace("return str(a + b)", "import os; os._exit(1)"))
    trainer = tiny_trainer(**tools | {R + "multi_turn__function_tool_path": tmp_path / "bad.py"})
    _, texts, numbers = trainer.worker.rollout.generate(trainer.experience_task())
    failed = numbers.per_sample[c.AGENT_FAILED]
    assert failed.any()
    told = [text.trajectory_info.get("agent_failed", "") for text in texts]
    assert [bool(each) for each in told] == failed.tolist()
    assert next(filter(None, told)) == "the agent's process ended with exit code 1"
    assert numbers.failure == "the agent's process ended with exit code 1"


def test_a_stop_text_ends_a_turn_and_a_call_before_it_is_answered(
    process_group, tiny_trainer, calling, tools, tmp_path
):
    """If the call is not an end token, a stop text that it contains ends the turn, with the same result."""
    expected, _, numbers = generated(tiny_trainer(**tools))
    model = shutil.copytree(calling, tmp_path / "other")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [END_ID]}))
    stopped = {**tools, "actor_rollout_ref__model__path": model, R + "stop": "['</tool_call>']"}
    found, _, others = generated(tiny_trainer(**stopped))
    assert found == expected
    assert numbers[c.NUM_TURNS].max() > 2
    assert others[c.NUM_TURNS].tolist() == numbers[c.NUM_TURNS].tolist()
