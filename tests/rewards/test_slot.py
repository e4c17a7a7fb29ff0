"""The contract of the process that calls user code, tested with reward functions: valid scores, and what a function may
do to its process."""

import os
import signal
import subprocess
import sys

import pytest

from rltrain.common.errors import RewardError
from rltrain.rewards.custom import CustomReward
from rltrain.rewards.processes.score import Score
from rltrain.rewards.processes.slot import ScoringSlot
from tests.clock import PATIENCE_S, eventually
from tests.faults.plug import ended

CALL = ("any/source", "an answer", "42", {"index": 7})
GOOD = ("any/source", "good", "42", {})


# -- values ------------------------------------------------------------------------------------------------------------


def test_a_score_comes_back_with_its_extras(slot):
    odd = r"""'bad': [1], 'none': None, 'nan': float('nan'), 'long': 'x' * 10000, 5: 2, None: 3, 'half\ud83d': '\ud83d',
        'pair': '\ud83d\ude00', b'k': b'\xff', 'zero\0': '\0', 'big': 10 ** 400, 'y' * 10**6: 1,
        type('Odd', (), {'__str__': lambda self: 1 / 0})(): 4"""
    score = slot(f"return {{'score': len(solution_str), 'acc': True, 'i': extra_info['index'], {odd}}}").score(*CALL)
    assert (score.value, score.status, score.error) == (9.0, "ok", None)
    assert len(score.extras.pop("long")) <= 256
    assert score.extras == {
        "acc": 1.0, "i": 7.0, "5": 2.0, "None": 3.0, "half\ufffd": "\ufffd", "pair": "\U0001f600", "b'k'": "\ufffd",
        "zero\ufffd": "\ufffd", "y" * 256: 1.0,
    }  # fmt: skip


@pytest.mark.fault("A score that is no finite number never reaches the maths")
def test_one_finite_number_is_a_score_and_anything_else_is_rejected(slot):
    made = slot("return eval(solution_str)")
    scores = {
        "1": 1.0, "True": 1.0, "-0.5": -0.5, "{'score': 2}": 2.0, "__import__('numpy').float32(0.5)": 0.5,
        "__import__('numpy').bool_(True)": 1.0,
    }  # fmt: skip
    for returned, value in scores.items():
        assert made.score("s", returned, "", {}).value == value
    for returned in (
        "None", "float('nan')", "float('inf')", "'1'", "[1.0]", "(1.0, {})", "{}", "{'score': None}",
        "{'score': float('nan')}", "__import__('numpy').ones(1)", "10 ** 400", "1e308", "{'score': -1e308}",
        "type('Odd', (), {'ndim': 0, 'item': lambda self: 1 / 0})()",
        "type('Odd', (), {'__repr__': lambda self: 1 / 0})()",
    ):  # fmt: skip
        score = made.score("s", returned, "", {})
        assert (score.value, score.status) == (None, "rejected"), returned
        assert score.error


def test_reward_kwargs_and_rows_reach_the_function_and_kwargs_win_as_in_verl(custom):
    code = "def f(data_source, ground_truth, scale, **_): return scale * len(data_source + ground_truth)"
    with ScoringSlot(custom(code, name="f", scale=3, ground_truth="7")) as made:
        assert made.score(*CALL).value == 33.0


def test_long_answers_pass_and_a_long_error_is_cut(slot):
    made = slot("if ground_truth: raise ValueError(solution_str)\nreturn len(solution_str)")
    assert made.score("s", "é" * 3_000_000, "", {}).value == 3_000_000
    assert len(made.score("s", "x" * 3_000_000, "t", {}).error) <= 4000
    assert made.score("s", "\ud83d", "t", {}).error.encode(), "files take it"


def test_a_check_tries_the_usual_forms_where_the_truth_fails(slot):
    picky = slot("return len(solution_str.split('#### ')[1])")
    assert picky.score_truth(("s", "42", "42", {})).value == 2.0
    assert slot("return None").score_truth(("s", "42", "42", {})).status == "rejected"


