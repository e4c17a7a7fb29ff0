"""What a scorer may do to its slot: the next answer is scored, and nothing is left running."""

import os
import time

import pytest

GOOD = ("s", "good", "", {})
BAD = ("s", "bad", "", {})


@pytest.mark.fault("An answer whose scorer eats memory fails alone")
def test_an_answer_that_eats_memory_crashes_alone(slot, gone):
    made = slot(
        "if solution_str == 'good': return 1\nreturn len([bytes(1 << 20) for _ in range(4096)])",
        20.0,
        memory_limit_mb=512,
    )
    assert made.score(*GOOD).value == 1.0
    pid = made.pid
    score = made.score(*BAD)
    assert (score.value, score.status) == (None, "crashed")
    assert "reward.memory_limit_mb" in score.error
    assert "MemoryError" in score.error
    assert gone(pid)
    assert made.score(*GOOD).value == 1.0


@pytest.mark.fault("A scorer that leaks memory ends at its limit")
def test_a_leak_ends_at_the_limit_even_if_its_errors_are_caught(slot):
    body = """
        if solution_str == 'good': return 1
        hoard = globals().setdefault('hoard', [])
        try:
            while True: hoard.append(bytes(1 << 24))
        except MemoryError:
            return [0] * (1 << 26)
    """
    made = slot(body, 20.0, memory_limit_mb=512)
    assert made.score(*BAD).status == "crashed"
    assert made.score(*GOOD).value == 1.0


def test_memory_is_unbounded_only_when_asked(slot):
    body = "import resource; return resource.getrlimit(resource.RLIMIT_AS)[0] >> 20"
    assert slot(body).score(*GOOD).value == 4096.0
    assert slot(body, memory_limit_mb=0).score(*GOOD).value != 4096.0


def test_a_fork_that_returns_too_answers_for_no_other_sample(slot):
    made = slot("import os\nif solution_str == 'bad': os.fork(); return 7\nreturn 1")
    for _ in range(5):
        assert made.score(*BAD).value == 7.0
        assert made.score(*GOOD).value == 1.0


@pytest.mark.fault("A daemon that a scorer has started ends with it")
def test_a_child_that_left_the_group_ends_with_the_slot(slot, gone):
    body = """
        import os, time
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(writer, str(os.getpid()).encode())
                time.sleep(60)
            os._exit(0)
        return int(os.read(reader, 20))
    """
    made = slot(body)
    daemon = int(made.score(*BAD).value)
    os.kill(daemon, 0)
    made.close()
    assert gone(daemon)


@pytest.mark.fault("A fork bomb in a scorer ends at the deadline")
def test_a_fork_bomb_ends_at_the_deadline(slot):
    body = """
        import os, time
        if solution_str == 'good': return 1
        for _ in range(30):
            if os.fork() == 0: os.setsid()
            if len(os.listdir('/proc')) > 400: break
            time.sleep(0.02)
        time.sleep(60)
    """
    made = slot(body, timeout_s=0.5)
    before = len([name for name in os.listdir("/proc") if name.isdigit()])
    assert made.score(*BAD).status == "timeout"
    assert made.score(*GOOD).value == 1.0
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline and len([n for n in os.listdir("/proc") if n.isdigit()]) > before + 20:
        time.sleep(0.05)
    assert len([name for name in os.listdir("/proc") if name.isdigit()]) <= before + 20


@pytest.mark.fault("A score that is no finite number never reaches the maths")
@pytest.mark.parametrize(
    ("returned", "status"), [("float('nan')", "rejected"), ("[1.0]", "rejected"), ("'1'", "rejected")]
)
def test_what_is_no_number_never_reaches_the_maths(slot, returned, status):
    score = slot(f"return {returned}").score(*BAD)
    assert (score.value, score.status) == (None, status)
