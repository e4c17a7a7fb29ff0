import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rltrain.base.errors import RewardError
from rltrain.rewards.custom import CustomReward
from rltrain.rewards.processes.slot import ScoringSlot

CALL = ("any/source", "an answer", "42", {"index": 7})


def test_a_score_comes_back_with_its_extras(slot):
    score = slot(
        "return {'score': len(solution_str), 'acc': True, 'pred': ground_truth, 'i': extra_info['index']}"
    ).score(*CALL)
    assert (score.value, score.status, score.error) == (9.0, "ok", None)
    assert score.extras == {"acc": 1.0, "pred": "42", "i": 7.0}


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        ("1", 1.0),
        ("True", 1.0),
        ("-0.5", -0.5),
        ("{'score': 2}", 2.0),
        ("__import__('numpy').float32(0.5)", 0.5),
        ("__import__('numpy').bool_(True)", 1.0),
    ],
)
def test_one_finite_number_is_a_score(slot, returned, value):
    assert slot(f"return {returned}", timeout_s=60).score(*CALL).value == value


@pytest.mark.parametrize(
    "returned",
    [
        "None",
        "float('nan')",
        "float('inf')",
        "'1'",
        "[1.0]",
        "(1.0, {})",
        "{}",
        "{'score': None}",
        "{'score': float('nan')}",
        "__import__('numpy').ones(1)",
        "10 ** 400",
        "1e308",
        "{'score': -1e308}",
        "type('Odd', (), {'ndim': 0, 'item': lambda self: 1 / 0})()",
        "type('Odd', (), {'__repr__': lambda self: 1 / 0})()",
    ],
)
def test_anything_else_is_rejected_with_the_reason(slot, returned):
    score = slot(f"return {returned}").score(*CALL)
    assert (score.value, score.status) == (None, "rejected")
    assert score.error


def test_extras_that_are_no_numbers_do_not_spoil_the_score(slot):
    score = slot("return {'score': 1, 'bad': [1], 'none': None, 'nan': float('nan'), 'long': 'x' * 10000}").score(*CALL)
    assert score.value == 1.0
    assert list(score.extras) == ["long"]
    assert len(score.extras["long"]) <= 256


def test_odd_names_and_values_cost_no_score(slot):
    odd = r"""{'score': 1, 5: 2, None: 3, 'half\ud83d': '\ud83d', 'pair': '\ud83d\ude00', b'k': b'\xff', 'zero\0': '\0',
        'big': 10 ** 400, 'y' * 10**6: 1, type('Odd', (), {'__str__': lambda self: 1 / 0})(): 4}"""
    score = slot(f"return {odd}").score(*CALL)
    assert (score.value, score.status) == (1.0, "ok")
    assert score.extras == {
        "5": 2.0, "None": 3.0, "half\ufffd": "\ufffd", "pair": "\U0001f600", "b'k'": "\ufffd", "zero\ufffd": "\ufffd",
        "y" * 256: 1.0,
    }  # fmt: skip


def test_an_error_with_half_a_sign_is_a_text_that_files_take(slot):
    score = slot(r"raise ValueError('\ud83d')").score(*CALL)
    assert score.error.encode()


def test_an_exception_carries_the_user_s_own_traceback(slot):
    made = slot("return helper()\n\ndef helper():\n    return {}['no such key']".replace("\n\ndef", "\ndef"))
    score = made.score(*CALL)
    assert score.status == "crashed"
    assert "my_reward.py" in score.error
    assert "/rltrain/rewards/" not in score.error


@pytest.mark.parametrize(
    "body", ["raise KeyError('x')", "import sys; sys.exit(0)", "raise KeyboardInterrupt", "return f()"]
)
def test_whatever_is_raised_the_process_goes_on(slot, body):
    made = slot(f"def f(): return f()\nif solution_str == 'good': return 1\n{body}")
    pid = made.pid
    assert made.score(*CALL).status == "crashed"
    assert made.score("s", "good", "", {}).value == 1.0
    assert made.pid == pid


