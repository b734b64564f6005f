"""How long to wait before workers are requested again."""

from bamboo_operator.pods.starting.start_backoff import FIRST_SECONDS, LAST_SECONDS, StartBackoff


def test_the_first_workers_that_end_at_once_are_replaced_at_once() -> None:
    backoff = StartBackoff().after(0, 8, 100.0, "exited with code 1")
    assert (backoff.rounds, backoff.pause) == (1, 0.0)
    assert not backoff.holds(100.0)


def test_workers_that_were_made_together_are_one_round() -> None:
    backoff = StartBackoff().after(0, 8, 100.0, "first").after(5, 9, 101.0, "second")
    assert (backoff.rounds, backoff.detail) == (1, "second")
    assert backoff.after(8, 9, 102.0, "third").rounds == 2


def test_each_round_in_vain_makes_the_next_wait_longer() -> None:
    backoff, pauses = StartBackoff(), []
    for number in range(12):
        backoff = backoff.after(number, number + 1, 50.0 * number, "")
        pauses.append(backoff.pause)
    assert pauses[:4] == [0, FIRST_SECONDS, 2 * FIRST_SECONDS, 4 * FIRST_SECONDS]
    assert pauses[-1] == LAST_SECONDS
    assert backoff.holds(50.0 * 11 + LAST_SECONDS - 1)
    assert not backoff.holds(50.0 * 11 + LAST_SECONDS)
