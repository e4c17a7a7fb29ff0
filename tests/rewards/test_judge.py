"""A model as judge: what it is asked, how its replies become scores, and what happens when it does not do its work."""

import contextlib
import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rltrain.base.errors import ConfigError, JudgeError, RewardError
from rltrain.config.check import check
from rltrain.config.load import load_config, to_yaml
from rltrain.config.schema import Config, CustomRewardConfig, RewardConfig
from rltrain.config.schema.judge import JudgeConfig
from rltrain.data.rows import read_rows
from rltrain.rewards.judge import server
from rltrain.rewards.judge.message import Question
from rltrain.rewards.judge.reply import Unreadable, last_verdict
from rltrain.rewards.processes.grader import Questions
from rltrain.rewards.processes.judged import JudgedScorer
from tests.doubles.judge import CLOSE, HANG, Cut, JudgeDouble, status

MATH = "lighteval/MATH"
YES, NO = "It is.\n\\boxed{yes}", "It is not.\n\\boxed{no}"


@pytest.fixture
def double():
    with contextlib.ExitStack() as closing:

        def make(reply, **options):
            made = JudgeDouble(reply, **options)
            closing.callback(made.close)
            return made

        yield make


@pytest.fixture
def judged(monkeypatch):
    """Makes scorers with a judge, which pause shortly; closes them after the test."""
    monkeypatch.setattr(server, "FIRST_PAUSE_S", 0.01)
    with contextlib.ExitStack() as closing:

        def make(url, function="", **keys):
            judge = JudgeConfig(url=url, model="grader", **keys)
            scorer = JudgedScorer(
                Config(
                    reward=RewardConfig(judge=judge), custom_reward_function=CustomRewardConfig(path=function or None)
                )
            )
            closing.callback(scorer.close)
            return scorer

        yield make


def call(answer, truth="42", source=MATH, **extra_info):
    return source, answer, truth, extra_info


def score(scorer, *answers, images=()):
    calls = [answer if isinstance(answer, tuple) else call(answer) for answer in answers]
    return scorer.score_all(calls, [lambda: Question("What is 6 x 7?", images)] * len(calls))


# -- what is asked, and what comes of it -------------------------------------------------------------------------------


def test_the_judge_alone_decides_unless_it_is_told_otherwise(double, judged):
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
    assert counts["seconds"] > 0
    assert scorer.take_counts() == {}


def test_with_rule_first_the_judge_sees_only_what_the_scorer_calls_wrong(double, judged):
    judge = double(lambda *_: YES)
    right, wrong = score(judged(judge.url, rule="first"), "\\boxed{42}", "forty-two")
    assert (right.value, right.extras.get("judge")) == (1.0, None)
    assert (wrong.value, wrong.extras["judge"]) == (1.0, 1.0)
    assert len(judge.requests) == 1


def test_with_rule_beside_the_scorers_number_stays_and_the_judges_goes_along(double, judged):
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
        ("\\boxed{none}", MATH, "42", 0.0),
        ("42", "openai/gsm8k", "42", 1.0),
        ("\\boxed{42}", "math_dapo", "42", 1.0),
        ("\\boxed{41}", "math_dapo", "42", -1.0),
    ],
)
def test_the_result_that_the_judge_finds_is_compared_by_the_scorer_in_any_form(
    double, judged, found, source, truth, value
):
    judge = double(lambda *_: found)
    (scored,) = score(judged(judge.url, rule="first", parse="rule"), call("I say forty-two.", truth, source))
    assert (scored.status, scored.value) == ("ok", value)
    assert "Reference answer" not in judge.messages[0]


def test_a_template_of_ones_own_is_filled_in_and_may_say_less(double, judged, tmp_path):
    (tmp_path / "ask.txt").write_text("{{ extra_info.level }}|{{ data_source }}|{{ answer.split('</think>')[-1] }}|{x}")
    judge = double(lambda *_: "yes")
    score(judged(judge.url, prompt=str(tmp_path / "ask.txt")), call("<think>7</think>42", level="hard"))
    assert judge.messages == [f"hard|{MATH}|42|{{x}}"]


