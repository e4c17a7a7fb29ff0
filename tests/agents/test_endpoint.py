"""The endpoint for agents of other libraries: its replies, and the conversation that results."""

import http.client
import json
import socket
from contextlib import ExitStack, closing
from urllib.parse import urlsplit

import pytest

from rltrain.agents.chat import TrajectoryStart, TurnLimits
from rltrain.agents.pool import ExecutorPool
from rltrain.agents.toolbox import ToolSources
from rltrain.runtime.slots.limits import Limits
from tests.agents.test_executor_pool import NAMES, TOOLS, killed, replies, reply, texts, turn
from tests.clock import PATIENCE_S, eventually

AGENTS = '''
import json, threading
import openai

GO_ON = {"role": "user", "content": "go on"}


def told(error):
    return {"status": error.status_code, **error.body}


async def talks(chat, row, seed):
    """As many turns as the policy has."""
    client = openai.AsyncOpenAI(**chat.endpoint)
    messages = list(chat.messages)
    while True:
        reply = await client.chat.completions.create(model="m", messages=messages)
        print("heard", reply.to_json(indent=None))
        messages += [reply.choices[0].message, GO_ON]


def blocks(chat, row, seed):
    """The same in a thread, with the library's client that blocks."""
    client, messages = openai.OpenAI(**chat.endpoint), list(chat.messages)
    for _ in range(2):
        reply = client.chat.completions.create(model="m", messages=messages)
        messages += [reply.choices[0].message, GO_ON]
    return {"score": float(row["ground_truth"] in reply.choices[0].message.content)}


def streams(chat, row, seed):
    client, options = openai.OpenAI(**chat.endpoint), {"include_usage": True}
    chunks = list(client.chat.completions.create(
        model="m", messages=chat.messages, stream=True, stream_options=options, temperature=0.5, tools=None))
    print("heard", [chunk.to_dict() for chunk in chunks])
    return {"score": 1.0, "models": len(client.models.list().data)}


def uses_tools(chat, row, seed):
    client, messages = openai.OpenAI(**chat.endpoint), list(chat.messages)
    names = row["extra_info"].get("names", chat.tools)
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    while True:
        reply = client.chat.completions.create(model="m", messages=messages, tools=tools)
        message, choice = reply.choices[0].message, reply.choices[0]
        messages.append(message.model_dump(exclude_none=True))
        if choice.finish_reason != "tool_calls":
            return {"score": 1.0, "calls": 0.0}
        for call in reversed(message.tool_calls):  # the order in which they were ready
            said = f"{call.function.name} {json.loads(call.function.arguments)}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})


def tries(chat, row, seed):
    """What the row has it try, after a first turn."""
    client, messages = openai.OpenAI(**chat.endpoint), list(chat.messages)
    first = client.chat.completions.create(model="m", messages=messages).choices[0].message
    said = [*messages, first, GO_ON]
    more = {"n": 2} if row["extra_info"]["try"] == "n" else {}
    tried = {
        "edits": [messages[0], {"role": "assistant", "content": "another"}, GO_ON],
        "forks": messages,
        "adds nothing": said[:-1],
        "answers itself": [*said, {"role": "assistant", "content": "I did"}],
        "image": [*said[:-1], {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        "n": said,
    }[row["extra_info"]["try"]]
    try:
        client.chat.completions.create(model="m", messages=tried, **more)
    except openai.APIStatusError as error:
        print("told", json.dumps(told(error)))
        assert error.request.headers["x-stainless-retry-count"] == "0"  # the library does not try again
    # The conversation is as it was.
    client.chat.completions.create(model="m", messages=said)
    return 1.0


def outside(chat, row, seed):
    """Have the test speak, from another process."""
    print("address", json.dumps(chat.endpoint))
    threading.Event().wait()


def leaves(chat, row, seed):
    """A request is under way when the trajectory is given up."""
    client, messages = openai.OpenAI(**chat.endpoint), list(chat.messages)
    try:
        for _ in range(2):
            reply = client.chat.completions.create(model="m", messages=messages)
            messages += [reply.choices[0].message, GO_ON]
    except openai.APIStatusError as error:
        print("told", json.dumps(told(error)))
'''


