import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from rltrain.data.images import EncodedPrompt
from rltrain.workers.rollout.answers import RunningJob
from rltrain.workers.rollout.contract import Job
from rltrain.workers.rollout.images import PicturesOfTask
from rltrain.workers.rollout.queue import JobQueue, Replica, give_up
from tests.workers.engines import ALONE, queue_of

PROMPT = np.array([2, 5], dtype=np.int32)


def job(place, *samples):
    return Job(place, np.array(samples), PROMPT, np.zeros(len(samples), dtype=np.uint64))


@pytest.mark.parametrize("keep", [False, True])
def test_pixels_end_with_their_last_job_unless_they_are_kept(keep):
    jobs = [job(0, 0), job(0, 1), job(1, 0)]
    store = SimpleNamespace(num_images=np.array([0, 1, 1]), encoded=lambda row: EncodedPrompt(PROMPT, f"of {row}"))
    store.pictures = SimpleNamespace(as_they_stand=lambda rows: np.arange(len(rows)))
    pictures = PicturesOfTask(store, np.array([2, 0], dtype=np.int32), keep=keep)
    queue = JobQueue(jobs, 3, ALONE, dist.HashStore(), "call", prepare=pictures.prepare)
    taken = queue.take(3)
    assert [each.images for each in taken] == ["of 2", "of 2", None]
    assert [each.images for each in queue.taken] == [None] * 3
    found = []
    for each in taken:
        pictures.ended(each)
        found.append(pictures.of(0))
    assert found == ["of 2", *(["of 2"] * 2 if keep else [None] * 2)]


def test_a_job_is_reported_without_its_pixels():
    reported = []
    running = RunningJob(replace(job(0, 0), images="pixels"), lambda job, answers: reported.append(job))
    running.answers[0].reason = "stop"
    running.end()
    assert [each.images for each in reported] == [None]


def test_a_prompt_counts_when_all_its_jobs_have_ended():
    jobs = [job(0, 0, 1), job(0, 2), job(1, 0, 1), job(1, 2), job(2, 0, 1, 2)]
    queue = queue_of(jobs, enough=2)
    stopped = []
    for each in (0, 2, 4, 3):
        queue.ended(jobs[each])
        stopped.append(queue.stopped())
    assert stopped == [False, False, False, True]
    assert queue.take(100) == []
    assert not queue_of(jobs).stopped()


def test_the_stop_waits_for_the_first_prompts():
    jobs = [job(place, 0) for place in (0, 2, 3, 4)]  # the prompt at place 1 has nothing to be done
    queue = queue_of(jobs, enough=1, must=2)
    for each in (3, 1, 2):
        queue.ended(jobs[each])
        assert not queue.stopped()
    queue.ended(jobs[0])
    assert queue.stopped()


def test_replicas_count_together():
    """Jobs of one prompt are served by different replicas at the same time."""
    store = dist.HashStore()
    jobs = [job(place, sample) for place in range(40) for sample in range(4)]
    queues = [JobQueue(jobs, 8, Replica(number, 4, 0, 1), store, "call", enough=40) for number in range(4)]

    def serve(queue):
        while taken := queue.take(1):
            queue.ended(taken[0])

    threads = [threading.Thread(target=serve, args=(queue,)) for queue in queues]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert queues[0].stopped()
    assert sum(len(queue.taken) for queue in queues) == len(jobs)
    assert store.add("call/ended", 0) == 40


def test_a_queue_whose_answers_nobody_wants_any_more_ends():
    store = dist.HashStore()
    jobs = [job(place, 0) for place in range(3)]
    ends, other = (JobQueue(jobs, 1, ALONE, store, name, can_end=name == "a") for name in "ab")
    assert ends.take(1) == jobs[:1]
    assert (ends.may_stop, ends.stopped(), other.may_stop) == (True, False, False)
    give_up(store)
    assert ends.stopped()
    assert ends.take(1) == []
    assert (other.stopped(), other.take(1)) == (False, jobs[:1])
