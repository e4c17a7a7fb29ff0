import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch
from rltrain.common.columns.ragged import Ragged
from rltrain.workers.rollout.answering import Reply
from rltrain.workers.rollout.contract import Job, Turn, turns_of
from rltrain.workers.rollout.conversations import Conversations, begun_conversations, payload_of
from rltrain.workers.rollout.queue import JobQueue, Replica, abort
from tests.workers.engines import ALONE, queue_of

PROMPT = np.array([2, 5], dtype=np.int32)


def job(prompt_index, *samples):
    return Job(prompt_index, np.array(samples), PROMPT, np.zeros(len(samples), dtype=np.uint64))


def turn_of(prompt_index, sample, tokens, reason="stop"):
    return Turn(prompt_index, sample, tokens, [-0.5] * len(tokens), reason, 2.0)


class SeeingQueue:
    """One job, with pixels."""

    def __init__(self, asked):
        self.jobs, self.ended_jobs = [asked], []

    def next_jobs(self, most):
        jobs, self.jobs = self.jobs, []
        return jobs

    def on_job_end(self, asked):
        self.ended_jobs.append(asked)


def test_a_job_is_over_with_its_last_conversation_and_reported_without_its_pixels():
    reported = []
    queue = SeeingQueue(replace(job(0, 1, 2), images="pixels"))
    source = Conversations(queue, 20, finished=lambda asked, answers: reported.append((asked, answers)))
    (taken,) = source.next_jobs(9)
    assert taken.images == "pixels"
    source.on_turn_end(turn_of(0, 2, [5, 1]))
    assert not reported
    source.on_turn_end(turn_of(0, 1, [7], "length"))
    ((asked, answers),) = reported
    assert asked.images is None
    assert queue.ended_jobs == [asked]
    assert [(answer.sample, answer.tokens.tolist(), answer.truncated) for answer in answers] == [
        (1, [7], True), (2, [5, 1], False),
    ]  # fmt: skip
    assert source.all == answers
    assert not source.wait()


def test_a_job_with_a_turn_that_was_given_up_is_not_reported():
    reported = []
    queue = SeeingQueue(job(0, 1, 2))
    source = Conversations(queue, 20, finished=lambda asked, answers: reported.append(asked))
    source.next_jobs(9)
    source.on_turn_end(turn_of(0, 1, [7]))
    source.on_turn_end(turn_of(0, 2, [7], "abort"))
    assert (reported, queue.ended_jobs) == ([], [])
    assert [(answer.aborted, answer.tokens.tolist()) for answer in source.all] == [(False, [7]), (True, [7])]


def test_a_conversation_goes_on_behind_the_tokens_that_it_has():
    """They include context that the policy did not sample, so there are fewer log-probs than tokens."""
    begun = Batch(
        {
            c.RESPONSE: Ragged.from_rows([torch.tensor([4, 9, 6], dtype=torch.int32)]),
            c.RESPONSE_MASK: Ragged.from_rows([torch.tensor([True, False, True])]),
            c.ROLLOUT_LOG_PROBS: Ragged.from_rows([torch.tensor([-1.0, -2.0])]),
            c.SLOT: torch.tensor([5]),
        }
    )
    (known,) = begun_conversations(begun, [PROMPT] * 3, 2)
    assert (known.prompt_index, known.sample) == (2, 1)
    source = Conversations(SeeingQueue(job(2, 0, 1)), 20, {(2, 1): known})
    source.next_jobs(9)
    source.on_turn_end(turn_of(2, 1, [3, 1]))
    source.on_turn_end(turn_of(2, 0, [8]))
    payload = payload_of(source.all)
    assert [row.tolist() for row in payload.ragged(c.RESPONSE).rows()] == [[8], [4, 9, 6, 3, 1]]
    assert [row.tolist() for row in payload.ragged(c.RESPONSE_MASK).rows()] == [[True], [True, False, True, True, True]]
    assert [row.tolist() for row in payload.ragged(c.ROLLOUT_LOG_PROBS).rows()] == [[-0.5], [-1.0, -2.0, -0.5, -0.5]]
    prompts = payload.dictionary(c.PROMPT)
    assert ([row.tolist() for row in prompts.values.rows()], prompts.index.tolist()) == ([PROMPT.tolist()], [0, 0])