class Room:
    """Executors with one process, and the output printed there."""

    def __init__(self, folder):
        (folder / "tools.py").write_text(TOOLS)
        (folder / "agents.py").write_text(AGENTS)
        self.file, self._printed = folder / "agents.py", ""
        terms = TurnLimits(PATIENCE_S, None, 2, 256, "middle")
        self.executors = ExecutorPool(ToolSources(str(folder / "tools.py")), terms, Limits(PATIENCE_S, 4096), 1)

    def begin(self, agent, turn, **row):
        prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "?"}]
        row = {"extra_info": {}, "ground_truth": "7", **row}
        return self.executors.start(TrajectoryStart(prompt, row, 0, f"{self.file}:{agent}", NAMES), turn)

    def asked(self):
        line = reply(self.executors)
        assert "request" in line, line
        return line["request"]

    def printed(self, word):
        """Return the rest of all lines that start with ``word``. There must be at least one."""

        def lines():
            self._printed += self.executors.take_printed()
            return [line[len(word) + 1 :] for line in self._printed.splitlines() if line.startswith(word)]

        return eventually(lines, word)


@pytest.fixture
def room(tmp_path, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):  # a cluster's proxy would not reach this process
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    made = Room(tmp_path)
    yield made
    made.executors.shutdown()


def test_openais_client_has_the_conversation(room):
    number = room.begin("talks", turn(text=" one ", reasoning="hm"))
    assert room.asked() == [{"role": "user", "content": "go on"}]
    room.executors.send_turn(number, turn(text="two", finish="length"))
    line = reply(room.executors)
    assert line["end"] == {}, line
    first, second = map(json.loads, room.printed("heard"))
    assert first["object"] == "chat.completion"
    assert first["model"] == "m"
    (choice,) = first["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", " one ")
    assert choice["message"]["reasoning_content"] == "hm"
    assert second["choices"][0]["finish_reason"] == "length"


def test_an_agent_that_blocks_has_a_thread(room):
    numbers = [room.begin("blocks", turn(text=str(at))) for at in range(20)]
    assert all("request" in line for line in replies(room.executors, 20).values())
    for number in numbers:
        room.executors.send_turn(number, turn(text="it is 7"))
    assert [line["end"] for line in replies(room.executors, 20).values()] == [{"score": 1.0}] * 20


def test_a_stream_is_one_piece_and_sampling_is_the_runs(room):
    room.begin("streams", turn(("echo", {"word": "é"}), text="so"))
    assert reply(room.executors)["end"] == {"score": 1.0, "models": 1.0}
    (heard,) = room.printed("heard")
    assert "'delta': {'content': 'so'" in heard
    assert "'finish_reason': 'tool_calls'" in heard
    assert "'usage': {" in heard
    assert room.printed("chat.endpoint:") == [
        "'temperature' of requests has no effect: sampling follows the run (rollout.*)."
    ]


def test_calls_go_to_the_library_and_results_come_in_their_order(room):
    number = room.begin("uses_tools", turn(("echo", {"word": "a"}), ("nap", {"seconds": 1}), ("echo", {"word": "c"})))
    line = reply(room.executors)
    assert [message["name"] for message in line["request"]] == ["echo", "nap", "echo"]
    assert texts(line) == [
        "echo {'word': 'a'}", "nap {'seconds': 1}", "Error: not run: at most 2 calls in a turn"
    ]  # fmt: skip
    assert (line["counts"]["tool_calls"], line["counts"]["calls_not_run"]) == (3, 1)
    # Requests that no library can send get a reply too; the library then sees the next turn.
    room.executors.send_turn(number, turn(("fly", {}), problems=["it is no JSON."]))
    line = reply(room.executors)
    assert texts(line)[0].startswith("Error: there is no tool 'fly'")
    assert texts(line)[1] == "Error: it is no JSON."
    room.executors.send_turn(number, turn(("fly", {}), ("echo", {"word": "b"}), problems=["broken."]))
    line = reply(room.executors)
    assert texts(line)[1:] == ["echo {'word': 'b'}", "Error: broken."]
    room.executors.send_turn(number, turn(text="done"))
    assert reply(room.executors)["end"] == {"score": 1.0, "calls": 0.0}


def test_tools_that_the_policy_was_not_shown_are_refused(room):
    room.begin("uses_tools", turn(text="x"), extra_info={"names": ["echo", "fly"]})
    failed = reply(room.executors)["failed"]
    assert "the request has the tools echo, fly, but the prompt of the policy shows doze, echo" in failed


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("attempt", "status", "words"),
    [
        (
            "edits",
            409,
            'message 1 differs from the conversation: it is {"role": "assistant", "content": "another"} instead',
        ),
        ("forks", 409, "the request has 2 of the 3 messages so far"),
        ("adds nothing", 409, "the request adds no message"),
        ("answers itself", 400, '{"role": "assistant", "content": "I did"} cannot be added'),
        ("image", 400, "is not a text message"),
        ("n", 400, "n=2 is not supported; remove it or use 1."),
    ],
)
def test_out_of_order_requests_are_rejected_without_effect(room, attempt, status, words):
    number = room.begin("tries", turn(text="one"), extra_info={"try": attempt})
    assert room.asked() == [{"role": "user", "content": "go on"}]
    room.executors.send_turn(number, turn(text="two"))
    assert reply(room.executors)["end"] == {"score": 1.0}
    told = json.loads(room.printed("told")[0])
    assert told["status"] == status
    assert words in told["message"]


