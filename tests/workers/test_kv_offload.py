"""Keys and values of waiting conversations that the embedded engine keeps: they change no token."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rltrain.models.attention.recurrent import bytes_per_row
from rltrain.workers.rollout.contract import Job, Sampling
from rltrain.workers.rollout.embedded.engine import bytes_per_token
from rltrain.workers.rollout.embedded.kv import KeyValues
from rltrain.workers.rollout.embedded.kv_offload import OffloadedRow, OffloadedRows
from rltrain.workers.rollout.embedded.running import EndedTurn
from tests.distance import distance
from tests.models.kinds import KINDS
from tests.workers.engines import Talk, jobs_of
from tests.workers.test_engine_contract import log_probs_of
from tests.workers.test_hf_rollout import FAMILIES, PROMPTS, count_tokens, make_engine, plain_model

SAMPLING = Sampling(60, temperature=1.2)


def engine_of(plain, **limits):
    """Return an engine in which a third of the tokens end a turn."""
    return make_engine(plain, ends=range(0, plain.config.vocab_size, 3), **limits)


def talk(engine, *, keeps=True) -> Talk:
    source = Talk(jobs_of(PROMPTS, 3), 60, keeps=keeps)
    engine.generate(source, SAMPLING)
    return source


def all_turns(source: Talk):
    return [turn for key in sorted(source.turns) for turn in source.turns[key]]


def assert_the_same(found: Talk, expected: Talk, most=2e-5) -> None:
    assert found.tokens == expected.tokens
    log_probs = ([torch.tensor(turn.log_probs) for turn in all_turns(source)] for source in (found, expected))
    assert distance(*(torch.cat(parts) for parts in log_probs)) < most


def computed_by_follow_ups(source: Talk) -> tuple[int, int]:
    """Return the tokens at the start of follow-up turns that were computed for them, and the necessary ones: the new
    text, and the last token of the turn before."""
    computed = needed = 0
    for (prompt_index, sample), turns in source.turns.items():
        begun = len(PROMPTS[prompt_index])
        for before, turn in pairwise(turns):
            begun += len(before.tokens) + len(source.said((prompt_index, sample)))
            computed += begun - turn.num_reused
            needed += 1 + len(source.said((prompt_index, sample)))
    return computed, needed


# Full, windows of all layers, chunks, soft caps, sinks, states.
ALWAYS = ("qwen3", "mistral", "llama4", "gemma2", "gpt_oss", "qwen3_5")
EVERY = [pytest.param(name, marks=() if name.startswith(ALWAYS) else pytest.mark.long) for name in [*FAMILIES, *KINDS]]
LIMITS = {"max_num_seqs": 7, "block": 4, "max_num_batched_tokens": 8}


@pytest.mark.parametrize("family", EVERY)
def test_a_next_turn_computes_what_is_new_alone_and_says_the_same(family):
    """Later turns arrive together with new prompts, and some are computed in parts."""
    plain = plain_model(family)
    expected = talk(engine_of(plain), keeps=False)
    engine = engine_of(plain, **LIMITS)
    sizes = count_tokens(engine)
    found = talk(engine)
    assert_the_same(found, expected)
    assert len(all_turns(found)) > 40
    computed, needed = computed_by_follow_ups(found)
    assert computed == needed
    assert not any(turn.num_reused for turn in all_turns(expected))
    # A prompt is computed once, and so is what was said to each answer.
    prefills = sum(tokens for _, tokens in sizes if tokens > 1)
    assert prefills <= sum(map(len, PROMPTS)) + needed
    key, turns = max(found.turns.items(), key=lambda item: len(item[1]))
    begun = [*PROMPTS[key[0]].tolist(), *(token for turn in turns[:-1] for token in [*turn.tokens, *found.said(key)])]
    text = np.array(begun, dtype=np.int32)
    ours = torch.tensor(turns[-1].log_probs)
    assert distance(ours, log_probs_of(plain, text, turns[-1].tokens, 1.2)) < 2e-5


def test_where_room_is_short_what_is_parked_goes_and_is_computed_again():
    plain = plain_model("qwen3")
    found = talk(engine_of(plain, rows=3.2, gpu_memory_utilization=1.0, block=4))
    assert_the_same(found, talk(engine_of(plain), keeps=False))
    computed, needed = computed_by_follow_ups(found)
    assert computed > needed
    assert any(turn.num_reused for turn in all_turns(found))


def row_of(length: int) -> OffloadedRow:
    return OffloadedRow(length, {(0, 1): (torch.zeros(1, length, 1), torch.zeros(1, length, 1))}, {})


def parked_of(*samples: int) -> OffloadedRows:
    """Make rows of 10 tokens and 80 bytes each."""
    offloaded = OffloadedRows()
    for sample in samples:
        offloaded.put(EndedTurn(0, (0, sample), np.arange(8, dtype=np.int32)), row_of(10))
    return offloaded


def next_turn(sample: int, *tokens: int) -> Job:
    given = np.array(tokens, dtype=np.int32)
    return Job(0, np.array([sample]), np.zeros(3, dtype=np.int32), np.zeros(1, dtype=np.uint64), (given,))


def test_the_row_that_waits_longest_goes_first():
    offloaded = parked_of(2, 0, 1)
    offloaded.fit(240)
    assert len(offloaded) == 3
    offloaded.fit(239)
    assert offloaded.take([next_turn(2, *range(9))]) == {}
    assert list(offloaded.take([next_turn(sample, *range(9)) for sample in (0, 1)])) == [(0, 0), (0, 1)]
    assert len(offloaded) == 0


def test_a_row_is_taken_once_and_for_its_own_text_alone():
    offloaded = parked_of(0, 1, 2)
    assert offloaded.take([next_turn(0, *range(7), 9, 9)]) == {}
    assert list(offloaded.take([next_turn(1, *range(9))])) == [(0, 1)]
    assert offloaded.take([next_turn(1, *range(9))]) == {}
    offloaded.drop_ended(
        SimpleNamespace(is_pending=lambda prompt_index, sample: sample != 2)
    )  # its conversation is over
    assert not len(offloaded)


@pytest.mark.parametrize("family", [name for name in KINDS if "delta" in name])
def test_a_copy_of_a_row_keeps_its_values_and_has_the_planned_size(family):
    """Later computation of the row, or a row in its place, does not change the copy."""
    engine = engine_of(plain_model(family))
    config, prefill, cache = engine.model.config, engine._prefill, KeyValues(torch.device("cpu"), 4)
    with torch.inference_mode():
        prefill(jobs_of(PROMPTS, 1), cache)
        row = cache.copy_of(2)
        kept = [tensor.clone() for part in (*row.pairs.values(), *row.states.values()) for tensor in part]
        cache.drop_dead_rows(np.arange(6) != 2)
        prefill(jobs_of(PROMPTS[:1], 1), cache)
    tensors = [tensor for part in (*row.pairs.values(), *row.states.values()) for tensor in part]
    assert all(torch.equal(*pair) for pair in zip(tensors, kept, strict=True))
    by_token, by_row = bytes_per_token(config, torch.float32), bytes_per_row(config, torch.float32)
    assert (row.length, row.num_bytes) == (len(PROMPTS[2]), len(PROMPTS[2]) * by_token + by_row)
