"""A model as judge: its requests, the scores from its replies, and its failures."""

import asyncio
import contextlib
import io
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rltrain.common.errors import ConfigError, JudgeError, RewardError
from rltrain.config.check import check
from rltrain.config.load import load_config, to_yaml
from rltrain.config.schema import Config, CustomRewardConfig, RewardConfig
from rltrain.config.schema.judge import JudgeConfig
from rltrain.data.rows import read_rows
from rltrain.rewards.judge.message import Question
from rltrain.rewards.judge.reply import Unreadable, last_verdict
from rltrain.rewards.judge.server import JudgeServer
from rltrain.rewards.processes.judging import Questions
from rltrain.rewards.processes.remote_judge import RemoteJudge
from tests.clock import VirtualClock, eventually
from tests.doubles.judge import CLOSE, HANG, Cut, status

MATH = "lighteval/MATH"
YES, NO = "It is.\n\\boxed{yes}", "It is not.\n\\boxed{no}"


@pytest.fixture
def judged():
    """Make scorers with a judge without real pauses; close them after the test."""
    with contextlib.ExitStack() as closing:

        def make(url, function="", clock=None, **keys):
            judge = JudgeConfig(**{"url": url, "model": "grader", "timeout_s": 10**6, **keys})
            custom = CustomRewardConfig(path=function or None)
            config = Config(reward=RewardConfig(judge=judge), custom_reward_function=custom)
            scorer = RemoteJudge(config.scoring, clock=clock or VirtualClock())
            closing.callback(scorer.close)
            return scorer

        yield make


def call(answer, truth="42", source=MATH, **extra_info):
    return source, answer, truth, extra_info


def score(scorer, *answers, images=()):
    calls = [answer if isinstance(answer, tuple) else call(answer) for answer in answers]
    return scorer.score_all(calls, [lambda: Question("What is 6 x 7?", images)] * len(calls))


# -- what is asked, and what comes of it -------------------------------------------------------------------------------


def test_judge_alone_decides_by_default(double, judged):
    judge = double(lambda message, _: YES if "forty-two" in message else NO)
    scorer = judged(judge.url + "/")
    right, wrong = score(scorer, "forty-two", "\\boxed{42}, or so")
    assert (right.value, wrong.value) == (1.0, 0.0)
    assert right.extras == {"judge": 1.0, "judge_reply": YES}
    assert all("What is 6 x 7?" in message and "42" in message for message in judge.messages)
    assert judge.requests[0]["model"] == "grader"
    assert judge.requests[0]["temperature"] == 0
    assert set(judge.paths) == {"/v1/chat/completions"}
    counts = scorer.take_counts()
    assert (counts["calls"], counts["tokens"], counts["retries"], counts["parse_failures"]) == (2, 20, 0, 0)
    assert scorer.take_counts() == {}


def test_rule_first_judges_only_wrong_responses(double, judged):
    judge = double(lambda *_: YES)
    right, wrong = score(judged(judge.url, rule="first"), "\\boxed{42}", "forty-two")
    assert (right.value, right.extras.get("judge")) == (1.0, None)
    assert (wrong.value, wrong.extras["judge"]) == (1.0, 1.0)
    assert len(judge.requests) == 1


