from rltrain.common.clock import Backoff


def test_a_pause_doubles_with_every_failure_up_to_the_longest():
    backoff = Backoff(0.5, 30.0)
    pauses = [backoff.pause_s(failures) for failures in (0, 1, 2, 3, 7, 8, 10**6)]
    assert pauses == [0.5, 0.5, 1.0, 2.0, 30.0, 30.0, 30.0]


def test_jitter_varies_a_pause_by_its_share():
    pauses = {Backoff(4.0, 30.0, jitter=0.25).pause_s(1) for _ in range(50)}
    assert len(pauses) > 1
    assert all(3.0 <= pause <= 5.0 for pause in pauses)