class Answers:
    """Replies to every turn with one-token texts."""

    max_model_len = 32

    def request_reply(self, key, conversation, reason):
        self.key = key
        return True

    key = None

    def arrived(self, wait_s):
        return [] if self.key is None else [(self.key, Reply(np.array([7], dtype=np.int32)))]


def test_the_job_of_a_next_turn_says_that_it_begins_after_its_given_tokens():
    source = Conversations(SeeingQueue(job(0, 0)), 20, answering=(Answers(), 9))
    (first,) = source.next_jobs(9)
    source.on_turn_end(turn_of(0, 0, [4]))
    (second,) = source.next_jobs(9)
    assert (first.begins_turn, second.begins_turn, second.given[0].tolist()) == (False, True, [4, 7])
    assert [len(turn.earlier) for turn in (*turns_of(second), *turns_of(replace(second, begins_turn=False)))] == [0, 2]


@pytest.mark.parametrize("damage", [{"tokens": [4, 20]}, {"tokens": [-1, 4]}, {"log_probs": [-1.0, float("nan")]}])
def test_a_damaged_turn_is_left_out_and_counted(damage):
    source = Conversations(SeeingQueue(job(0, 0, 1)), 20)
    source.next_jobs(9)
    source.on_turn_end(replace(turn_of(0, 0, [4, 4]), **damage))
    source.on_turn_end(turn_of(0, 1, [4, 4]))
    assert [answer.tokens.tolist() for answer in source.all] == [[], [4, 4]]
    assert (source.num_damaged, source.num_unknown) == (1, int("tokens" in damage))


def test_a_prompt_counts_when_all_its_jobs_have_ended():
    jobs = [job(0, 0, 1), job(0, 2), job(1, 0, 1), job(1, 2), job(2, 0, 1, 2)]
    queue = queue_of(jobs, target_complete=2)
    stopped = []
    for each in (0, 2, 4, 3):
        queue.on_job_end(jobs[each])
        stopped.append(queue.stopped())
    assert stopped == [False, False, False, True]
    assert queue.next_jobs(100) == []
    assert not queue_of(jobs).stopped()


def test_the_stop_waits_for_the_first_prompts():
    jobs = [job(prompt_index, 0) for prompt_index in (0, 2, 3, 4)]  # the prompt at place 1 has nothing to be done
    queue = queue_of(jobs, target_complete=1, num_required=2)
    for each in (3, 1, 2):
        queue.on_job_end(jobs[each])
        assert not queue.stopped()
    queue.on_job_end(jobs[0])
    assert queue.stopped()


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_replicas_count_together(tmp_path, kind):
    """Jobs of one prompt are served by different replicas at the same time."""
    store = dist.HashStore() if kind == "hash" else dist.FileStore(str(tmp_path / "store"), 1)
    jobs = [job(prompt_index, sample) for prompt_index in range(40) for sample in range(4)]
    queues = [JobQueue(jobs, 8, Replica(number, 4, 0, 1), store, "call", target_complete=40) for number in range(4)]

    def serve(queue):
        while taken := queue.next_jobs(1):
            queue.on_job_end(taken[0])

    threads = [threading.Thread(target=serve, args=(queue,)) for queue in queues]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert queues[0].stopped()
    assert sum(len(queue.taken) for queue in queues) == len(jobs)
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert all(queue.stopped() for queue in queues)
    assert sizes == [file.stat().st_size for file in tmp_path.iterdir()], "a look makes the file no longer"
    assert store.add("call/ended", 0) == 40


def test_a_queue_whose_answers_nobody_wants_any_more_ends():
    store = dist.HashStore()
    jobs = [job(prompt_index, 0) for prompt_index in range(3)]
    ends, other = (JobQueue(jobs, 1, ALONE, store, name, can_end=name == "a") for name in "ab")
    assert ends.next_jobs(1) == jobs[:1]
    assert (ends.may_stop, ends.stopped(), other.may_stop) == (True, False, False)
    abort(store)
    assert ends.stopped()
    assert ends.next_jobs(1) == []
    assert (other.stopped(), other.next_jobs(1)) == (False, jobs[:1])