def test_rule_beside_keeps_the_scorers_score(double, judged):
    judge = double(lambda *_: YES)
    (wrong,) = score(judged(judge.url, rule="beside"), "\\boxed{41}")
    assert (wrong.value, wrong.extras["judge"]) == (0.0, 1.0)
    # A number that both have is the scorer's.
    found = double(lambda *_: "\\boxed{42}")
    (wrong,) = score(judged(found.url, rule="beside", parse="rule"), call("\\boxed{41}", source="math_dapo"))
    assert (wrong.extras["acc"], wrong.extras["judge"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("found", "source", "truth", "value"),
    [
        ("Result: \\boxed{42}", MATH, "42", 1.0),
        ("\\boxed{\\frac{1}{2}}", MATH, "0.5", 1.0),
        ("\\boxed{42}", "math_dapo", "42", 1.0),
    ],
)
def test_the_result_that_the_judge_finds_is_compared_by_the_scorer_in_any_form(
    double, judged, found, source, truth, value
):
    judge = double(lambda *_: found)
    (scored,) = score(judged(judge.url, rule="first", parse="rule"), call("I say forty-two.", truth, source))
    assert (scored.status, scored.value) == ("ok", value)
    assert "Reference answer" not in judge.messages[0]


def test_custom_judge_template(double, judged, tmp_path):
    (tmp_path / "ask.txt").write_text("{{ extra_info.level }}|{{ data_source }}|{{ answer.split('</think>')[-1] }}|{x}")
    judge = double(lambda *_: "yes")
    score(judged(judge.url, prompt=str(tmp_path / "ask.txt")), call("<think>7</think>42", level="hard"))
    assert judge.messages == [f"hard|{MATH}|42|{{x}}"]


def test_a_question_is_the_last_message_of_the_user_and_its_images(tmp_path):
    png = io.BytesIO()
    Image.new("RGB", (4, 4)).save(png, "PNG")
    texts = [("system", "Be brief."), ("user", "Hello."), ("assistant", "Yes?"), ("user", "<image>What is it?")]
    record = {
        "data_source": MATH, "prompt": [{"role": role, "content": text} for role, text in texts],
        "reward_model": {"style": "rule", "ground_truth": "42"},
    }  # fmt: skip
    records = [
        record | {"images": [{"bytes": png.getvalue()}]},
        record | {"prompt": record["prompt"][:2], "images": []},
    ]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "rows.parquet")
    questions = Questions(read_rows(str(tmp_path / "rows.parquet")), with_images=True)
    assert questions(0) == Question("<image>What is it?", (png.getvalue(),))
    assert questions(1) == Question("Hello.")
    assert Questions(read_rows(str(tmp_path / "rows.parquet")), with_images=False)(0).images == ()


def test_a_function_reads_the_reply_with_the_answer_at_hand(double, judged, tmp_path):
    (tmp_path / "read.py").write_text(
        "def read(data_source, solution_str, ground_truth, extra_info):\n"
        "    print('reads', solution_str)\n"
        "    return {'score': len(solution_str) / 10, 'style': float(extra_info['answer'] == 'an answer')}\n"
    )
    judge = double(lambda *_: "12345")
    scorer = judged(judge.url, parse=f"{tmp_path / 'read.py'}:read")
    (scored,) = score(scorer, "an answer")
    assert (scored.value, scored.extras["style"], scored.extras["judge"]) == (0.5, 1.0, 0.5)
    assert "reads 12345" in scorer.take_printed()


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("\\boxed{yes}", 1), ("No 3 of 7.\n**Grade: NO.**", 0), ("\\boxed{no} and then \\boxed{\\text{Yes}}", 1),
        ("It says \\boxed{1}.\nno", 0), ("Its result is \\boxed{1}, and two steps are missing.\nScore: 0.2", 0.2),
        ("0.25", 0.25), ("Score: 1", 1), ("They agree: \\boxed{0.5}.", 0.5), ("Correct", 1),
        ("<think>maybe \\boxed{no}</think>\n$$\n\\boxed{yes}\n$$", 1), ("so no.</think>\\[\\boxed{yes}\\]", 1),
    ],
)  # fmt: skip
def test_a_reply_ends_with_its_verdict(reply, value):
    assert last_verdict(reply) == value


@pytest.mark.parametrize(
    "reply",
    [
        "I see 2 mistakes in it", "\\boxed{7}", "\\boxed{maybe}", "", "yes or no", "nan",
        "The answer to be graded is \\boxed{1}. The reference is 4, so it is not right.",
        "It claims \\boxed{yes} where the reference says never.\n\nGrade: fail", "<think>At first sight \\boxed{yes}",
    ],
)  # fmt: skip
def test_only_the_end_of_a_reply_is_the_verdict(reply):
    with pytest.raises(Unreadable):
        last_verdict(reply)


# -- a judge that does not do its work ---------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", [status(500), status(503), CLOSE, "I will not say.", "", status(200, "[1]")])
def test_temporary_judge_failures_are_retried(double, judged, trouble):
    judge = double(lambda _, number: trouble if number < 3 else YES)
    scorer = judged(judge.url)
    assert score(scorer, "x")[0].value == 1.0
    counts = scorer.take_counts()
    assert (counts["calls"], counts["retries"]) == (3, 2)


def test_a_time_that_the_server_names_holds_for_all_requests(double, judged):
    judge = double(lambda _, number: status(429, Retry_After="100") if number == 1 else YES)
    clock = VirtualClock()
    scorer = judged(judge.url, max_concurrency=1, clock=clock)
    assert [scored.value for scored in score(scorer, "a", "b", "c")] == [1.0] * 3
    assert len(judge.requests) == 4
    assert max(clock.asked) == pytest.approx(100)
    assert clock.monotonic() >= 1100, "the others have waited too"