@pytest.mark.fault("A scorer that hangs is killed at its deadline")
@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import re; re.match('(a+)+$', 'a' * 60 + 'b')",  # holds the interpreter lock: no thread could stop it
        "import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32)); time.sleep(60)",
        "import subprocess; subprocess.run(['sleep', '60'])",
    ],
)
def test_a_hanging_answer_is_killed_at_its_deadline(slot, body, gone):
    made = slot(f"if solution_str == 'good': return 1\n{body}", timeout_s=0.3)
    assert made.score("s", "good", "", {}).value == 1.0
    pid, start = made.pid, time.monotonic()
    score = made.score(*CALL)
    assert time.monotonic() - start < 15  # the shortest of them would take a minute
    assert (score.value, score.status) == (None, "timeout")
    assert "0.3 s" in score.error
    assert gone(pid)
    assert made.score("s", "good", "", {}).value == 1.0


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
    made = slot(f"if solution_str == 'good': return 1\n{body}")
    score = made.score(*CALL)
    assert (score.value, score.status) == (None, "crashed")
    assert said in score.error
    if said == "SIGSEGV":
        assert "my_reward.py" in score.error
    assert made.score("s", "good", "", {}).value == 1.0


@pytest.mark.fault("A scorer that somebody kills while it scores costs no answer")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_answer_whose_process_is_killed_is_scored_again(slot, tmp_path, number):
    file = tmp_path / "pid"
    made = slot(
        f"""
        import os, time
        if os.path.exists({str(file)!r}): return 1
        with open({str(file)!r}, "w") as opened: opened.write(str(os.getpid()))
        time.sleep(100)
        """,
        timeout_s=50,
    )

    def kill():
        while not (file.exists() and file.read_text()):
            time.sleep(0.01)
        os.kill(int(file.read_text()), number)

    killer = threading.Thread(target=kill)
    killer.start()
    assert made.score(*CALL).value == 1.0
    killer.join()
    assert made.pid != int(file.read_text())


@pytest.mark.fault("A scorer that prints without end blocks nothing")
def test_a_flood_of_output_does_not_block(slot):
    body = """
        import os, sys
        print('x' * 1_000_000); sys.stderr.write('y' * 1_000_000); os.write(1, b'z' * 1_000_000)
        os.system('yes | head -c 1000000')
        return 1
    """
    assert slot(body, timeout_s=5).score(*CALL).value == 1.0


def test_long_answers_pass_and_a_long_error_is_cut(slot):
    made = slot("if ground_truth: raise ValueError(solution_str)\nreturn len(solution_str)")
    assert made.score("s", "é" * 3_000_000, "", {}).value == 3_000_000
    assert len(made.score("s", "x" * 3_000_000, "t", {}).error) <= 4000


@pytest.mark.fault("A scorer that writes into its connection fails alone")
def test_writing_into_the_connection_ends_that_answer_only(slot):
    body = """
        import os
        if solution_str == 'good': return 1
        for descriptor in range(3, 1024):
            try: os.write(descriptor, b'x' * 64)
            except OSError: pass
    """
    made = slot(body)
    assert made.score(*CALL).status in ("crashed", "timeout")
    assert made.score("s", "good", "", {}).value == 1.0


def test_the_process_imports_neither_torch_nor_ray_nor_numpy(slot):
    assert slot("import sys; return len({'torch', 'ray', 'numpy'} & set(sys.modules))").score(*CALL).value == 0.0


def test_a_slow_import_is_not_the_first_answer_s_fault(custom):
    code = "import time\ntime.sleep(0.8)\ndef compute_score(**kwargs): return 1\n"
    with ScoringSlot(custom(code), timeout_s=0.4) as made:
        assert made.score(*CALL).value == 1.0


def test_close_leaves_no_process_not_even_a_grandchild(slot, gone):
    made = slot("import subprocess; return subprocess.Popen(['sleep', '60']).pid")
    grandchild, pid = int(made.score(*CALL).value), made.pid
    made.close()
    made.close()
    assert gone(pid)
    assert gone(grandchild)
    with pytest.raises(RuntimeError, match="closed"):
        made.score(*CALL)