def test_request_of_a_cancelled_trajectory_gets_a_response(room):
    number = room.begin("leaves", turn(text="one"))
    room.asked()
    room.executors.close(number)
    told = json.loads(room.printed("told")[0])
    assert (told["status"], told["code"]) == (401, "unknown_trajectory")


# tests/trainer/test_agents.py tests this in every run.
@pytest.mark.long
def test_restarted_agent_gets_its_previous_turns(room):
    number = room.begin("talks", turn(text="one"))
    room.asked()
    killed()
    room.executors.send_turn(number, turn(text="two"))
    assert room.asked() == [{"role": "user", "content": "go on"}]
    room.executors.send_turn(number, None)
    assert reply(room.executors)["end"] == {}


@pytest.fixture
def address(room):
    room.begin("outside", turn(text="one"))
    given = json.loads(room.printed("address")[0])
    return urlsplit(given["base_url"]).port, given["api_key"]


def raw(port, data):
    """Return all received bytes until the other end closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(data)
        received = b""
        while piece := connection.recv(1 << 16):
            received += piece
    return received


def test_requests_without_the_key_are_rejected(room, address):
    port, key = address
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
        for given in ("", key[:-1], "é" * 10):
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions")):
                connection.request(method, path, b"x" * (1 << 20), {"Authorization": f"Bearer {given}".encode()})
                response = connection.getresponse()
                assert (response.status, json.loads(response.read())["error"]["code"]) == (401, "unknown_trajectory")
                assert response.headers["Connection"] == "close"
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}", "Host": "evil.example"})
        assert connection.getresponse().status == 421
    assert len(key) > 40
    with pytest.raises(OSError), socket.create_connection((local_address(), port), timeout=5):
        pass


def local_address():
    """Return this machine's address in its network, or else another loopback address, where nothing listens either."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.2"


def test_silent_connections_take_no_place_from_a_client_with_the_key(room, address):
    port, key = address
    with ExitStack() as silent:
        waiting = [silent.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(200)]
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
            connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert connection.getresponse().status == 200
        for each in waiting:
            each.setblocking(False)

        def closed(each):
            try:
                return each.recv(1) == b""
            except BlockingIOError:
                return False
            except ConnectionError:
                return True

        gone = [False] * len(waiting)

        def all_closed():
            gone[:] = [done or closed(each) for done, each in zip(gone, waiting, strict=True)]
            return all(gone)

        eventually(all_closed, "the oldest are closed at once, the others after seconds")


def test_invalid_http_requests_are_rejected(room, address):
    port, key = address
    head = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {key}\r\n".encode()
    hostile = {
        b"hello\r\n\r\n": b"400",
        b"GET / HTTP/1.1\r\nx: " + b"y" * (1 << 18): b"431",
        head + b"Content-Length: -1\r\n\r\n": b"400",
        head + b"Host: evil\r\nHost: ours\r\nContent-Length: 0\r\n\r\n": b"400",
        head + b"Content-Length: 99999999999\r\n\r\n": b"413",
        head + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n": b"411",
        head + b"Connection: close\r\nContent-Length: 100000\r\n\r\n" + b"[" * 100_000: b"400",
        head + b"Connection: close\r\nContent-Length: 15\r\n\r\n" + b'{"messages": 3}': b"400",
        head.replace(b"POST", b"PUT") + b"Connection: close\r\n\r\n": b"404",
    }
    messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "?"}]}]
    with socket.create_connection(("127.0.0.1", port)) as half:
        half.sendall(head + b"Content-Length: 10\r\n\r\n{")  # the rest never arrives
        for data, status in hostile.items():
            assert raw(port, data).split(b" ")[:2] == [b"HTTP/1.1", status], data[:80]
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
            for again in (0, 1):  # a library's second try gets the same turn
                headers = {"Authorization": f"Bearer {key}", "x-stainless-retry-count": str(again)}
                connection.request("POST", "/v1/chat/completions?x=1", json.dumps({"messages": messages}), headers)
                reply = json.loads(connection.getresponse().read())
                assert reply["choices"][0]["message"]["content"] == "one"