@pytest.mark.parametrize(
    ("reply", "failed", "said"),
    [
        (status(401, "wrong key"), "rejected", "HTTP 401 'wrong key'"),  # and it is made once
        (status(429, Retry_After="9" * 400), "crashed", "longer than the deadline of 600 s"),
        (status(500, "oh"), "crashed", "HTTP 500 'oh' (6 times)"),
        (CLOSE, "crashed", "RemoteProtocolError"),
        ("42 is nice", "rejected", "(after 3 replies)"),
        (Cut("It says \\boxed{1} and"), "rejected", "cut at a limit of tokens"),
        (None, "rejected", "no text"),
    ],
)
def test_an_answer_that_is_not_judged_has_no_score_and_costs_the_others_nothing(double, judged, reply, failed, said):
    judge = double(lambda message, _: reply if "mine" in message else YES)
    mine, other = score(judged(judge.url), "mine", "other")
    assert (mine.value, mine.status, mine.kind) == (None, failed, "judge")
    assert said in mine.error
    assert "mine" in mine.report()
    assert other.value == 1.0
    assert "401" not in said or len(judge.requests) == 2


def test_a_judge_that_is_silent_fails_its_answer_after_its_timeouts(double, judged):
    judge, clock = double(lambda *_: HANG), VirtualClock()
    scorer = judged(judge.url, timeout_s=5, clock=clock)
    with ThreadPoolExecutor(1) as threads:
        scored = threads.submit(score, scorer, "x")
        eventually(lambda: clock.advance(1) or scored.done(), "the end of six timeouts")
    assert scored.result()[0].status == "crashed"
    assert "no reply after 5 s (reward.judge.timeout_s) (6 times)" in scored.result()[0].error


def test_cancelling_a_batch_leaves_its_responses_unscored(double, judged):
    judge = double(lambda message, _: HANG if "slow" in message else YES)
    scorer = judged(judge.url)
    with ThreadPoolExecutor(1) as steps:
        calls, questions = [call("slow"), call("quick")], [lambda: Question("")] * 2
        scored = steps.submit(scorer.score_all, calls, questions, batch=2)
        eventually(lambda: len(judge.requests) == 2 and judge.busy == 1)
        scorer.cancel(1)  # of the step before
        assert score(scorer, "quick again")[0].value == 1.0
        assert not scored.done()
        scorer.cancel(2)
        slow, quick = scored.result()
    assert (slow.status, slow.kind) == ("timeout", "judge")
    assert quick.value == 1.0


def test_cancelled_requests_do_not_use_the_rate_limit(double):
    """Cancelled requests must not delay those of the next step."""
    judge, clock = double(lambda *_: "yes"), VirtualClock(manual=True)

    async def next_step():
        server = JudgeServer(JudgeConfig(url=judge.url, model="grader", rate_limit_per_min=60), clock=clock)
        request = server.request([{"role": "user", "content": "?"}])
        step = [asyncio.ensure_future(server.reply(request, Counter())) for _ in range(60)]
        await asyncio.wait(step, return_when=asyncio.FIRST_COMPLETED)
        for task in step:
            task.cancel()
        await asyncio.wait(step)
        clock.advance(1.0)
        reply = await server.reply(request, Counter())
        await server.close()
        return reply.text

    assert asyncio.run(next_step()) == "yes"
    assert len(judge.requests) == 2


def test_requests_keep_to_concurrency_and_rate(double, judged):
    judge = double(lambda *_: eventually(lambda: judge.busiest == 3) and YES)
    score(judged(judge.url, max_concurrency=3), *(f"answer {number}" for number in range(12)))
    assert judge.busiest == 3
    slow, clock = double(lambda *_: YES), VirtualClock()
    score(judged(slow.url, rate_limit_per_min=600, clock=clock), *"abcdef")
    assert clock.asked == pytest.approx([0.1] * 5)


def test_trial_distinguishes_refusal_from_unavailable_judge(double, judged):
    refusing, away = double(lambda *_: status(401, "wrong key")), double(lambda *_: CLOSE)
    with pytest.raises(RewardError, match=r"gives no score for data_source='lighteval/MATH'.*401"):
        judged(refusing.url).score_truth(call("42"), lambda: Question("?"))
    with pytest.raises(JudgeError, match="gives no score"):
        judged(away.url).score_truth(call("42"), lambda: Question("?"))


# -- the cache and the key ---------------------------------------------------------------------------------------------


