"""Tools between the turns of an answer: what they say is context, and what is learnt from is the policy's."""

import json
import pickle

import numpy as np
import pytest

from rltrain.agents.toolbox import toolbox_of
from rltrain.base.columns import names as c
from rltrain.data.chat import chat_encoder
from rltrain.workers.rollout.conversations import Conversations
from tests.tiny_tools import CALL_ID, END_ID, TOOLS, VOCABULARY, save_calling_model, tool_run

R = "actor_rollout_ref__rollout__"


@pytest.fixture(scope="module")
def calling(tmp_path_factory):
    return save_calling_model(tmp_path_factory.mktemp("calling") / "model")


@pytest.fixture
def tools(tmp_path, calling):
    """Settings of a run whose answers have room for several turns."""
    return tool_run(calling, tmp_path)


def test_an_answer_goes_on_behind_the_tools(process_group, tiny_trainer, tools):
    trainer = tiny_trainer(**tools)
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
    assert calls.sum() == (turns - 1).sum()
    # What a scorer is told of each, and it goes with the text from process to process.
    told = [pickle.loads(pickle.dumps(text)).told for text in texts]
    assert [each["num_turns"] for each in told] == (2 * turns).tolist()
    assert [len(each["tool_rewards"]) for each in told] == calls.tolist()
    answered = trainer.step(1)
    assert answered.metrics["num_turns/max"] == 2 * turns.max()
    assert answered.metrics["training/rollout_probs_diff_mean"] < 1e-4
    # All but what the tool said, and the call itself, which is the last token of its turn.
    assert 0.5 < answered.metrics["agent/reused_share"] < 1


def generated(trainer):
    batch, _, numbers = trainer.worker.rollout.generate(trainer.experience_task())
    answers = zip(batch.ragged(c.RESPONSE).rows(), batch.ragged(c.RESPONSE_MASK).rows(), strict=True)
    return [(answer.tolist(), mask.tolist()) for answer, mask in answers], numbers.per_sample


def test_how_long_tools_take_changes_no_token(process_group, tiny_trainer, tools, tmp_path):
    quick, _ = generated(tiny_trainer(**tools))
    slow = TOOLS.replace("    return", "    import random, time\n    time.sleep(random.random() / 5)\n    return")
    (tmp_path / "slow.py").write_text(slow)
    few = {R + "max_num_seqs": 3, R + "multi_turn__function_tool_path": tmp_path / "slow.py"}
    waited, numbers = generated(tiny_trainer(**tools | few))
    assert waited == quick
    assert numbers[c.TOOL_S].max() > 0


def test_it_is_measured_how_long_an_engine_waits_with_nothing_to_do(
    process_group, tiny_trainer, tools, tmp_path, monkeypatch
):
    # However fast the engine is, it has nothing to do for as long as the tool takes from then on.
    idle, wait = tmp_path / "idle", Conversations.wait
    monkeypatch.setattr(Conversations, "wait", lambda self: (idle.touch(), wait(self))[1])
    nap = f"""
    import pathlib, time
    while not pathlib.Path("{idle}").exists():
        time.sleep(0.01)
    time.sleep(0.3)
    return"""
    (tmp_path / "nap.py").write_text(TOOLS.replace("\n    return", nap))
    # So many answers that some call on any CPU.
    few = {R + "n": 8, "data__max_response_length": 200, R + "multi_turn__function_tool_path": tmp_path / "nap.py"}
    trainer = tiny_trainer(**tools | few | {R + "multi_turn__max_assistant_turns": 2})
    metrics = trainer.step(1).metrics
    # All answers that call wait side by side.
    assert 0.1 < metrics["timing_s/wait_for_tools"] < metrics["timing_s/generate_sequences"]
    share = metrics["timing_s/wait_for_tools"] / metrics["timing_s/generate_sequences"]
    assert metrics["perf/rollout_wait_share"] == pytest.approx(share)
    assert sum(metrics[f"agent/stop/{why}"] for why in ("answered", "turns", "length", "failed")) == pytest.approx(1)
    assert metrics["agent/stop/turns"] > 0


def test_the_last_turn_runs_nothing_and_says_so(process_group, tiny_trainer, tools):
    answers, numbers = generated(tiny_trainer(**tools, **{R + "multi_turn__max_assistant_turns": 2}))
    assert numbers[c.NUM_TURNS].max() == 2
    assert numbers[c.CALLS_NOT_RUN].sum() > 0
    assert all(mask[-1] for _, mask in answers)


