"""The seam between two turns: every template's trajectory against the render of the whole conversation."""

import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rltrain.base.errors import DataError
from rltrain.data.turns.calls import FORMATS, Call
from rltrain.data.turns.detect import detect_format
from rltrain.data.turns.seam import Seam
from tests.data.turns.families import FAMILIES, SCHEMAS, TEMPLATES, save_family

# Of what templates cannot do, and why.
MOVES_TOOLS = ("mistral",)  # the tools stand before the last question
ONCE = ("deepseek_once",)  # a second group of results is opened otherwise
NEVER = ("counting",)
every_family = pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NEVER])
ASK = {"role": "user", "content": "What is 3 + 4?"}


def seam_of(encoder, name):
    return Seam(encoder, SCHEMAS, FORMATS[FAMILIES[name][2] or "hermes"])


def result(content, name="look_up"):
    return {"role": "tool", "name": name, "content": content}


def said(message):
    return {"role": "user", "content": message}


def ids_of(encoder, text):
    return encoder.tokenizer(text, add_special_tokens=False)["input_ids"]


def end_of(encoder, text):
    """The id of a token's text."""
    return encoder.tokenizer.convert_tokens_to_ids(text)


@every_family
def test_the_format_is_read_off_the_template(family, name):
    found = detect_format(family(name), SCHEMAS)
    assert (found and found.name) == FAMILIES[name][2]
    assert detect_format(family(name), []) == found


@every_family
def test_a_trajectory_is_what_the_template_writes(family, name):
    seam = seam_of(family(name), name)
    if name in ONCE:
        assert "results twice in a row" in seam.problem(["tool"])
    else:
        assert seam.problem(["tool"]) == ""
    if name in MOVES_TOOLS:
        assert seam.problem(["user"]).startswith("after a user's message, the trajectory goes on with")
    else:
        assert seam.problem(["user"]) == ""
    if name not in (*ONCE, *MOVES_TOOLS):
        assert seam.problem() == ""


def test_what_is_dropped_within_turns_is_said(family):
    for name in ("thinking", "coder", "glm", "harmony", "hermes"):
        seam = seam_of(family(name), name)
        assert seam.problem() == ""
        assert any("drops reasoning" in note for note in seam.notes) == (name != "hermes"), name
    seam = seam_of(family("llama"), "llama")
    assert seam.problem() == ""
    assert "one call a turn" in seam.notes[0]


def test_a_template_that_cannot_be_continued_is_told_with_both_texts(family):
    problem = seam_of(family("counting"), "counting").problem()
    assert problem.startswith("after a result, the trajectory goes on with ")
    assert "<|im_start|>user 1" in problem
    assert "<|im_start|>user 3" in problem


@pytest.mark.parametrize(
    ("name", "messages", "text"),
    [
        ("hermes", ["42", "43"], "\n<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<tool_response>\n43\n"
         "</tool_response><|im_end|>\n<|im_start|>assistant\n"),
        ("coder", ["42"], "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
         "<|im_start|>assistant\n<think>\n"),
        ("llama", ["say \"a\""], '<|start_header_id|>ipython<|end_header_id|>\n\n"say \\"a\\""<|eot_id|>'
         "<|start_header_id|>assistant<|end_header_id|>\n\n"),
        ("glm", ["42"], "\n<tool_response>\n42\n</tool_response><|assistant|>"),
        ("harmony", ["42"], '<|start|>functions.look_up to=assistant<|channel|>commentary<|message|>"42"<|end|>'
         "<|start|>assistant"),
        ("deepseek", ["42"], "<｜tool▁output▁begin｜>42<｜tool▁output▁end｜>"),
        ("kimi", ["42"], "<|im_system|>look_up<|im_middle|>## Return of functions.look_up:7\n42<|im_end|>"
         "<|im_assistant|>assistant<|im_middle|>"),
        ("mistral", ["42"], '[TOOL_RESULTS]{"content": 42, "call_id": "functions.look_up:7"}[/TOOL_RESULTS]'),
        ("gemma", ["42"], '<|tool_response>response:look_up{value:<|"|>42<|"|>}<tool_response|>'),
        ("lfm", ["42"], "\n<|im_start|>tool\n<|tool_response_start|>42<|tool_response_end|><|im_end|>\n"
         "<|im_start|>assistant\n"),
    ],
)  # fmt: skip
def test_the_context_of_each_family(family, name, messages, text):
    encoder = family(name)
    identity = "functions.look_up:7" if name == "kimi" else "abcdefghi"
    calls = [Call("look_up", {"text": "a"}, identity)] * len(messages)
    stop = {"glm": "<|observation|>", "harmony": "<|call|>", "gemma": "<tool_call|>"}.get(name, FAMILIES[name][0][0])
    ids = seam_of(encoder, name).context(end_of(encoder, stop), calls, [result(each) for each in messages])
    assert encoder.decode_batch([ids], special=True) == [text.replace("functions.look_up:7", identity)]