def test_judge_cache_is_shared(double, judged, tmp_path):
    judge = double(lambda message, number: "nonsense" if "bad" in message else YES)
    cache = str(tmp_path / "folder" / "judge.sqlite")
    score(judged(judge.url, cache=cache), "x", "bad")
    asked = len(judge.requests)
    other = judged(judge.url, cache=cache)
    assert score(other, "x")[0].value == 1.0
    assert (len(judge.requests), other.take_counts()["cache_hits"]) == (asked, 1)
    score(other, "bad")  # what could not be read is asked again
    score(judged(judge.url, cache=cache, request={"temperature": 1}), "x")  # and so is another request
    assert len(judge.requests) == asked + 3 + 1


def test_the_key_goes_to_the_server_and_nowhere_else(double, judged, monkeypatch, tmp_path):
    monkeypatch.setenv("MY_JUDGE", "sk-Secret123")
    judge = double(
        lambda message, _: status(401, "wrong key sk-Secret123") if "bad" in message else "sk-Secret123\nyes"
    )
    scorer = judged(judge.url, api_key_env="MY_JUDGE", cache=str(tmp_path / "judge.sqlite"))
    good, bad = score(scorer, "good", "bad")
    assert judge.headers[0]["Authorization"] == "Bearer sk-Secret123"
    assert "Secret123" not in repr((good, bad, bad.report(), scorer.take_printed()))
    assert b"Secret123" not in (tmp_path / "judge.sqlite").read_bytes()
    loaded = load_config([f"reward.judge.url={judge.url}", "reward.judge.model=m", "reward.judge.api_key_env=MY_JUDGE"])
    text = to_yaml(loaded.config)
    assert "api_key_env: MY_JUDGE" in text  # its name is no secret, and another start needs it
    assert "Secret123" not in text
    monkeypatch.setenv("MY_JUDGE", " sk-Secret123\r\n")  # as files of secrets end
    score(judged(judge.url, api_key_env="MY_JUDGE"), "good")
    assert judge.headers[-1]["Authorization"] == "Bearer sk-Secret123"
    monkeypatch.setenv("MY_JUDGE", "sk-Sec\nret123")
    with pytest.raises(ConfigError, match="MY_JUDGE: its value has characters") as refused:
        judged(judge.url, api_key_env="MY_JUDGE")
    assert "ret123" not in str(refused.value)
    # What servers without keys are given may be a part of a verdict.
    monkeypatch.setenv("MY_JUDGE", "es")
    (plain,) = score(judged(double(lambda *_: YES).url, api_key_env="MY_JUDGE"), "good")
    assert plain.value == 1.0
    monkeypatch.delenv("MY_JUDGE")
    with pytest.raises(ConfigError, match="MY_JUDGE: this environment variable is not set"):
        judged(judge.url, api_key_env="MY_JUDGE")


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["url=host:80"], r"reward\.judge\.url='host:80' is not a URL"),
        (["model=null"], r"needs reward\.judge\.model"),
        (["rule=beside"], r"needs reward\.weights"),
        (["request.messages=1"], r"reward\.judge\.request\.messages is set by rltrain"),
        (["api_key_env=sk-Secret123"], r"not the name of an environment variable"),
        (["custom=x.py"], r"custom_reward_function\.path=x\.py is not called"),
        (["scorer=http://h:1/"], r"reward\.url and reward\.judge\.url"),
    ],
)
def test_settings_that_cannot_be_are_refused(words, said):
    full = {"num_workers": "reward.num_workers", "custom": "custom_reward_function.path", "scorer": "reward.url"}
    keys = ["url=http://host:1/v1", "model=m", *words]
    with pytest.raises(ConfigError, match=said) as refusal:
        check(load_config([f"{full.get(k, f'reward.judge.{k}')}={v}" for k, _, v in (w.partition("=") for w in keys)]))
    assert "Secret123" not in str(refusal.value)


@pytest.mark.parametrize(
    ("keys", "text", "said"),
    [
        ({}, "{{ anwser }}", r"\{\{ anwser \}\} is unknown"),
        ({}, "{{ question }}", "does not contain the response"),
        ({"parse": "(", "prompt": None}, "", "Write a regular expression"),
    ],
)
def test_templates_and_expressions_that_cannot_be_are_refused(judged, tmp_path, keys, text, said):
    (tmp_path / "ask.txt").write_text(text)
    with pytest.raises(ConfigError, match=said):
        judged("http://127.0.0.1:1/v1", **{"prompt": str(tmp_path / "ask.txt"), **keys})