def test_images_go_along_where_they_are_asked_for(double, judged):
    judge = double(lambda *_: YES)
    score(judged(judge.url), "42", images=(b"\x89PNG1234",))
    image, text = judge.requests[0]["messages"][0]["content"]
    assert image == {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORzEyMzQ="}}
    assert text["type"] == "text"


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
        ("\\boxed{yes}", 1), ("No 3 of 7.\n**Verdict: NO.**", 0), ("\\boxed{no} and then \\boxed{\\text{Yes}}", 1),
        ("It says \\boxed{1}.\nno", 0),
        ("0.25", 0.25), ("Score: 1", 1), ("So \\boxed{0.5}, I think.", 0.5), ("Correct", 1),
    ],
)  # fmt: skip
def test_the_last_box_or_line_is_the_verdict(reply, value):
    assert last_verdict(reply) == value


@pytest.mark.parametrize("reply", ["I see 2 mistakes in it", "\\boxed{7}", "\\boxed{maybe}", "", "yes or no", "nan"])
def test_nothing_else_of_a_reply_is_a_verdict(reply):
    with pytest.raises(Unreadable):
        last_verdict(reply)


def test_an_expression_reads_its_last_match(double, judged):
    judge = double(lambda *_: "rating: [[3]] no, rating: [[7]]")
    assert score(judged(judge.url, parse=r"\[\[(\d+)\]\]"), "x")[0].value == 7.0


# -- a judge that does not do its work ---------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", [status(500), status(503), CLOSE, "I will not say.", "", status(200, "[1]")])
def test_what_may_pass_is_asked_again(double, judged, trouble):
    judge = double(lambda _, number: trouble if number < 3 else YES)
    scorer = judged(judge.url)
    assert score(scorer, "x")[0].value == 1.0
    counts = scorer.take_counts()
    assert (counts["calls"], counts["retries"]) == (3, 2)


def test_a_time_that_the_server_names_holds_for_all_requests(double, judged):
    judge = double(lambda _, number: status(429, Retry_After="1") if number == 1 else YES)
    scorer = judged(judge.url, max_concurrency=1)
    assert [scored.value for scored in score(scorer, "a", "b", "c")] == [1.0] * 3
    first, *others = judge.starts
    assert min(others) - first >= 0.95


@pytest.mark.parametrize(
    ("reply", "failed", "said"),
    [
        (status(401, "wrong key"), "rejected", "HTTP 401 'wrong key'"),
        (status(500, "oh"), "crashed", "HTTP 500 'oh' (6 times)"),
        (CLOSE, "crashed", "RemoteProtocolError"),
        (HANG, "crashed", "reward.judge.timeout_s"),
        ("42 is nice", "rejected", "(asked 3 times)"),
        (Cut("It says \\boxed{1} and"), "rejected", "cut at a limit of tokens"),
        (None, "rejected", "no text"),
    ],
)
def test_an_answer_that_is_not_judged_has_no_score_and_costs_the_others_nothing(double, judged, reply, failed, said):
    judge = double(lambda message, _: reply if "mine" in message else YES)
    mine, other = score(judged(judge.url, timeout_s=0.3 if reply is HANG else 10), "mine", "other")
    assert (mine.value, mine.status, mine.kind) == (None, failed, "judge")
    assert said in mine.error
    assert "mine" in mine.report()
    assert other.value == 1.0


def test_a_refused_request_is_made_once(double, judged):
    judge = double(lambda *_: status(400, "no such field"))
    score(judged(judge.url), "x")
    assert len(judge.requests) == 1


def test_giving_up_leaves_what_is_under_way_unscored(double, judged):
    judge = double(lambda message, _: HANG if "slow" in message else YES)
    scorer = judged(judge.url)
    threading.Timer(0.5, scorer.give_up).start()
    started = time.monotonic()
    slow, quick = score(scorer, "slow", "quick")
    assert time.monotonic() - started < 5
    assert (slow.status, slow.kind, quick.value) == ("timeout", "judge", 1.0)
    assert score(scorer, "quick again")[0].value == 1.0


def test_giving_up_a_batch_leaves_the_next_one_be(double, judged):
    may_answer = threading.Event()
    judge = double(lambda *_: YES if may_answer.wait(20) else HANG)
    scorer = judged(judge.url)
    with ThreadPoolExecutor(1) as steps:
        scored = steps.submit(scorer.score_all, [call("x")], [lambda: Question("")], batch=2)
        while not judge.busy:
            time.sleep(0.01)
        scorer.give_up(1)  # on its way since the step before
        may_answer.set()
        assert scored.result()[0].value == 1.0


