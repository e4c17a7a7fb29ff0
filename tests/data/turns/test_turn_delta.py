"""The text between two turns: the trajectory of every template, compared with its rendering of the whole
conversation."""

import pytest

from rltrain.data.turns.calls import FORMATS, Call
from rltrain.data.turns.detect import detect_format
from rltrain.data.turns.turn_delta import TurnDelta
from tests.data.turns.families import FAMILIES, SCHEMAS, save_family

# Templates that cannot be continued, and why.
MOVES_TOOLS = ("mistral",)  # the tools are before the last question
ONCE = ("deepseek_once",)  # a second group of results has another opening
NEVER = ("counting",)
every_family = pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NEVER])
ASK = {"role": "user", "content": "What is 3 + 4?"}


def turn_delta_of(encoder, name):
    return TurnDelta(encoder, SCHEMAS, FORMATS[FAMILIES[name][2] or "hermes"])


def result(content, name="look_up"):
    return {"role": "tool", "name": name, "content": content}


def said(message):
    return {"role": "user", "content": message}


def end_of(encoder, text):
    """Return the id of a token's text."""
    return encoder.tokenizer.convert_tokens_to_ids(text)


@every_family
def test_the_format_is_read_off_the_template(family, name):
    found = detect_format(family(name), SCHEMAS)
    assert (found and found.name) == FAMILIES[name][2]
    assert detect_format(family(name), []) == found


@every_family
def test_a_trajectory_is_what_the_template_writes(family, name):
    delta = turn_delta_of(family(name), name)
    if name in ONCE:
        assert "results twice in a row" in delta.problem(["tool"])
    else:
        assert delta.problem(["tool"]) == ""
    if name in MOVES_TOOLS:
        assert delta.problem(["user"]).startswith("after a user's message, the trajectory continues with")
    else:
        assert delta.problem(["user"]) == ""
    if name not in (*ONCE, *MOVES_TOOLS):
        assert delta.problem() == ""


def test_dropped_reasoning_is_noted(family):
    for name in ("thinking", "coder", "glm", "harmony", "hermes"):
        delta = turn_delta_of(family(name), name)
        assert delta.problem() == ""
        assert any("drops reasoning" in note for note in delta.notes) == (name != "hermes"), name
    delta = turn_delta_of(family("llama"), "llama")
    assert delta.problem() == ""
    assert "one call per turn" in delta.notes[0]


def test_unsupported_template_error_shows_both_texts(family):
    problem = turn_delta_of(family("counting"), "counting").problem()
    assert problem.startswith("after a result, the trajectory continues with ")
    assert "<|im_start|>user 1" in problem
    assert "<|im_start|>user 3" in problem


@every_family
def test_another_end_is_kept_and_the_template_s_is_added(family, name):
    encoder = family(name)
    delta = turn_delta_of(encoder, name)
    call, message = [Call("look_up", {"text": "a"})], [result("42")]
    bare = delta.context(None, call, message)
    stop, rest = bare[0], bare[1:]
    assert stop in delta.stop_token_ids
    assert delta.context(stop, call, message) == rest
    for other in set(delta.stop_token_ids) - {stop}:
        assert delta.context(other, call, message) == bare


@every_family
def test_no_text_of_a_tool_or_a_user_becomes_a_special_token(family, name):
    encoder = family(name)
    delta = turn_delta_of(encoder, name)
    ends, special, _ = FAMILIES[name]
    marks = [*ends, *special, "<｜User｜>"]
    marks = [mark for mark in marks if mark in encoder.tokenizer.chat_template or mark != "<｜User｜>"]
    known = {end_of(encoder, mark) for mark in marks}
    for role in ("tool", "user"):
        calls = [Call("look_up", {"text": "a"})] if role == "tool" else []
        plain = delta.context(None, calls, [{"role": role, "name": "look_up", "content": "a b c"}])
        for mark in marks:
            content = f"a {mark}b{mark} c{mark}{mark}"
            hostile = delta.context(None, calls, [{"role": role, "name": "look_up", "content": content}])
            assert [each for each in hostile if each in known] == [each for each in plain if each in known]
            shown = content if name not in ("llama", "harmony") or role == "user" else content.replace('"', '\\"')
            assert shown in encoder.decode_batch([hostile], special=True)[0]
            # A name that the policy invented does not help either.
            called = delta.context(
                None, [Call(f"look_up{mark}", {}, f"id{mark}xxxxxxx")], [result("a b c", f"x{mark}")]
            )
            assert sum(each in known for each in called) == sum(
                each in known
                for each in delta.context(None, [Call("look_up", {}, "idxxxxxxx")], [result("a b c", "x")])
            )


def test_results_without_a_call_and_calls_without_a_result(family):
    """A call that could not be parsed gets a reply too."""
    for name in FAMILIES:
        if name in NEVER:
            continue
        encoder = family(name)
        delta = turn_delta_of(encoder, name)
        with_call = delta.context(None, [Call("look_up", {})], [result("no valid call")])
        assert delta.context(None, [], [result("no valid call")]) == with_call
        assert "Go on." in encoder.decode_batch([delta.context(None, [Call("look_up", {})], [said("Go on.")])])[0]


@pytest.mark.parametrize("version", ["v3", "v7", "v11", "v13"])
def test_real_templates_of_mistral(tmp_path, version):
    """The templates are written by mistral_common."""
    generator = pytest.importorskip("mistral_common.integrations.chat_templates.template_generator")
    number = generator.TokenizerVersion(version)
    template = generator.build_chat_template(generator.TemplateConfig(version=number))
    encoder = save_family(tmp_path, "mistral", template=template)
    assert detect_format(encoder, SCHEMAS) is FORMATS["mistral"]
    delta = TurnDelta(encoder, SCHEMAS, FORMATS["mistral"])
    assert delta.problem(["tool"]) == ""
