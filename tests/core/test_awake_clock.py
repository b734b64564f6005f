"""`AwakeClock`, which leaves out nearly all time in which its process was stopped."""

from bamboo_core.coordinator.awake_clock import AwakeClock


def test_time_passes_only_while_somebody_reads_it() -> None:
    real = 100.0
    clock = AwakeClock(lambda: real)
    assert clock() == 100.0
    real += 0.125
    assert clock() == 100.125
    real += 60.0  # stopped, and continued
    assert clock() == 100.375
    real += 0.125
    assert clock() == 100.5
