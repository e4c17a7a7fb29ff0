"""Which settings cannot win: the test by betting, and how often it errs."""

import numpy as np

from rltrain.tools.resolution.race import ERROR_RATE, cannot_win, random_order, wealth

N = 200


def stopped_at(differences, num_settings=5):
    """After how many of them, looking after every tenth; None where the setting came to the end."""
    looks = range(10, len(differences) + 1, 10)
    return next((look for look in looks if cannot_win(differences[:look], len(differences), num_settings)), None)


def test_a_setting_as_good_as_the_best_is_hardly_ever_stopped_however_often_it_is_looked_at():
    equal = np.repeat([-1.0, 1.0, 0.0], [60, 60, 80])
    random = np.random.default_rng(0)
    stops = [stopped_at(random.permutation(equal), num_settings=2) is not None for _ in range(400)]
    assert 0 < np.mean(stops) <= ERROR_RATE


def test_a_setting_that_is_much_worse_is_stopped_early_and_a_better_one_never():
    worse = np.repeat([-1.0, 1.0, 0.0], [90, 10, 100])
    random = np.random.default_rng(0)
    stops = [stopped_at(random.permutation(worse)) for _ in range(50)]
    assert max(stops) < N
    assert np.median(stops) <= 60
    assert not any(stopped_at(-random.permutation(worse)) for _ in range(50))


def test_the_wealth_is_that_of_a_gambler_who_bets_by_what_came_before():
    # The first bet is 0, as nothing is known. Then 9 prompts are left and need 1/9 each; 1 was lost, so the bet is
    # 1 / (1/4 + 1) = 0.8, of at most 0.75 / (1 - 1/9).
    assert wealth(np.array([-1.0]), 10) == 1
    bet = min(1 / 1.25, 0.75 / (8 / 9))
    assert np.isclose(wealth(np.array([-1.0, -1.0]), 10), 1 + bet * (1 + 1 / 9))
    # What was owned once counts, whatever was lost since.
    assert wealth(np.array([-1.0, -1.0, 1.0]), 10) == wealth(np.array([-1.0, -1.0]), 10)


def test_a_setting_that_cannot_catch_up_is_stopped_whatever_comes():
    assert wealth(np.array([-1.0, -1.0, -1.0, 0.0]), 6) == np.inf
    assert wealth(np.array([-1.0, -1.0, -1.0]), 6) < np.inf


def test_all_settings_share_one_order():
    assert sorted(random_order(7).tolist()) == list(range(7))
    assert (random_order(7) == random_order(7)).all()
    assert random_order(50).tolist() != list(range(50))
