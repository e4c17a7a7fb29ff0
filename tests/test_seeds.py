"""All random draws have separate streams: by run seed, purpose, step, epoch, prompt, sample."""

import itertools

import numpy as np

from rltrain.common.seeds import PURPOSES, sample_seeds, stream, uniforms


def test_random_numbers_are_a_function_of_seed_and_position():
    seeds = sample_seeds(5, 2, [3, 8], 2)
    assert np.array_equal(uniforms(seeds, 0, 10)[:, 4:], uniforms(seeds, 4, 6))
    assert np.array_equal(sample_seeds(5, 2, [8], 2), seeds[2:])
    many = sample_seeds(0, 0, range(2000), 4)
    assert len(set(many.tolist())) == 8000
    numbers = uniforms(many, 0, 50)
    assert abs(numbers.mean() - 0.5) < 0.002
    assert numbers.min() >= 0
    assert numbers.max() < 1


def test_runs_over_seeds_share_no_answer():
    """Exchanging seed and step must not give the same stream."""
    where = list(itertools.product(range(-2, 12), range(12), ("train", "val")))
    drawn = [sample_seeds(seed, step, [0, 1, 2], 3, split) for seed, step, split in where]
    assert len(set(np.concatenate(drawn).tolist())) == len(where) * 9
    first = np.array([uniforms(each, 0, 1)[:, 0] for each in drawn])
    assert np.abs(np.corrcoef(first.T) - np.eye(9)).max() < 0.25, "336 numbers of 9 samples: a deviation of 0.055"


def test_every_prompt_may_have_a_step_of_its_own():
    by_row = sample_seeds(3, np.array([4, 9]), [5, 6], 2)
    assert np.array_equal(by_row, np.concatenate([sample_seeds(3, 4, [5], 2), sample_seeds(3, 9, [6], 2)]))


def test_no_two_names_share_a_stream():
    """Names with an additional zero, or with a seed of two words instead of one, also differ."""
    seeds = (0, 1, 2, 3, 2**32, 2**32 + 1, -1)
    numbers = [each for count in range(4) for each in itertools.product(range(3), repeat=count)]
    names = list(itertools.product(seeds, PURPOSES, numbers))
    found = {int(stream(seed, purpose, *each).random_raw()) for seed, purpose, each in names}
    order = itertools.product(seeds[:4], range(3))  # as data/batch_sampler.py has it
    found |= {int(np.random.Philox(np.random.SeedSequence([*each])).random_raw()) for each in order}
    assert len(found) == len(names) + 12
