"""Trajectories of random conversations: decoded, each equals what its template renders for the whole conversation."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.data.turns.calls import FORMATS, Call
from rltrain.data.turns.turn_delta import TurnDelta
from tests.data.turns.families import FAMILIES, PLAIN, SCHEMAS

ASK = {"role": "user", "content": "What is 3 + 4?"}
NAMES = [schema["function"]["name"] for schema in SCHEMAS]
# Reasons for which templates cannot be continued, as in test_turn_delta.
ONE_CALL = ("llama", "harmony", "gemma")  # a call of Gemma ends the turn
ONCE = ("deepseek_once",)
NO_USER_BEHIND_A_CALL = ("mistral", "deepseek_once")
AS_TEXT = ("deepseek", "deepseek_once")
REASONS = {"thinking", "coder", "glm", "minimax"}
# Parts that templates drop at a user's message, and whether they write them before a response.
REASONING = re.compile(r"<think>\n?(?:thought)?\n?</think>\n{0,2}|<think>\n(?=\Z)")

words = st.lists(
    st.sampled_from(["42", "a", "\n", "  ", "{", "}", '"', "é🙂", "</x>", "'s", "\\", "7 > 3", "\t", "  x"])
)


@st.composite
def texts(draw, marks):
    """Draw the text of a tool or a user, which may contain the texts of special tokens. Templates may strip
    its ends."""
    parts = draw(st.lists(st.one_of(words.map(" ".join), st.sampled_from(marks), st.text(max_size=5)), max_size=5))
    return "x" + "".join(part for part in parts if "\r" not in part) + "."


@st.composite
def exchanges(draw, name):
    """Draw (calls, messages) of up to four turns."""
    ends, special, _ = FAMILIES[name]
    text = texts([*ends, *special, *(mark for mark in PLAIN if mark.strip()), "<｜User｜>", "<｜Assistant｜>"])
    turns = []
    for _ in range(1 if name in ONCE else draw(st.integers(1, 4))):
        most = 1 if name in ONE_CALL else 3
        called = draw(st.lists(st.sampled_from(NAMES), min_size=name in NO_USER_BEHIND_A_CALL, max_size=most))
        calls = [Call(each, {"text": draw(st.sampled_from(["some", "3", "a b"]))}) for each in called]
        messages = [{"role": "tool", "name": call.name, "content": draw(text)} for call in calls]
        turns.append((calls, messages or [{"role": "user", "content": draw(text)}]))
    return turns


def turn_of(name, calls):
    """Return a turn as a message of the history."""
    if not calls:
        return {"role": "assistant", "content": "xANSWERx", "reasoning_content": "thought"}
    functions = [
        {
            "name": call.name,
            "arguments": f'{{"text": "{call.arguments["text"]}"}}' if name in AS_TEXT else call.arguments,
        }
        for call in calls
    ]
    called = [
        {"id": f"call{number:05d}", "type": "function", "function": function}
        for number, function in enumerate(functions)
    ]
    return {"role": "assistant", "content": "", "reasoning_content": "thought", "tool_calls": called}


def shared(left, right):
    pairs = zip(left, right, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def sampled(encoder, delta, history, turn):
    """Return the token ids of the turn as the template renders it, up to the token that ends it; None if the template
    drops the turn."""
    before = encoder.render(history, tools=SCHEMAS)
    after = encoder.render([*history, turn], answered=True, tools=SCHEMAS)
    ids = encoder.tokenizer(after[shared(before, after) :], add_special_tokens=False)["input_ids"]
    ends = [place for place, token in enumerate(ids) if token in delta.stop_token_ids]
    # Past turns of GLM end with the next role's token, which does not exist yet.
    return ids[: ends[0] + 1] if ends else [*ids, *encoder.tokenizer.convert_tokens_to_ids(["<|observation|>"])]


def trajectory_of(encoder, delta, name, turns):
    """Return (token ids of the trajectory, the history as messages)."""
    history, ids = [ASK], list(encoder.encode([ASK], tools=SCHEMAS))
    for calls, messages in turns:
        turn = turn_of(name, calls)
        policy = sampled(encoder, delta, history, turn)
        if name == "glm":
            policy[-1] = encoder.tokenizer.convert_tokens_to_ids("<|observation|>" if calls else "<|user|>")
        said = [Call(call.name, call.arguments, f"call{number:05d}") for number, call in enumerate(calls)]
        ids += [*policy, *delta.context(policy[-1], said, messages)]
        named = [
            message | ({"tool_call_id": f"call{number:05d}"} if calls else {})
            for number, message in enumerate(messages)
        ]
        history += [turn, *named]
    return ids, history


def normal(name, text, has_users):
    if name == "harmony":
        text = text.replace("<|return|>", "<|end|>")
        text = re.sub(r"<\|start\|>assistant<\|channel\|>analysis<\|message\|>.*?<\|end\|>", "", text)
    return REASONING.sub("", text) if name in REASONS and has_users else text


@pytest.mark.few(6)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "counting"])
def test_a_trajectory_decodes_to_the_whole_render(family, name):
    encoder = family(name)
    delta = TurnDelta(encoder, SCHEMAS, FORMATS[FAMILIES[name][2] or "hermes"])
    special = set(encoder.tokenizer.all_special_ids)

    @settings(max_examples=60, deadline=None)
    @given(exchanges(name))
    def check(turns):
        ids, history = trajectory_of(encoder, delta, name, turns)
        (text,) = encoder.decode_batch([ids], special=True)
        whole = encoder.render(history, tools=SCHEMAS)
        has_users = any(not calls for calls, _ in turns)
        assert normal(name, text, has_users) == normal(name, whole, has_users)
        # And of special tokens it has those of the same conversation whose texts hold none.
        plain = [(calls, [message | {"content": "x."} for message in messages]) for calls, messages in turns]
        others, _ = trajectory_of(encoder, delta, name, plain)
        assert [each for each in ids if each in special] == [each for each in others if each in special]

    check()