def test_an_answer_whose_scorer_fails_is_not_judged(double, judged, tmp_path):
    (tmp_path / "mine.py").write_text("def compute_score(*, solution_str, **_):\n    return 1 / len(solution_str)\n")
    judge = double(lambda *_: YES)
    failed, right = score(judged(judge.url, function=str(tmp_path / "mine.py"), rule="first"), "", "x")
    assert (failed.status, failed.kind, right.value) == ("crashed", "ZeroDivisionError", 1.0)
    assert judge.requests == []


def test_requests_keep_to_concurrency_and_rate(double, judged):
    judge = double(lambda *_: time.sleep(0.05) or YES)
    score(judged(judge.url, max_concurrency=3), *(f"answer {number}" for number in range(12)))
    assert judge.busiest == 3
    slow = double(lambda *_: YES)
    score(judged(slow.url, rate_limit_per_min=600), *"abcdef")
    assert slow.starts[-1] - slow.starts[0] >= 0.45


def test_a_trial_tells_a_judge_that_refuses_from_one_that_is_away(double, judged):
    refusing, away = double(lambda *_: status(401, "wrong key")), double(lambda *_: CLOSE)
    with pytest.raises(RewardError, match=r"gives no score for data_source='lighteval/MATH'.*401"):
        judged(refusing.url).score_truth(call("42"), lambda: Question("?"))
    with pytest.raises(JudgeError, match="gives no score"):
        judged(away.url).score_truth(call("42"), lambda: Question("?"))


# -- the cache and the key ---------------------------------------------------------------------------------------------


def test_what_was_judged_is_not_asked_again_by_whoever_shares_the_cache(double, judged, tmp_path):
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


def test_threads_may_share_a_cache_while_it_is_written(double, judged, tmp_path):
    judge = double(lambda *_: YES)
    scorers = [judged(judge.url, cache=str(tmp_path / "judge.sqlite")) for _ in range(3)]
    results = []
    threads = [
        threading.Thread(target=lambda scorer=scorer: results.extend(score(scorer, *map(str, range(6)))))
        for scorer in scorers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [scored.value for scored in results] == [1.0] * 18


def test_a_file_that_is_no_cache_is_refused_and_left_alone(judged, tmp_path):
    (tmp_path / "notes.txt").write_text("mine " * 1000)
    with pytest.raises(ConfigError, match=r"reward\.judge\.cache=.*notes\.txt"):
        judged("http://127.0.0.1:1/v1", cache=str(tmp_path / "notes.txt"))
    assert (tmp_path / "notes.txt").read_text() == "mine " * 1000


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
        (["url=host:80"], r"reward\.judge\.url='host:80' is no address"),
        (["model=null"], r"needs reward\.judge\.model"),
        (["rule=beside"], r"needs reward\.weights"),
        (["rule=first", "judge_weight=0.5"], r"reward\.weights\.judge weighs a number that answers have not"),
        (["request.messages=1"], r"reward\.judge\.request\.messages is decided by rltrain"),
        (["max_concurrency=2", "num_workers=3"], r"cannot share reward\.judge\.max_concurrency=2"),
        (["api_key_env=sk-Secret123"], r"no name of an environment variable"),
        (["custom=x.py"], r"custom_reward_function\.path=x\.py is called by nobody"),
        (["scorer=http://h:1/"], r"reward\.url and reward\.judge\.url"),
    ],
)
def test_settings_that_cannot_be_are_refused(words, said):
    full = {"num_workers": "reward.num_workers", "custom": "custom_reward_function.path", "scorer": "reward.url"}
    full["judge_weight"] = "reward.weights.judge"
    keys = ["url=http://host:1/v1", "model=m", *words]
    with pytest.raises(ConfigError, match=said) as refusal:
        check(load_config([f"{full.get(k, f'reward.judge.{k}')}={v}" for k, _, v in (w.partition("=") for w in keys)]))
    assert "Secret123" not in str(refusal.value)


@pytest.mark.parametrize(
    ("keys", "text", "said"),
    [
        ({}, "{{ anwser }}", r"knows no \{\{ anwser \}\}"),
        ({}, "{{ question }}", "shows the judge no answer"),
        ({}, "{{ answer", "read as a Jinja template"),
        ({"prompt": "/nowhere.txt"}, "", "cannot be read"),
        ({"parse": "(", "prompt": None}, "", "Write a regular expression"),
    ],
)
def test_templates_and_expressions_that_cannot_be_are_refused(judged, tmp_path, keys, text, said):
    (tmp_path / "ask.txt").write_text(text)
    with pytest.raises(ConfigError, match=said):
        judged("http://127.0.0.1:1/v1", **{"prompt": str(tmp_path / "ask.txt"), **keys})