@pytest.mark.fault("A killed reward worker takes its scorers along")
def test_a_killed_owner_takes_even_a_hanging_slot_along(custom, tmp_path, gone):
    daemon = tmp_path / "pid"
    reward = custom(f"""
        import subprocess
        def compute_score(**kwargs):
            process = subprocess.Popen(["sleep", "60"], start_new_session=True)
            with open({str(daemon)!r}, "w") as file: file.write(str(process.pid))
            while True: pass
    """)
    code = f"""
import sys, threading
from rltrain.rewards.processes.slot import ScoringSlot
from rltrain.rewards.custom import CustomReward
slot = ScoringSlot(CustomReward({reward.path!r}), timeout_s=60)
slot.prepare("s")
print(slot.pid, flush=True)
slot.score("s", "a", "b", {{}})
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(owner.stdout.readline())
    while not (daemon.exists() and daemon.read_text()):
        time.sleep(0.01)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert gone(pid)
    assert gone(int(daemon.read_text()))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
        ("def compute_score(:", "SyntaxError"),
        ("def other(): pass\nfrom os.path import join", "it defines other"),
        ("def compute_score(solution, truth): return 1", "cannot be called with data_source, solution_str"),
        ("import os; os._exit(4)", "exit code 4"),
        ("raise SystemExit", "SystemExit"),
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


def test_reward_kwargs_and_rows_reach_the_function(custom):
    code = "def f(data_source, ground_truth, scale, **_): return scale * len(data_source + ground_truth)"
    with ScoringSlot(custom(code, name="f", scale=3)) as made:
        assert made.score(*CALL).value == 36.0


def answers(number):
    return [("any", str(each), "0", {}) for each in range(number)]


def test_answers_of_an_async_function_are_under_way_at_once(custom):
    code = """
        import asyncio
        async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            await asyncio.sleep(60 if solution_str == "7" else 0.2)
            return 1 / (int(solution_str) - 3)
    """
    with ScoringSlot(custom(code), timeout_s=1.5) as made:
        made.prepare("any")
        pid, began = made.pid, time.monotonic()
        scores = made.score_all(answers(50))
        assert time.monotonic() - began < 8  # one after the other they would take 11
        assert [score.status for score in scores] == [
            "timeout" if i == 7 else "crashed" if i == 3 else "ok" for i in range(50)
        ]
        assert scores[5].value == 0.5
        assert "ZeroDivisionError" in scores[3].error
        assert "1.5 s (reward.timeout_s)" in scores[7].error
        assert made.pid == pid


def test_an_async_function_that_blocks_takes_no_time_of_others(custom):
    code = """
        import time
        async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            time.sleep(0.1)
            return 1
    """
    with ScoringSlot(custom(code), timeout_s=0.3) as made:
        assert [score.status for score in made.score_all(answers(10))] == ["ok"] * 10


@pytest.mark.parametrize(
    "body", ["while True: pass", "import os; os._exit(3)", "raise SystemExit", "raise MemoryError"]
)
def test_an_async_answer_that_ends_the_process_fails_alone(custom, body):
    code = "async def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    code += f"    if solution_str == '1':\n        {body}\n    return 1"
    with ScoringSlot(custom(code), timeout_s=1.0) as made:
        statuses = [score.status for score in made.score_all(answers(3))]
        assert statuses == ["ok", "timeout" if "while" in body else "crashed", "ok"]


def test_a_module_is_named_as_in_verl(tmp_path, monkeypatch):
    (tmp_path / "house").mkdir()
    (tmp_path / "house" / "rules.py").write_text(
        "def longer(data_source, solution_str, ground_truth, extra_info): return extra_info['num_turns']"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for path in ("pkg://house.rules", "pkg://house/rules", "house.rules", f"file://{tmp_path}/house/rules.py"):
        with ScoringSlot(CustomReward(path, "longer")) as made:
            assert made.score(*CALL).value == 2.0


def test_reward_kwargs_win_over_the_row_as_in_verl(custom):
    code = "def compute_score(data_source, solution_str, ground_truth, extra_info): return float(ground_truth)"
    with ScoringSlot(custom(code, ground_truth="4")) as made:
        assert made.score("any", "answer", "7", {}).value == 4.0


def test_what_a_served_reward_model_would_give_is_refused(custom):
    code = """
        async def compute_score(
            data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer=None
        ): return 1
    """
    with (
        ScoringSlot(custom(code)) as made,
        pytest.raises(RewardError, match="needs reward_router_address, which verl gives"),
    ):
        made.prepare("any")
    with ScoringSlot(custom(code, reward_router_address="judge:80")) as made:
        assert made.score(*CALL).value == 1.0


def test_a_built_in_scorer_judges_the_last_turn_where_there_are_several():
    """What a tool has said between the turns may look like an answer."""
    whole = "I search. <answer>Rome</answer> is in a passage of the tool. I do not know."
    with ScoringSlot(timeout_s=30) as open_slot:
        assert open_slot.score("searchR1_nq", whole, ["Rome"], {}).value == 1.0
        assert open_slot.score("searchR1_nq", whole, ["Rome"], {"last_turn": "I do not know."}).value == 0.0
        assert open_slot.score("searchR1_nq", whole, ["Rome"], {"last_turn": ""}).value == 0.0
        assert open_slot.score("searchR1_nq", whole, ["Oslo"], {"last_turn": "<answer>Oslo</answer>"}).value == 1.0
