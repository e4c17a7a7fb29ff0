"""Generation event by event, checked by hand: a decode step takes a second, and reads a byte per token if that is
counted."""

import numpy as np
import pytest

from rltrain.run.seconds.engine import EngineSpeed, generate

STEADY = {
    "weight_bytes": 1.0, "bytes_per_token": 0.0, "flops_per_token": 0.0, "flops_per_pair": 0.0, "bandwidth": 1.0,
    "flops": 1.0, "step_s": 0.0, "max_rows": 8,
}  # fmt: skip


def answered(lengths, replicas=1, prompt=1, enough=None, **changes):
    """One response per prompt unless ``lengths`` has rows."""
    answers = np.array(lengths).reshape(len(lengths), -1)
    return generate(
        np.full(len(answers), prompt), answers, EngineSpeed(**STEADY | changes), replicas, enough
    )  # fmt: skip


def test_answers_of_a_replica_end_after_as_many_steps_as_they_have_tokens():
    generation = answered([2, 5])
    assert generation.ended_s.ravel().tolist() == [2, 5]
    assert generation.seconds == generation.decode_steps == 5


def test_every_token_in_front_of_a_row_is_read():
    # Weights 1 and two prompts of 1: 3 s, then two tokens more: 5 s, then one row with 1 + 2 in front of it: 4 s.
    assert answered([2, 3], bytes_per_token=1.0).ended_s.ravel().tolist() == [8, 12]


def test_a_step_takes_the_longer_of_reading_and_computing_and_a_fixed_time():
    # Computing: 2 rows of 3 FLOPs and a pair with each of the two tokens in front of them; reading would take 1 s.
    speed = EngineSpeed(**STEADY | {"flops_per_token": 3.0, "flops_per_pair": 1.0, "step_s": 0.5})
    assert speed.decode_s(2, 2) == 0.5 + 8
    assert speed.decode_s(0, 0) == 0.5 + 1
    assert speed.prefill_s(4) == 4 * 3 + 4**2 / 2


def test_the_replica_that_is_free_first_takes_the_next_prompt():
    generation = answered([4, 1, 1, 1], replicas=2, max_rows=1)
    assert generation.ended_s.ravel().tolist() == [4, 1, 2, 3]
    assert generation.replicas_s.tolist() == [4, 3]
    assert generation.idle_share == pytest.approx(1 / 8)


def test_a_full_cache_makes_answers_wait_and_computes_their_tokens_again():
    # Two prompts of 2 and 3 tokens each fill 10; the second answer leaves, and writes its last 3 when the first ended.
    generation = answered([6, 6], prompt=2, cache_tokens=10)
    assert generation.ended_s.ravel().tolist() == [6, 9]
    assert (generation.put_back, generation.most_waiting) == (1, 1)
    assert answered([6, 6], prompt=2).seconds == 6
    # Two prompts of 2, and then the second once more with the 3 tokens behind it.
    computed = answered([6, 6], prompt=2, cache_tokens=10, flops_per_token=0.001, flops=0.1).seconds
    assert computed == pytest.approx(9 + (2 + 2 + 2 + 3) * 0.01)


def test_an_answer_without_room_is_an_error_and_no_endless_loop():
    with pytest.raises(ValueError, match="a response of 12 tokens does not fit in a cache of 10"):
        answered([10], prompt=2, cache_tokens=10)


def test_a_step_that_has_enough_stops():
    generation = answered([2, 50, 3], enough=2)
    assert generation.seconds == 3
    assert np.isnan(generation.ended_s.ravel()).tolist() == [False, True, False]
