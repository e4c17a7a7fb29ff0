"""A reward function may start processes with multiprocessing, by any start method."""

import pytest

from rltrain.rewards.processes.slot import ScoringSlot
from tests.clock import PATIENCE_S

CALL = ("any/source", " 42", "42", {})
HEAD = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from its_neighbour import strip

def same(pair, put=None):
    equal = float(strip(pair[0]) == pair[1])
    return equal if put is None else put(equal)

@dataclass
class Same:
    truth: str
    def __call__(self, answer):
        return same((answer, self.truth))

if __name__ == "__main__":
    raise RuntimeError("the guard lets nobody in")

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    context = multiprocessing.get_context({method!r})
    pair = (solution_str, ground_truth)
"""
BODIES = {
    "a pool": "with context.Pool(1) as pool: return pool.map(same, [pair])[0]",
    "a pool with a start": "with context.Pool(1, print, (1,)) as pool: return pool.apply(Same(ground_truth), pair[:1])",
    "an executor": "with ProcessPoolExecutor(1, context) as pool: return pool.submit(same, pair).result()",
    "a process": """
    queue = context.Queue()
    process = context.Process(target=same, args=(pair, queue.put))
    process.start()
    process.join()
    return queue.get()""",
}


@pytest.mark.few(4)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_processes_started_by_a_reward_function_find_its_functions(custom, tmp_path, method, body):
    (tmp_path / "its_neighbour.py").write_text("def strip(text): return text.strip()\n")
    code = HEAD.replace("{method!r}", repr(method)) + f"    {BODIES[body].strip()}\n"
    with ScoringSlot(custom(code), timeout_s=PATIENCE_S) as slot:
        score = slot.score(*CALL)
        assert (score.value, score.error) == (1.0, None), slot.take_printed()


LOST = """
import multiprocessing

class Same:
    def __call__(self, pair): return 1.0
    def __reduce__(self): return exec, ("import no_such_module",)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    context = multiprocessing.get_context({!r})
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_waiting_for_a_process_that_could_not_start_is_an_error_and_no_timeout(custom, method):
    """The trial before training must end the run, after one try: no other form of the ground truth is tried."""
    code = LOST.format(method) + "    with context.Pool(1) as pool: return pool.map(Same(), [1])[0]"
    with ScoringSlot(custom(code), timeout_s=5.0) as slot:
        score = slot.score_truth(CALL)
    assert score.status == "crashed"
    assert score.error.startswith("no score after 5 s (reward.timeout_s); a process that it started with multiproc")
    assert score.error.endswith("ModuleNotFoundError: No module named 'no_such_module'")
