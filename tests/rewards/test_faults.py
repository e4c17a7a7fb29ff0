"""Resources that a scorer may use up in its slot: memory and processes."""

import os

import pytest

from tests.faults.plug import ended

GOOD = ("s", "good", "", {})
BAD = ("s", "bad", "", {})


@pytest.mark.fault("An answer whose scorer eats memory fails alone")
def test_an_answer_that_eats_memory_crashes_alone(slot):
    body = "if solution_str == 'good': return 1\nreturn len([bytes(1 << 20) for _ in range(4096)])"
    made = slot(body, memory_limit_mb=512)
    made.prepare("s")
    pid = made.pid
    score = made.score(*BAD)
    assert (score.value, score.status) == (None, "crashed")
    assert "reward.memory_limit_mb" in score.error
    assert "MemoryError" in score.error
    ended([pid])
    assert made.score(*GOOD).value == 1.0


@pytest.mark.fault("A scorer that leaks memory ends at its limit")
def test_a_leak_ends_at_the_limit_even_if_its_errors_are_caught(slot):
    made = slot(
        """
        if solution_str == 'good': return 1
        hoard = globals().setdefault('hoard', [])
        try:
            while True: hoard.append(bytes(1 << 24))
        except MemoryError:
            return [0] * (1 << 26)
        """,
        memory_limit_mb=512,
    )
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
def test_a_child_that_left_the_group_ends_with_the_slot(slot):
    made = slot("""
        import os, signal
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(writer, str(os.getpid()).encode())
                signal.pause()
            os._exit(0)
        return int(os.read(reader, 20))
    """)
    daemon = int(made.score(*BAD).value)
    os.kill(daemon, 0)
    made.close()
    ended([daemon])


@pytest.mark.fault("A fork bomb in a scorer ends at the deadline")
def test_a_fork_bomb_ends_at_the_deadline(slot, tmp_path):
    """Processes in separate sessions double eight times."""
    body = f"""
        import os, signal
        for _ in range(8):
            if os.fork() == 0: os.setsid()
            with open({str(tmp_path / "pids")!r}, 'a') as file: file.write(f'{{os.getpid()}}\\n')
        signal.pause()
    """
    made = slot(body, timeout_s=2.0)
    assert made.score(*BAD).status == "timeout"
    pids = {int(pid) for pid in (tmp_path / "pids").read_text().split()}
    assert len(pids) > 1
    ended(pids)
