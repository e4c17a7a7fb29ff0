"""A judge on the run's devices, from the view of the scoring processes: the same messages, parsing and failures as with
a server."""

import contextlib
from collections import Counter

import numpy as np
import pytest

from rltrain.common.columns import names as c
from rltrain.common.errors import RewardError
from rltrain.config.schema import RewardConfig, ScoringConfig
from rltrain.config.schema.judge import JudgeConfig
from rltrain.config.schema.model import JudgeRolloutConfig, RewardModelConfig, RewardModelModelConfig
from rltrain.rewards.judge.message import Question
from rltrain.rewards.judge.reply import Reply
from rltrain.rewards.processes.device_judge import DeviceJudge
from rltrain.rewards.processes.remote_judge import RemoteJudge
from rltrain.runtime.samples import StoredRows
from tests.doubles.judge import Cut

MATH = "lighteval/MATH"
YES, NO = "It is.\n\\boxed{yes}", "It is not.\n\\boxed{no}"


def here(temperature=0.0):
    """Return the keys of a judge on the devices."""
    model = RewardModelModelConfig(path="judge", type="generative")
    return RewardModelConfig(enable=True, model=model, rollout=JudgeRolloutConfig(temperature=temperature))


@pytest.fixture
def asking():
    with contextlib.ExitStack() as closing:

        def make(temperature=0.0, **keys):
            judge = JudgeConfig(**keys)
            scorer = DeviceJudge(ScoringConfig(reward=RewardConfig(judge=judge), reward_model=here(temperature)))
            closing.callback(scorer.close)
            return scorer

        yield make


def asked_and_read(scorer, calls, replies):
    scores, messages = scorer.request(calls, [lambda: Question("What is 6 x 7?")] * len(calls))
    places = [place for place, score in enumerate(scores) if hasattr(score, "message")]
    told = [replies(messages[scores[place].message]) for place in places]
    read = scorer.read([calls[place] for place in places], [scores[place] for place in places], told, again=False)
    return [read[places.index(place)] if place in places else score for place, score in enumerate(scores)], messages


@pytest.mark.parametrize(
    ("reply", "keys"),
    [
        (YES, {}),
        (NO, {"rule": "first"}),
        (Cut("The answer says \\boxed{yes} and"), {}),
        (Cut("yes"), {}),
        (Cut("Score: 0.5 of"), {"parse": r"Score: ([\d.]+)"}),
        ("What a nice day.", {}),
        ("", {}),
        ("The result is \\boxed{42}", {"parse": "rule", "rule": "first"}),
        (Cut("The result is \\boxed{42} or"), {"parse": "rule", "rule": "first"}),
    ],
)  # fmt: skip
def test_a_reply_whole_or_cut_says_the_same_in_both_kinds(asking, double, reply, keys, monkeypatch):
    call = (MATH, "forty-two", "42", {})
    # Its key is the server's alone: a judge on the devices asks for none.
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    judge = double(lambda *_: reply)
    served = RemoteJudge(ScoringConfig(reward=RewardConfig(judge=JudgeConfig(url=judge.url, model="grader", **keys))))
    try:
        (of_server,) = served.score_all([call], [lambda: Question("What is 6 x 7?")])
        told = Reply(str(reply), "no text", isinstance(reply, Cut))
        (on_devices,), (message,) = asked_and_read(
            asking(api_key_env="NO_SUCH_KEY", **keys), [call], lambda message: told
        )
        assert message == judge.messages[0]
    finally:
        served.close()
    assert (on_devices.value, on_devices.status) == (of_server.value, of_server.status)
    assert on_devices.extras == of_server.extras
    assert (on_devices.kind, on_devices.call) == (of_server.kind, of_server.call)
    if isinstance(reply, Cut) and of_server.status != "ok":
        assert "reward_model.rollout.response_length" in on_devices.error
        assert "reward.judge.request.max_tokens" in of_server.error


# -- in the pool -------------------------------------------------------------------------------------------------------


def begun(pool, ray, *lists):
    scoring = pool.begin_scoring("train", sum(map(len, lists)))
    for texts in lists:
        scoring.add(ray.put(texts), np.arange(len(texts)), np.arange(len(texts)))
    return scoring


def attach(ray, messages, reply):
    """Add replies of a judge, with one object per message. Returns the messages."""
    texts = []
    for part in messages.parts_with(c.JUDGE_MESSAGE):
        found = ray.get(part.ref)
        for number, row in zip(part.ids.tolist(), part.rows.tolist(), strict=True):
            texts.append(found[row])
            said = StoredRows(ray.put([reply(found[row])]), (c.JUDGE_REPLY,), np.array([number]), np.zeros(1, int))
            messages.attach([said])
    return texts


def test_judge_replies_match_their_responses(local_ray, pool, rows):
    made = pool(rows, judge=JudgeConfig(), reward_model=here())
    assert [score.extras for score in made.score_truths("train")] == [{"judge": 0.0}]
    scoring = begun(made, local_ray, ["good 0", "bad 1", "good 2"], ["bad 3", "long 4", "good 5"])
    messages = scoring.messages(np.array([True, True, False, True, True, True]))
    assert len(messages) == 5

    def reply(text):
        return Reply("", no_prompt="it is too long") if "long" in text else Reply(YES if "good" in text else NO)

    texts = attach(local_ray, messages, reply)
    assert messages[c.MESSAGE_LENGTH].tolist() == [len(text) for text in texts]
    scoring.add_replies(messages, Counter(calls=5, tokens=50), again=False)
    columns = scoring.collect()
    assert columns["score"].tolist() == [1, 0, 0, 0, -2, 1]  # reward.on_error; the third is read by nobody
    assert columns["reward_failed"].tolist() == [0, 0, 0, 0, 1, 0]
    assert columns["reward_timeout"].sum() == 0
    assert columns["reward_error"][4] == "it is too long"
    assert columns["scorer/judge"][:2].tolist() == [1.0, 0.0]
    assert (scoring.judged["calls"], scoring.judged["tokens"]) == (5, 50)


def test_only_unreadable_judge_replies_are_requested_again(local_ray, pool, rows):
    made = pool(rows, judge=JudgeConfig(max_tokens_total=100), reward_model=here(1.0))
    scoring = begun(made, local_ray, ["good", "odd", "good"])
    everybody = np.ones(3, dtype=bool)
    attach(local_ray, messages := scoring.messages(everybody), lambda text: Reply("Hm." if "odd" in text else YES))
    scoring.add_replies(messages, Counter(tokens=60), again=True)
    (text,) = attach(local_ray, messages := scoring.messages(everybody), lambda text: Reply(NO))
    assert "odd" in text
    with pytest.raises(RewardError, match=r"used 110 tokens .*max_tokens_total=100 is the limit"):
        scoring.add_replies(messages, Counter(tokens=50), again=True)
    assert scoring.collect()["score"].tolist() == [1, 0, 1]
    assert scoring.judged["parse_failures"] == 1
    assert len(scoring.messages(everybody)) == 0
