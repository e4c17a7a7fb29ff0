"""Calls of user code: any behaviour of the code, and the conversion of tool results."""

import asyncio
import base64
import threading
from io import BytesIO
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image

from rltrain.agents.calling import call_user, convert_arguments, convert_result
from rltrain.agents.verl_stubs import ToolResponse
from tests.images import RED


def run(function, /, *arguments, **named):
    return asyncio.run(asyncio.wait_for(call_user(function, *arguments, **named), 10))


def test_a_function_that_blocks_runs_beside_the_event_loop_and_an_async_one_on_it():
    async def where():
        return threading.current_thread()

    assert run(where) is threading.main_thread()
    assert run(threading.current_thread) is not threading.main_thread()
    assert run(lambda: where()) is threading.main_thread(), "what a function returns is awaited on the loop"


def test_an_argument_may_have_any_name():
    assert run(lambda function, self: function + self, function=1, self=2) == 3


def takes(hint):
    def function(x: hint, y: int = 0): ...

    return function


@pytest.mark.parametrize(
    ("hint", "given", "taken"),
    [
        (float, "5", 5), (float, 5, 5), (int, "5", 5), (int, 5.0, 5), (bool, "true", True), (list, "[1]", [1]),
        (list[int], ["1", 2], [1, 2]), (dict[str, float], {"a": "1.5"}, {"a": 1.5}), (str, "5", "5"),
        (int | None, None, None), (int | None, "5", 5), (str | None, "null", "null"), (int | str, "5", "5"),
        (Literal["a", 3], 3, 3), (Any, "5", "5"), (tuple, [1], [1]), ("an unknown name", "5", "5"),
    ],
)  # fmt: skip
def test_arguments_are_read_as_the_type_hints_say(hint, given, taken):
    x = convert_arguments(takes(hint), {"x": given})["x"]
    assert (x, type(x)) == (taken, type(taken))


@pytest.mark.parametrize(
    ("hint", "given", "words"),
    [
        (float, "five", "the argument x must be float, not str: 'five'"), (float, "1e999", "must be float"),
        (float, "NaN", "must be float"), (float, True, "not bool: True"), (int, 5.5, "must be int, not float: 5.5"),
        (int, True, "must be int"), (int, "007", "must be int"), (str, ["a"], "must be str, not list: ['a']"),
        (str, 5, "must be str, not int: 5"), (str, None, "not NoneType: None"), (bool, "yes", "must be bool"),
        (bool, 1, "must be bool"), (list, {"a": 1}, "must be list"), (list[int], ["a"], "must be list[int]"),
        (dict, "[1]", "must be dict"), (int | None, "a", "must be int | None"), (Literal["a"], "b", "Literal['a']"),
    ],
)  # fmt: skip
def test_an_argument_of_another_type_is_named_with_both_types(hint, given, words):
    with pytest.raises(TypeError, match=r"the argument x must be .*, not ") as refusal:
        convert_arguments(takes(hint), {"x": given})
    assert words in str(refusal.value)


def test_unknown_and_missing_arguments_are_named():
    for given, words in (({}, "'x'"), ({"x": 1, "z": 2}, "'z'")):
        with pytest.raises(TypeError, match=words):
            convert_arguments(takes(int), given)
    assert convert_arguments(lambda **named: 0, {"z": 2}) == {"z": 2}


@pytest.mark.parametrize(
    ("error", "words"),
    [(SystemExit(3), "SystemExit: 3"), (StopIteration(), "StopIteration"), (KeyboardInterrupt(), "Key")],
)
def test_exceptions_that_end_event_loops_become_call_errors(error, words):
    def blocking():
        raise error

    async def on_the_loop():
        raise error

    with pytest.raises(RuntimeError, match=words):
        run(blocking)
    with pytest.raises(RuntimeError):
        run(on_the_loop)


@pytest.mark.parametrize(
    ("returned", "text", "reward", "metrics"),
    [
        ("hello", "hello", 0.0, {}),
        ({"a": "é", "b": [1]}, '{"a": "é", "b": [1]}', 0.0, {}),
        ({"type": "image", "url": "https://a/b.png"}, '{"type": "image", "url": "https://a/b.png"}', 0.0, {}),
        (7, "7", 0.0, {}),
        (ToolResponse(text="x"), "x", 0.0, {}),
        (ToolResponse(text="x", image=[], video=None), "x", 0.0, {}),
        (("text", 1.5), "text", 1.5, {}),
        (("text", True), "text", 1.0, {}),
        (("text", None, None), "text", 0.0, {}),
        (
            ({"a": 1}, 2.0, {"k": "v", "n": np.float32(0.5), "o": [1]}),
            '{"a": 1}',
            2.0,
            {"k": "v", "n": 0.5, "o": "[1]"},
        ),
        ((ToolResponse(text="y"), -0.05, {"seen": 3}), "y", -0.05, {"seen": 3}),
    ],
)
def test_convert_result(returned, text, reward, metrics):
    assert convert_result(returned) == {"content": text, "reward": reward, "metrics": metrics}


ADDRESS = f"data:image;base64,{base64.b64encode(RED).decode()}"
SHOWN = {"type": "image", "image": ADDRESS}


@pytest.mark.parametrize(
    ("returned", "content"),
    [
        (RED, [SHOWN]),
        ([RED, "a red one", RED], [SHOWN, {"type": "text", "text": "a red one"}, SHOWN]),
        (ToolResponse(text="y", image=[RED, ADDRESS]), [SHOWN, SHOWN, {"type": "text", "text": "y"}]),
    ],
)
def test_tool_result_with_images(returned, content):
    assert convert_result(returned)["content"] == content


def test_an_image_may_be_a_file_or_one_of_pillow(tmp_path):
    (tmp_path / "red.png").write_bytes(RED)
    of_file = convert_result(ToolResponse(image=[str(tmp_path / "red.png")]))["content"]
    image = Image.open(tmp_path / "red.png")
    assert of_file == [SHOWN]
    for returned in (image, ToolResponse(image=image), [{"type": "image", "image": image}]):
        (part,) = convert_result(returned)["content"]
        again = Image.open(BytesIO(base64.b64decode(part["image"].partition(",")[2])))
        assert np.array_equal(np.array(again), np.array(image))


@pytest.mark.parametrize(
    ("returned", "error", "words"),
    [
        ((), TypeError, "a tuple of 0: it must be"),
        (("a", float("nan")), ValueError, "must be a finite number"),
        (
            ToolResponse(text="seen", image=[b"png"]),
            ValueError,
            "image 1 of 1: its first bytes are not those of an image file",
        ),
        ([RED, 7], ValueError, "7 is next to an image"),
        ((ToolResponse(video=[b"mp4"]), 1.0), TypeError, "returned videos, which are not in this version"),
    ],
)
def test_invalid_tool_results_are_errors(returned, error, words):
    with pytest.raises(error, match=words):
        convert_result(returned)
