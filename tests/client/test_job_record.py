"""The record of a simulated run."""

import pytest

from bamboo.simulation.job.job_record import JobRecord, Series, mean_over_time

HOUR = 3600.0


def series(hours: float, preemptions: int, samples: float) -> Series:
    record = JobRecord(samples=1)
    for number in range(preemptions):
        record.note("preemptions", hours * HOUR * (number + 0.5) / preemptions)
    record.steps.append((0.0, hours * HOUR, samples))
    return record.series(hours * HOUR)


def test_what_is_counted_so_far_never_falls_when_a_run_ends() -> None:
    runs = [series(1.0, 8, 3600.0), series(2.0, 2, 3600.0)]
    hours, counted = mean_over_time("preemptions", runs)
    assert hours[-1] == 2.0
    assert counted == sorted(counted)
    assert counted[-1] == (8 + 2) / 2
    rates = mean_over_time("throughput", runs)[1]
    assert (round(rates[10], 6), round(rates[-1], 6)) == (0.75, 0.5), "a rate is that of the runs that still go on"


def test_steps_that_had_been_done_before_are_redone_time() -> None:
    """Of four steps in 40 s two are new; a loss makes the next new step 3 s longer; the last step is not new."""
    record = JobRecord(samples=1)
    record.stepped(0.0, 40.0, 4, 2)
    record.stepped(40.0, 53.0, 1, 1)
    record.pauses.append((45.0, 3.0))
    record.stepped(53.0, 63.0, 1, -2)
    found = record.figures(100.0)
    assert (found.steps, found.redone * HOUR, found.trained * HOUR) == (3, pytest.approx(30), pytest.approx(30))