def test_a_built_in_scorer_judges_the_last_turn_where_there_are_several():
    """A tool may have returned text that looks like an answer."""
    whole = "I search. <answer>Rome</answer> is in a passage of the tool. I do not know."
    with ScoringSlot() as open_slot:
        assert open_slot.score("searchR1_nq", whole, ["Rome"], {}).value == 1.0
        assert open_slot.score("searchR1_nq", whole, ["Rome"], {"last_turn": "I do not know."}).value == 0.0
        assert open_slot.score("searchR1_nq", whole, ["Oslo"], {"last_turn": "<answer>Oslo</answer>"}).value == 1.0


# -- what the function may do ------------------------------------------------------------------------------------------


def test_scorer_exceptions_keep_the_process_and_show_user_lines(slot):
    made = slot("def f(): return f()\nif solution_str == 'good': return 1\nexec(solution_str)")
    pid = made.pid
    for body in ("raise KeyError('x')", "import sys; sys.exit(0)", "raise KeyboardInterrupt", "f()"):
        score = made.score("a/source", body + "\n" * 1000, {"target": ["1"]}, {})
        assert score.status == "crashed"
        for part in ("data_source='a/source'", "{'target': ['1']}", "my_reward.py", score.kind):
            assert part in score.report()
        assert "/rltrain/rewards/" not in score.error
        assert made.score(*GOOD).value == 1.0
    assert made.pid == pid


@pytest.mark.smoke("A reward function that hangs costs only its response")
@pytest.mark.fault("A scorer that hangs is killed at its deadline")
@pytest.mark.parametrize(
    "body",
    [
        "import signal; signal.pause()",
        "import re; re.match('(a+)+$', 'a' * 60 + 'b')",  # holds the interpreter lock: no thread could stop it
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32)); signal.pause()",
        "import subprocess; subprocess.run(['sleep', 'inf'])",
        "import os\nwhile True: os.write(1, b'x' * 65536)",
    ],
)
def test_a_hanging_answer_is_killed_at_its_deadline(slot, body):
    made = slot(f"print('first words')\n{body}", timeout_s=0.5)
    made.prepare("s")
    pid = made.pid
    score = made.score(*CALL)
    assert (score.value, score.status) == (None, "timeout")
    assert "0.5 s (reward.timeout_s)" in score.error
    ended([pid])
    printed = made.take_printed()
    assert printed.startswith("first words\n")
    assert len(printed) < 300_000
    assert ("more bytes were printed here and are omitted" in printed) == ("write" in body)
    assert made.pid != pid


@pytest.mark.fault("A scorer that dies is reported and replaced")
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import os; os._exit(3)", "exit code 3"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("import os; os.kill(os.getpid(), 40)", "killed by signal 40"),
    ],
)
def test_a_dying_process_is_reported_and_replaced(slot, body, said):
    made = slot(f"if solution_str == 'good': return 1\nprint('last words')\n{body}")
    score = made.score(*CALL)
    assert (score.value, score.status) == (None, "crashed")
    assert said in score.error
    assert "my_reward.py" in score.error or said != "SIGSEGV"
    assert set(made.take_printed().splitlines()) == {"last words"}
    assert made.score(*GOOD).value == 1.0


@pytest.mark.fault("A scorer that somebody kills while it scores costs no answer")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_answer_whose_process_is_killed_is_scored_again(slot, tmp_path, number):
    made = slot(f"""
        import os
        if os.path.exists({str(tmp_path / "once")!r}): return 1
        open({str(tmp_path / "once")!r}, "w").close()
        os.kill(os.getpid(), {int(number)})
        os.read(os.pipe()[0], 1)
    """)
    pid = made.pid
    assert made.score(*CALL).value == 1.0
    assert made.pid != pid


