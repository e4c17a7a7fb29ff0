import threading

import numpy as np
import torch.distributed as dist

from rltrain.workers.rollout.base import Job
from rltrain.workers.rollout.queue import JobQueue, Replica
from tests.workers.engines import queue_of

PROMPT = np.array([2, 5], dtype=np.int32)


def job(place, *samples):
    return Job(place, np.array(samples), PROMPT, np.zeros(len(samples), dtype=np.uint64))


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
