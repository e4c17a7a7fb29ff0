import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from rltrain.base.errors import ConfigError, RewardError
from rltrain.config.check import check
from rltrain.config.load import load_config
from rltrain.rewards.processes.remote import RemoteScorer


class Server:
    """Answers every POST with what ``reply(call, number of the request)`` returns: (status, body)."""

    def __init__(self, reply, keep):
        self.calls, self.headers, self.num_connections, self.busy, self.busiest = [], [], 0, 0, 0
        lock, server = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1" if keep else "HTTP/1.0"

            def setup(self):
                server.num_connections += 1
                super().setup()

            def do_POST(self):
                server.headers.append(dict(self.headers))
                call = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    server.calls.append(call)
                    server.busy += 1
                    server.busiest = max(server.busiest, server.busy)
                    number = len(server.calls)
                status, body = reply(call, number)
                with lock:
                    server.busy -= 1
                self.send_response(status)
                if status == 429:
                    self.send_header("Retry-After", body.decode())
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                try:
                    for byte in body if b"trickle" in body else ():
                        self.wfile.write(bytes([byte]))
                        self.wfile.flush()
                        time.sleep(0.1)
                    self.wfile.write(b"" if b"trickle" in body else body)
                except OSError:
                    pass

            def log_message(self, *_):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}/score"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self):
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def serve():
    servers = []

    def make(reply, keep=False):
        servers.append(Server(reply, keep))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def remote():
    scorers = []

    def make(url, timeout_s=2.0, concurrency=4, headers=None):
        scorers.append(RemoteScorer(url, timeout_s, concurrency, headers))
        return scorers[-1]

    yield make
    for scorer in scorers:
        scorer.close()


def echo(call, number):
    return 200, json.dumps({"score": len(call["solution_str"]), "acc": 1.0, "pred": call["ground_truth"]}).encode()


CALL = ("any/source", "an answer", "42", {"index": 7})


def test_the_four_arguments_travel_and_a_score_comes_back(serve, remote):
    server = serve(echo)
    score = remote(server.url).score(*CALL)
    assert (score.value, score.status, score.extras) == (9.0, "ok", {"acc": 1.0, "pred": "42"})
    names = ("data_source", "solution_str", "ground_truth", "extra_info")
    assert server.calls == [dict(zip(names, CALL, strict=True))]


def test_a_busy_server_is_asked_again(serve, remote):
    server = serve(lambda call, number: (503, b"later") if number < 3 else echo(call, number))
    assert remote(server.url).score(*CALL).value == 9.0
    assert len(server.calls) == 3


def test_headers_go_along_and_the_connection_is_kept(serve, remote):
    server = serve(lambda call, number: (503, b"later") if number == 2 else echo(call, number), keep=True)
    scorer = remote(server.url, headers={"Authorization": "Bearer abc", "X-Number": 1})
    assert [scorer.score(*CALL).value for _ in range(3)] == [9.0] * 3
    assert len(server.calls) == 4
    assert server.num_connections == 1
    wanted = {"Authorization": "Bearer abc", "X-Number": "1", "Content-Type": "application/json"}
    assert all(wanted.items() <= headers.items() for headers in server.headers)


@pytest.mark.parametrize(("after", "calls"), [("30", 1), ("nonsense", 2), ("\u00b2", 2)])
def test_a_server_that_names_a_time_is_asked_then(serve, remote, after, calls):
    server = serve(lambda call, number: (429, after.encode()) if number == 1 else echo(call, number))
    start = time.monotonic()
    score = remote(server.url, timeout_s=0.5).score(*CALL)
    assert time.monotonic() - start < 15  # and not the 30 s that it names
    assert len(server.calls) == calls
    assert (score.status, score.value) == (("timeout", None) if calls == 1 else ("ok", 9.0))


def test_the_deadline_holds_for_headers_that_trickle(remote):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def trickle():
            line, _ = listening.accept()
            with line, contextlib.suppress(OSError):
                for _ in range(100):
                    line.sendall(b"HTTP/1.1 200 OK\r\n" if not _ else b"X: y\r\n")
                    time.sleep(0.05)

        threading.Thread(target=trickle, daemon=True).start()
        start = time.monotonic()
        score = remote(f"http://127.0.0.1:{listening.getsockname()[1]}/", timeout_s=0.4).score(*CALL)
        assert (score.status, time.monotonic() - start < 2.0) == ("timeout", True)


@pytest.mark.parametrize(
    ("reply", "status", "said"),
    [
        ((404, b"no such page"), "crashed", "no such page"),
        ((302, b""), "crashed", "HTTP 302"),
        ((200, b"not json"), "rejected", "not json"),
        ((200, b"[1]"), "rejected", "without 'score'"),
        ((200, b'{"score": NaN}'), "rejected", "finite"),
        ((200, b'{"score": "1"}'), "rejected", "must be one number"),
        ((200, b"[" * 100_000), "rejected", "it sent"),
        ((200, b" " * (2 << 20)), "crashed", "mebibyte"),
    ],
)
def test_what_is_no_score_is_said_and_not_asked_again(serve, remote, reply, status, said):
    server = serve(lambda *_: reply)
    score = remote(server.url).score(*CALL)
    assert (score.value, score.status) == (None, status)
    assert said in score.error
    assert len(server.calls) == 1


@pytest.mark.parametrize("reply", [(500, b"broken"), (200, b'{"score": 1, "pred": "a trickle of bytes"}')])
def test_the_deadline_holds_for_retries_and_trickling_replies(serve, remote, reply):
    server = serve(lambda *_: reply)
    start = time.monotonic()
    score = remote(server.url, timeout_s=0.5).score(*CALL)
    assert time.monotonic() - start < 2.0
    assert (score.value, score.status) == (None, "timeout")
    assert "reward.timeout_s" in score.error


def test_answers_are_scored_several_at_a_time_and_never_more(serve, remote):
    server = serve(lambda call, number: time.sleep(0.05) or echo(call, number))
    scores = remote(server.url, concurrency=4).score_all([("s", "x" * n, "", {}) for n in range(20)])
    assert [score.value for score in scores] == list(range(20))
    assert server.busiest == 4


@pytest.mark.parametrize("url", ["ftp://host/x", "host:80", "http://", "http://host:x/", "file:///etc/passwd"])
def test_an_address_that_cannot_be_is_an_error(url):
    with pytest.raises(ConfigError, match=r"reward\.url=.*is no address"):
        check(load_config([f"reward.url={url}"]))


def test_two_ways_to_score_at_once_are_refused():
    with pytest.raises(ConfigError, match=r"reward\.url and custom_reward_function\.path"):
        check(load_config(["custom_reward_function.path=x.py", "reward.url=http://localhost:1/"]))


def test_too_little_memory_for_a_scorer_is_refused():
    with pytest.raises(ConfigError, match=r"reward\.memory_limit_mb=5"):
        check(load_config(["reward.memory_limit_mb=5"]))


def test_the_pool_scores_at_the_address_and_checks_it_first(local_ray, serve, pool, rows):
    server = serve(echo)
    made = pool(rows, url=server.url, url_concurrency=2, timeout_s=15.0)
    assert [score.value for score in made.score_truths("train")] == [2.0]
    scoring = made.begin_scoring("train", 4)
    scoring.add(local_ray.put(["a", "bb", "ccc", "dddd"]), np.arange(4), np.arange(4))
    columns = scoring.collect()
    assert columns["score"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert columns["scorer/acc"].tolist() == [1.0] * 4
    server.close()
    with pytest.raises(RewardError, match=r"reward\.url='http.*gives no score for data_source='mine'"):
        made.score_truths("train")