@every_family
def test_another_end_is_kept_and_the_template_s_is_added(family, name):
    encoder = family(name)
    seam = seam_of(encoder, name)
    call, message = [Call("look_up", {"text": "a"})], [result("42")]
    bare = seam.context(None, call, message)
    stop, rest = bare[0], bare[1:]
    assert stop in seam.stop_token_ids
    assert seam.context(stop, call, message) == rest
    for other in set(seam.stop_token_ids) - {stop}:
        assert seam.context(other, call, message) == bare


def test_the_end_of_a_last_answer_stands_for_that_of_a_past_one(family):
    encoder = family("harmony")
    seam = seam_of(encoder, "harmony")
    ended = seam.context(end_of(encoder, "<|return|>"), [], [said("Go on.")])
    assert encoder.decode_batch([ended], special=True) == ["<|start|>user<|message|>Go on.<|end|><|start|>assistant"]
    assert seam.context(None, [], [said("Go on.")]) == [end_of(encoder, "<|end|>"), *ended]


@every_family
def test_no_text_of_a_tool_or_a_user_becomes_a_special_token(family, name):
    encoder = family(name)
    seam = seam_of(encoder, name)
    ends, special, _ = FAMILIES[name]
    marks = [*ends, *special, "<｜User｜>"]
    marks = [mark for mark in marks if mark in encoder.tokenizer.chat_template or mark != "<｜User｜>"]
    known = {end_of(encoder, mark) for mark in marks}
    for role in ("tool", "user"):
        calls = [Call("look_up", {"text": "a"})] if role == "tool" else []
        plain = seam.context(None, calls, [{"role": role, "name": "look_up", "content": "a b c"}])
        for mark in marks:
            content = f"a {mark}b{mark} c{mark}{mark}"
            hostile = seam.context(None, calls, [{"role": role, "name": "look_up", "content": content}])
            assert [each for each in hostile if each in known] == [each for each in plain if each in known]
            shown = content if name not in ("llama", "harmony") or role == "user" else content.replace('"', '\\"')
            assert shown in encoder.decode_batch([hostile], special=True)[0]
            # A name that the policy made up is no way in either.
            called = seam.context(None, [Call(f"look_up{mark}", {}, f"id{mark}xxxxxxx")], [result("a b c", f"x{mark}")])
            assert sum(each in known for each in called) == sum(
                each in known for each in seam.context(None, [Call("look_up", {}, "idxxxxxxx")], [result("a b c", "x")])
            )


def test_plain_added_tokens_of_the_tools_stay_as_the_tokenizer_has_them(family):
    """Tokens of white space are no marks, and a text without marks is tokenised with what stands around it."""
    encoder = family("hermes")
    seam = seam_of(encoder, "hermes")
    ids = seam.context(end_of(encoder, "<|im_end|>"), [Call("look_up", {})], [result("a\n\nb")])
    assert end_of(encoder, "\n\n") in ids


def test_results_without_a_call_and_calls_without_a_result(family):
    """A call that could not be read is answered as well."""
    for name in FAMILIES:
        if name in NEVER:
            continue
        encoder = family(name)
        seam = seam_of(encoder, name)
        with_call = seam.context(None, [Call("look_up", {})], [result("no valid call")])
        assert seam.context(None, [], [result("no valid call")]) == with_call
        assert "Go on." in encoder.decode_batch([seam.context(None, [Call("look_up", {})], [said("Go on.")])])[0]


def test_what_is_no_text_is_refused(family):
    with pytest.raises(DataError, match="is text"):
        seam_of(family("hermes"), "hermes").context(None, [], [said(7)])


def random_words(chance):
    words = ["42", "a", "\n", "  ", "is", "{", "}", '"', "é🙂", "</x>", ":", "result", "'s", "\\", "7 > 3"]
    return "x" + " ".join(chance.choice(words, chance.integers(0, 9))) + "."


def written_out(name, calls):
    """Turns as the template writes them in the history."""
    return [
        {"id": f"call{number:05d}", "type": "function",
         "function": {"name": call.name, "arguments": call.arguments if name not in ("deepseek", "deepseek_once")
                      else '{"text": "' + call.arguments["text"] + '"}'}}
        for number, call in enumerate(calls)
    ]  # fmt: skip


