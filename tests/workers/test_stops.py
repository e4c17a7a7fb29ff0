"""Texts that end a turn, in tokens of any kind, and the refused ones."""

from types import SimpleNamespace

import numpy as np
import pytest

from rltrain.config.budgets import longest_sequence, longest_text
from rltrain.config.check import broken_rules
from rltrain.config.load import load_config
from rltrain.trainer.validation import sampling_of
from rltrain.workers.rollout.contract import Job
from rltrain.workers.rollout.embedded.running import RunningTurns
from rltrain.workers.rollout.stops import StopTexts
from tests.tiny import small_run

R = "actor_rollout_ref__rollout__"
# Of one character, of several, of none, and of half a character.
PIECES = {1: "a", 2: "</", 3: "ans", 4: "wer>!", 5: "", 6: b"\xc3", 7: b"\xa9", 8: "x"}


def text(tokens) -> str:
    raw = b"".join(piece if isinstance(piece, bytes) else piece.encode() for piece in map(PIECES.get, tokens))
    return raw.decode(errors="replace")


@pytest.mark.parametrize(
    ("given", "tokens", "known", "end"),
    [
        ([], [1, 2, 3, 4], 0, 4),
        ([], [1, 2, 3, 4, 1, 1], 0, 4),
        ([], [8] * 30 + [2, 3, 5, 4, 1], 0, 34),
        # It begins in what stands before, or is in it whole.
        ([1, 2, 3], [4, 1], 0, 1),
        ([1, 2, 3, 4], [1, 1], 0, None),
        ([1, 2, 3, 4], [1, 2, 3, 4], 0, 4),
        ([2, 3, 4, 6], [7, 1], 0, None),
        ([], [1, 2, 3], 0, None),
        ([], [], 0, None),
    ],
)
def test_it_is_found_with_the_token_that_completes_it(given, tokens, known, end):
    stops = StopTexts(["</answer>"], text)
    assert stops.end_of(given, tokens, known) == end
    # Token by token.
    ends = [count for count in range(1, len(tokens) + 1) if stops.end_of(given, tokens[:count], count - 1)]
    assert ends[:1] == ([] if end is None else [end])


@pytest.mark.parametrize("begins_turn", [True, False])
def test_a_stop_text_begins_in_the_same_turn_and_not_in_the_result_of_a_tool(begins_turn):
    given = (np.array([1, 2, 3], dtype=np.int32),)
    job = Job(0, np.arange(1), np.array([8]), np.zeros(1, dtype=np.uint64), given, begins_turn=begins_turn)
    turns = RunningTurns(8, 32, SimpleNamespace(on_turn_end=lambda turn: None), StopTexts(["</answer>"], text))
    ended = turns.write(turns.add([job]), np.array([4]), np.zeros(1, dtype=np.float32), np.zeros(1, dtype=bool))
    assert bool(ended) == (not begins_turn)


def settings(tmp_path, **changes):
    return load_config(small_run(tmp_path, (tmp_path, tmp_path), tmp_path, **changes))


def test_what_an_engine_has_not_is_refused(tmp_path):
    def problems(**changes):
        return broken_rules(settings(tmp_path, **changes))

    stop = {R + "stop": "[end]"}
    assert problems(**stop, **{R + "repetition_penalty": 1.2}) == []
    sglang = {R + "name": "sglang", "trainer__n_gpus_per_node": 1}
    (line,) = problems(**sglang, **stop)
    assert line.startswith("actor_rollout_ref.rollout.stop=['end']: rollout.name=sglang has no tokenizer")
    (line,) = problems(**sglang, **{R + "val_kwargs__repetition_penalty": 1.2})
    assert line.startswith("actor_rollout_ref.rollout.val_kwargs.repetition_penalty=1.2: rollout.name=sglang would")
    (line,) = problems(**{R + "name": "vllm", R + "tail": "exact", R + "repetition_penalty": 1.2})
    assert "tail=exact proposes several tokens at once" in line


def test_validation_has_its_own_limit_and_the_run_s_stop_texts(tmp_path):
    changes = {R + "stop": "[end,'</a>']", R + "val_kwargs__max_tokens": 30, R + "val_kwargs__min_p": 0.1}
    changes |= {R + "val_kwargs__temperature": 1.0, R + "repetition_penalty": 1.2}
    loaded = settings(tmp_path, **changes)
    cfg, rollout = loaded.config, loaded.config.actor_rollout_ref.rollout
    of_steps, of_validation = (
        sampling_of(keys, rollout, cfg.data, greedy=False) for keys in (rollout, rollout.val_kwargs)
    )
    assert (of_steps.max_tokens, of_steps.min_p, of_steps.repetition_penalty) == (8, 0.0, 1.2)
    assert (of_validation.max_tokens, of_validation.min_p, of_validation.repetition_penalty) == (30, 0.1, 1.0)
    assert of_steps.stop == of_validation.stop == ("end", "</a>")
    assert (longest_sequence(cfg), longest_text(cfg)) == (24, 46)
    none = settings(tmp_path, **changes, **{R + "val_kwargs__stop": "[]"}).config
    rollout = none.actor_rollout_ref.rollout
    assert sampling_of(rollout.val_kwargs, rollout, none.data, greedy=False).stop == ()


def test_a_run_ends_answers_and_validates_longer_ones(process_group, tiny_trainer):
    """The stop text is one character that a policy with random weights soon generates."""
    plain = tiny_trainer(data__seed=3).step(1).samples
    changes = {R + "stop": "['1','2','3','4','5','6','7','8','9','0']", R + "val_kwargs__max_tokens": 20}
    trainer = tiny_trainer(data__seed=3, **changes)
    samples = trainer.step(1).samples
    shorter = samples["response_length"] < plain["response_length"]
    assert shorter.any()
    assert (samples["response_length"] <= plain["response_length"]).all()
    assert not samples["truncated"][shorter].any()