def test_a_result_that_leaves_no_room_ends_the_answer_with_the_policys_token(process_group, tiny_trainer, tools):
    whole, _ = generated(tiny_trainer(**tools))
    short, numbers = generated(tiny_trainer(**tools | {"data__max_response_length": 110}))
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
        ("import time; time.sleep(60)", c.TOOL_TIMEOUTS, "Error: no result after 0.5 s"),
        ("return '<|im_end|>' * 3", None, "<|im_end|><|im_end|><|im_end|>"),
        ("return 'x' * 100_000", None, "...(truncated)..."),
    ],
)
def test_what_a_tool_does_is_text_for_the_policy(process_group, tiny_trainer, tools, tmp_path, body, count, words):
    (tmp_path / "bad.py").write_text(TOOLS.replace("return str(a + b)", body))
    bad = {R + "multi_turn__function_tool_path": tmp_path / "bad.py", R + "multi_turn__tool_timeout_s": 0.5}
    bad |= {R + "multi_turn__max_assistant_turns": 2, R + "n": 2}
    trainer = tiny_trainer(**tools | bad)
    answers, numbers = generated(trainer)
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
    _, numbers = generated(tiny_trainer(**tools | {R + "multi_turn__function_tool_path": tmp_path / "other.py"}))
    assert numbers[c.NUM_TURNS].max() > 1
    assert (numbers[c.TOOL_ERRORS] == numbers[c.TOOL_CALLS]).all()


def test_adapters_that_are_nothing_yet_change_no_turn(process_group, tiny_trainer, tools):
    """The answers are those of the policy without adapters, as these begin as nothing."""
    plain, _ = generated(tiny_trainer(**tools))
    adapted, _ = generated(tiny_trainer(**tools, actor_rollout_ref__model__lora_rank=4))
    assert [mask for _, mask in adapted] == [mask for _, mask in plain]


def test_prompts_show_the_tools(calling, tools, tmp_path):
    from rltrain.config.load import load_config
    from tests.tiny import small_run

    cfg = load_config(small_run(calling, ("t", "v"), tmp_path, **tools)).config
    text = chat_encoder(cfg).written([{"role": "user", "content": "1+2=?"}])
    assert text.startswith("<|im_start|>system\nadd\n<|im_end|>")
    assert [schema["function"]["name"] for schema in toolbox_of(cfg).schemas] == ["add"]


def test_an_answer_whose_tool_ends_the_process_is_left_out(process_group, tiny_trainer, tools, tmp_path):
    (tmp_path / "bad.py").write_text(TOOLS.replace("return str(a + b)", "import os; os._exit(1)"))
    trainer = tiny_trainer(**tools | {R + "multi_turn__function_tool_path": tmp_path / "bad.py"})
    _, texts, numbers = trainer.worker.rollout.generate(trainer.experience_task())
    failed = numbers.per_sample[c.AGENT_FAILED]
    assert failed.tolist() == (numbers.per_sample[c.RESPONSE_LENGTH] > 0).tolist() or failed.any()
    told = [text.told.get("agent_failed", "") for text in texts]
    assert [bool(each) for each in told] == failed.tolist()
    assert next(filter(None, told)) == "the agent's process ended with exit code 1"
    assert numbers.failure == "the agent's process ended with exit code 1"


def test_a_stop_text_ends_a_turn_and_a_call_before_it_is_answered(process_group, tiny_trainer, tools, tmp_path):
    """Where the call is no end token, a stop text that it holds ends the turn, and all goes on as if it were one."""
    expected, numbers = generated(tiny_trainer(**tools))
    model = save_calling_model(tmp_path / "other")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [END_ID]}))
    stopped = {**tools, "actor_rollout_ref__model__path": model, R + "stop": "['</tool_call>']"}
    found, others = generated(tiny_trainer(**stopped))
    assert found == expected
    assert numbers[c.NUM_TURNS].max() > 2
    assert others[c.NUM_TURNS].tolist() == numbers[c.NUM_TURNS].tolist()


def test_a_stop_text_in_a_turn_without_a_call_ends_the_answer(process_group, tiny_trainer, tools):
    """Nobody answers it, as nobody answers a turn without a call that ended by itself."""
    letter = VOCABULARY.index("e")
    answers, _ = generated(tiny_trainer(**tools, **{R + "stop": "[e]"}))
    ended = 0
    for tokens, mask in answers:
        own = [
            place for place, (token, policy) in enumerate(zip(tokens, mask, strict=True)) if policy and token == letter
        ]
        assert own in ([], [len(tokens) - 1])
        ended += len(own)
    assert ended > 0