@pytest.mark.fault("A scorer that is killed between two answers costs none")
def test_a_scorer_that_died_between_two_answers_costs_none(slot):
    made = slot("return 1")
    assert made.score(*CALL).value == 1.0
    os.kill(made.pid, signal.SIGKILL)
    ended([made.pid])
    assert made.score(*CALL) == Score(1.0, "ok")
    assert "SIGKILL\nbetween two answers" in made.take_printed()


@pytest.mark.fault("A scorer that prints without end blocks nothing")
def test_a_flood_of_output_does_not_block(slot):
    made = slot("""
        import os, subprocess, sys
        print('x' * 1_000_000); sys.stderr.write('y' * 1_000_000); os.write(1, b'z' * 1_000_000)
        os.system('yes | head -c 1000000')
        subprocess.Popen(['yes'])
        return 1
    """)
    assert [made.score(*CALL).value for _ in range(2)] == [1.0, 1.0]


@pytest.mark.fault("A scorer that writes into its connection fails alone")
def test_writing_into_the_connection_ends_that_answer_only(slot):
    made = slot("""
        import os
        if solution_str == 'good': return 1
        for descriptor in range(3, 1024):
            try: os.write(descriptor, b'x' * 64)
            except OSError: pass
    """)
    assert made.score(*CALL).status == "crashed"
    assert made.score(*GOOD).value == 1.0


def test_the_process_imports_neither_torch_nor_ray_nor_numpy(slot):
    assert slot("import sys; return len({'torch', 'ray', 'numpy'} & set(sys.modules))").score(*CALL).value == 0.0


def test_the_import_does_not_count_against_the_deadline_of_the_first_answer(custom, tmp_path):
    code = f"open({str(tmp_path / 'imported')!r}, 'w').close()\ndef compute_score(**kwargs): return 1\n"
    with ScoringSlot(custom(code), timeout_s=1e-9) as made:
        assert made.score(*CALL).status == "timeout"  # if the import counted, it would be RewardError
    assert (tmp_path / "imported").exists()


def test_close_leaves_no_process_not_even_a_grandchild(slot):
    made = slot("import subprocess; return subprocess.Popen(['sleep', 'inf']).pid")
    grandchild, pid = int(made.score(*CALL).value), made.pid
    made.close()
    made.close()
    ended([pid, grandchild])
    with pytest.raises(RuntimeError, match="closed"):
        made.score(*CALL)


