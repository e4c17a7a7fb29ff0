"""A scorer behind HTTP (reward.url)."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rltrain.common.errors import ConfigError, RewardError
from rltrain.config.check import check
from rltrain.config.load import load_config
from rltrain.rewards.processes.remote_scorer import RemoteScorer
from tests.clock import VirtualClock, eventually
from tests.doubles.judge import Double, status


@pytest.fixture
def serve():
    servers = []

    def make(reply, keep=False):
        servers.append(Double(reply, keep))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def remote():
    """Make scorers without real pauses. manual: the deadline does not pass by itself."""
    scorers = []

    def make(url, timeout_s=2.0, concurrency=4, headers=None, manual=False):
        clock = VirtualClock(manual=manual)
        scorers.append(RemoteScorer(url, timeout_s, concurrency, headers, clock))
        scorers[-1].clock = clock
        return scorers[-1]

    yield make
    for scorer in scorers:
        scorer.close()


def echo(call, number):
    return 200, json.dumps({"score": len(call["solution_str"]), "acc": 1.0, "pred": call["ground_truth"]})


CALL = ("any/source", "an answer", "42", {"index": 7})


def test_the_four_arguments_travel_and_a_score_comes_back(serve, remote):
    server = serve(echo)
    score = remote(server.url, manual=True).score(*CALL)
    assert (score.value, score.status, score.extras) == (9.0, "ok", {"acc": 1.0, "pred": "42"})
    names = ("data_source", "solution_str", "ground_truth", "extra_info")
    assert server.requests == [dict(zip(names, CALL, strict=True))]


def test_headers_go_along_and_the_connection_is_kept_while_a_busy_server_is_asked_again(serve, remote):
    server = serve(lambda call, number: (503, "later") if number in (2, 3) else echo(call, number), keep=True)
    scorer = remote(server.url, headers={"Authorization": "Bearer abc", "X-Number": 1})
    assert [scorer.score(*CALL).value for _ in range(3)] == [9.0] * 3
    assert scorer.clock.asked == [0.05, 0.1]
    assert server.num_connections == 1
    wanted = {"Authorization": "Bearer abc", "X-Number": "1", "Content-Type": "application/json"}
    assert len(server.headers) == 5
    assert all(wanted.items() <= headers.items() for headers in server.headers)


@pytest.mark.parametrize(("after", "waited_s", "value"), [("30", 30, None), ("1", 1, 9.0), ("\u00b2", 0.05, 9.0)])
def test_a_server_that_names_a_time_is_asked_then(serve, remote, after, waited_s, value):
    server = serve(lambda call, number: status(429, Retry_After=after) if number == 1 else echo(call, number))
    scorer = remote(server.url)
    score = scorer.score(*CALL)
    assert scorer.clock.asked == [waited_s]
    assert len(server.requests) == (1 if value is None else 2)
    assert (score.status, score.value) == ("timeout" if value is None else "ok", value)


@pytest.mark.parametrize(
    ("reply", "status", "said"),
    [
        ((404, "no such page"), "crashed", "no such page"),
        ((302, ""), "crashed", "HTTP 302"),
        ((200, "not json"), "rejected", "not json"),
        ((200, "[1]"), "rejected", "without 'score'"),
        ((200, '{"score": NaN}'), "rejected", "finite"),
        ((200, '{"score": "1"}'), "rejected", "must be one number"),
        ((200, "[" * 100_000), "rejected", "it sent"),
        ((200, " " * (2 << 20)), "crashed", "mebibyte"),
    ],
)
def test_invalid_scores_are_not_retried(serve, remote, reply, status, said):
    server = serve(lambda *_: reply)
    score = remote(server.url, manual=True).score(*CALL)
    assert (score.value, score.status) == (None, status)
    assert said in score.error
    assert len(server.requests) == 1


def test_the_deadline_holds_for_retries_and_trickling_replies(serve, remote):
    """A socket's own timeout would restart with each byte of a reply."""
    broken = serve(lambda *_: (500, "broken"))
    score = remote(broken.url).score(*CALL)
    assert (score.value, score.status) == (None, "timeout")
    assert "2 s (reward.timeout_s): HTTP 500" in score.error
    over, sent = threading.Event(), []
    trickle = (sent.append(1) or b" " for _ in iter(lambda: over.wait(0.01), True))
    scorer = remote(serve(lambda *_: (200, trickle)).url, manual=True)
    with ThreadPoolExecutor(1) as threads:
        scoring = threads.submit(scorer.score, *CALL)
        eventually(lambda: len(sent) > 9, "a part of the reply")
        assert not scoring.done()
        scorer.clock.advance(2.0)
        assert scoring.result().status == "timeout"
        over.set()


def test_answers_are_scored_several_at_a_time_and_never_more(serve, remote):
    server = serve(lambda call, number: eventually(lambda: server.busiest == 4) and echo(call, number))
    scores = remote(server.url, concurrency=4, manual=True).score_all([("s", "x" * n, "", {}) for n in range(20)])
    assert [score.value for score in scores] == list(range(20))
    assert server.busiest == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["reward.url=ftp://host/x"], r"reward\.url=.*is not a URL"),
        (["reward.url=host:80"], r"reward\.url=.*is not a URL"),
        (["reward.url=http://host:x/"], r"reward\.url=.*is not a URL"),
        (["custom_reward_function.path=x.py", "reward.url=http://localhost:1/"], "reward.url and custom_reward_func"),
        (["reward.memory_limit_mb=5"], "reward.memory_limit_mb=5"),
    ],
)
def test_settings_that_cannot_be_are_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        check(load_config(words))


def test_the_pool_scores_at_the_address_and_checks_it_first(local_ray, serve, pool, rows):
    server = serve(echo)
    made = pool(rows, url=server.url, url_concurrency=2, timeout_s=6.0)
    assert [score.value for score in made.score_truths("train")] == [2.0]
    scoring = made.begin_scoring("train", 4)
    scoring.add(local_ray.put(["a", "bb", "ccc", "dddd"]), np.arange(4), np.arange(4))
    columns = scoring.collect()
    assert columns["score"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert columns["scorer/acc"].tolist() == [1.0] * 4
    server.close()
    with pytest.raises(RewardError, match=r"reward\.url='http.*gives no score for data_source='mine'"):
        made.score_truths("train")