@every_family
def test_random_conversations_end_as_the_whole_render_does(family, name):
    """Prompt, turns and contexts: every context is the end of what the template writes up to there."""
    encoder = family(name)
    seam = seam_of(encoder, name)
    chance = np.random.default_rng(11)
    for _ in range(12):
        history, told = [ASK], 0
        for _ in range(chance.integers(1, 5)):
            number = int(chance.integers(0, 3)) if name not in (*ONCE, "llama", "harmony") else int(chance.integers(2))
            number = max(number, 1) if name in MOVES_TOOLS else number
            if name in ONCE and told:
                break
            told += number
            calls = [Call(str(chance.choice(["look_up", "calculate"])), {"text": "some"}) for _ in range(number)]
            answer = {"role": "assistant", "content": "" if calls else "xANSWERx"}
            if calls:
                answer["tool_calls"] = written_out(name, calls)
            messages = [result(random_words(chance), call.name) for call in calls] or [said(random_words(chance))]
            ids = [{"tool_call_id": f"call{place:05d}"} if calls else {} for place in range(len(messages))]
            before = encoder.written([*history, answer], answered=True, tools=SCHEMAS)
            history += [answer, *(message | extra for message, extra in zip(messages, ids, strict=True))]
            whole = encoder.encode(history, tools=SCHEMAS)
            context = seam.context(None, calls, messages)
            assert whole[-len(context) + 1 :] == context[1:]
            # What stands before ends with the policy's turn: the template's own token for it, and no more.
            ending = encoder.decode_batch([whole[: len(whole) - len(context) + 1]], special=True)[0]
            turn = "xANSWERx" if not calls else "some"
            assert turn in ending[-120:] or name == "lfm"
            assert len(before) > 0


def test_a_tokenizer_that_begins_a_text_with_a_space_is_no_difference(tmp_path):
    """As Llama 2 and Mistral have it: the context is tokenised behind the token that ends the turn."""
    words = (TEMPLATES / "mistral.jinja").read_text(encoding="utf-8") + " What is 3 + 4? The result is 42."
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    core.train_from_iterator([words], trainers.BpeTrainer(special_tokens=["<unk>"], show_progress=False))
    for name in ("mistral", "hermes"):
        (tmp_path / name).mkdir()
        encoder = save_family(tmp_path / name, name, tokenizer=Tokenizer.from_str(core.to_str()))
        end = FAMILIES[name][0][0]
        assert ids_of(encoder, "is") != ids_of(encoder, f"{end}is")[1:]
        assert seam_of(encoder, name).problem(["tool"]) == ""


def test_what_is_noted_for_people_reaches_no_template(family, monkeypatch):
    encoder, written = family("hermes"), []
    monkeypatch.setattr(
        encoder,
        "written",
        lambda messages, **how: written.append(messages) or type(encoder).written(encoder, messages, **how),
    )
    noted = result("42") | {"arguments": "{}", "seconds": 0.25}
    bare = seam_of(encoder, "hermes").context(None, [Call("look_up", {})], [result("42")])
    assert seam_of(encoder, "hermes").context(None, [Call("look_up", {})], [noted]) == bare
    assert not {"arguments", "seconds"} & {name for messages in written for message in messages for name in message}


def test_a_context_costs_milliseconds(family):
    seam = seam_of(family("thinking"), "thinking")
    seam.context(None, [Call("look_up", {})], [result("42")])
    began = time.perf_counter()
    for number in range(50):
        seam.context(None, [Call("look_up", {})], [result(f"{number} " * 200)])
    assert (time.perf_counter() - began) / 50 < 0.03


def test_real_template_of_minicpm(tmp_path):
    """vLLM ships it: the structure of Qwen 3."""
    vllm = pytest.importorskip("vllm")
    path = Path(vllm.__file__).parent / "transformers_utils" / "chat_templates" / "template_minicpmv45.jinja"
    if not path.is_file():
        pytest.skip("this vLLM ships no template_minicpmv45.jinja")
    encoder = save_family(tmp_path, "thinking", template=path.read_text(encoding="utf-8"))
    assert detect_format(encoder, SCHEMAS) is FORMATS["hermes"]
    seam = Seam(encoder, SCHEMAS, FORMATS["hermes"])
    assert seam.problem() == ""
    assert any("drops reasoning" in note for note in seam.notes)


@pytest.mark.parametrize("version", ["v3", "v7", "v11", "v13"])
def test_real_templates_of_mistral(tmp_path, version):
    """mistral_common writes them."""
    generator = pytest.importorskip("mistral_common.integrations.chat_templates.template_generator")
    number = generator.TokenizerVersion(version)
    template = generator.build_chat_template(generator.TemplateConfig(version=number))
    encoder = save_family(tmp_path, "mistral", template=template)
    assert detect_format(encoder, SCHEMAS) is FORMATS["mistral"]
    seam = Seam(encoder, SCHEMAS, FORMATS["mistral"])
    assert seam.problem(["tool"]) == ""