@pytest.mark.fault("A killed reward worker takes its scorers along")
def test_killing_the_owner_ends_a_hanging_slot(custom, tmp_path):
    daemon = tmp_path / "pid"
    reward = custom(f"""
        import subprocess
        def compute_score(**kwargs):
            process = subprocess.Popen(["sleep", "inf"], start_new_session=True)
            with open({str(daemon)!r}, "w") as file: file.write(f"{{process.pid}}\\n")
            while True: pass
    """)
    code = f"""
from rltrain.rewards.processes.slot import ScoringSlot
from rltrain.rewards.custom import CustomReward
slot = ScoringSlot(CustomReward({reward.path!r}), timeout_s={PATIENCE_S})
slot.prepare("s")
print(slot.pid, flush=True)
slot.score("s", "a", "b", {{}})
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(owner.stdout.readline())
    eventually(lambda: daemon.exists() and daemon.read_text().endswith("\n"), "the scorer's daemon")
    owner.kill()
    owner.communicate()
    ended([pid, int(daemon.read_text())])


# -- files that are no reward functions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
        ("def compute_score(:", "SyntaxError"),
        ("def other(): pass\nfrom os.path import join", "it defines other"),
        ("def compute_score(solution, truth): return 1", "cannot be called with data_source, solution_str"),
        ("import os; os._exit(4)", "exit code 4"),
        ("raise SystemExit", "SystemExit"),
        (
            "def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address): return 1",
            "needs reward_router_address, which verl passes",
        ),
    ],
)
def test_an_unusable_reward_file_is_an_error_with_its_reason(custom, code, said):
    with ScoringSlot(custom(code)) as made, pytest.raises(RewardError) as caught:
        made.score(*CALL)
    assert said in str(caught.value)


def test_a_missing_file_or_unknown_source_says_what_to_type():
    with (
        ScoringSlot(CustomReward("no/such.py")) as made,
        pytest.raises(RewardError, match=r"custom_reward_function=no/such\.py:compute_score: .*is not a Python file"),
    ):
        made.score(*CALL)
    with ScoringSlot() as made, pytest.raises(RewardError) as caught:
        made.score(*CALL)
    for part in ("data_source='any/source'", "openai/gsm8k", "reasoning_gym/*", "custom_reward_function.path"):
        assert part in str(caught.value)


def test_a_module_is_named_as_in_verl(tmp_path, monkeypatch):
    (tmp_path / "house").mkdir()
    (tmp_path / "house" / "rules.py").write_text(
        "def longer(data_source, solution_str, ground_truth, extra_info): return extra_info['num_turns']"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for path in ("pkg://house.rules", "pkg://house/rules", "house.rules", f"file://{tmp_path}/house/rules.py"):
        with ScoringSlot(CustomReward(path, "longer")) as made:
            assert made.score(*CALL).value == 2.0


def test_a_reward_file_sees_its_neighbours_and_hides_no_package(custom, tmp_path):
    (tmp_path / "my_rules.py").write_text("def rate(text): return len(text)")
    (tmp_path / "numpy.py").write_text("raise RuntimeError('the wrong numpy')")
    code = """
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            import numpy
            from my_rules import rate
            return numpy.float32(rate(solution_str))
    """
    with ScoringSlot(custom(code)) as made:
        assert made.score(*CALL).value == 9.0


# -- async functions ---------------------------------------------------------------------------------------------------


ASYNC = """
    import asyncio, threading
    here, loops = [], set()
    async def compute_score(data_source, solution_str, ground_truth, extra_info):
        loops.add(asyncio.get_running_loop())
        here.append(solution_str)
        while len(here) < 16: await asyncio.sleep(0)
        if solution_str == "hang": await asyncio.Event().wait()
        if solution_str == "block": threading.Event().wait(0.1)
        return {"score": 1 / (int(ground_truth) - 3), "loops": len(loops)}
"""


def test_answers_of_an_async_function_are_under_way_at_once_and_fail_alone(custom):
    """Sixteen calls wait for each other, so they must run at the same time. The function's event loop lives as long as
    the process."""
    with ScoringSlot(custom(ASYNC), timeout_s=PATIENCE_S) as made:
        scores = made.score_all([("any", "", str(number), {}) for number in range(16)])
        assert [score.status for score in scores] == ["ok"] * 3 + ["crashed"] + ["ok"] * 12
        assert (scores[5].value, scores[5].extras) == (0.5, {"loops": 1.0})
        assert "ZeroDivisionError" in scores[3].error
        assert "my_reward.py" in scores[3].error
        assert made.score("any", "", "4", {}).extras == {"loops": 1.0}


def test_async_answers_that_hang_are_cancelled_and_those_that_block_take_no_time_of_others(custom):
    with ScoringSlot(custom(ASYNC), timeout_s=1.0) as made:
        made.prepare("any")
        pid = made.pid
        scores = made.score_all([("any", "block", "4", {})] * 16)
        assert [score.status for score in scores] == ["ok"] * 16, "together they take 1.6 s"
        scores = made.score_all([("any", "hang", "4", {})] * 2)
        assert [score.status for score in scores] == ["timeout"] * 2
        assert "1 s (reward.timeout_s)" in scores[0].error
        assert made.pid == pid


@pytest.mark.parametrize("body", ["import os; os._exit(3)", "raise SystemExit", "raise MemoryError"])
def test_an_async_answer_that_ends_the_process_fails_alone(custom, body):
    code = "async def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    code += f"    if solution_str == '1':\n        {body}\n    return 1"
    with ScoringSlot(custom(code)) as made:
        statuses = [score.status for score in made.score_all([("any", text, "0", {}) for text in "012"])]
        assert statuses == ["ok", "crashed", "ok"]
