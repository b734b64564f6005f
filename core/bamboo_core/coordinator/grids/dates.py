"""The date by which a job is to be done, seen from its coordinator, whose own clock shows no time of day. Pure."""

import math
from datetime import datetime, timedelta
from typing import Final

from bamboo_core.coordinator.events import TimeTold
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.job.budget_reach import DateReach, Pace, date_reach, done_by

USED: Final = 0.9  # of the time until the date: steps and losses are estimates, and pauses come on top
NOTCHES: Final = 16  # speeds for each doubling, so that what is needed is not another speed all the time
DRIFT: Final = timedelta(seconds=1)  # of the coordinator's clock, which stands still while its process does


def time_told(state: CoordinatorState, time: datetime, now: float) -> TimeTold | None:
    """What the shell has to tell at that time of day: nothing of a job without a date, or that knows it well."""
    if done_by(state.spec) is None:
        return None
    began = time - timedelta(seconds=now)
    return TimeTold(time) if state.terms.began_at is None or abs(began - state.terms.began_at) > DRIFT else None


def pace(state: CoordinatorState) -> Pace:
    """At which the job gets on; of a coordinator that has seen no step yet as it was before it."""
    known, stop = state.progress.counting, state.terms.early_stop
    return Pace(
        step=state.step if known else state.progress.earlier.step,
        steps=stop.wanted_steps if stop else state.spec.training.known_steps,
        step_seconds=state.usual_step or state.progress.earlier.step_seconds,
    )


def reach(state: CoordinatorState, now: float) -> DateReach | None:
    """Whether the job will be done by its date; None if it has none, or nobody has told the time."""
    date = done_by(state.spec)
    if date is None or state.terms.began_at is None:
        return None
    return date_reach(date, state.terms.began_at + timedelta(seconds=now), pace(state))


def needed_speed(state: CoordinatorState, now: float) -> float | None:
    """Samples a second with which the job is done by its date, with some time to spare; math.inf if it cannot be. None
    without a date, or if nobody knows the time or how many steps are left.
    """
    date, left = done_by(state.spec), pace(state).left
    if date is None or state.terms.began_at is None or left is None:
        return None
    seconds = (date - state.terms.began_at).total_seconds() - now
    if seconds <= 0 or not left:
        return math.inf
    speed = left * state.spec.training.global_batch_size / (USED * seconds)
    return math.exp2(math.ceil(NOTCHES * math.log2(speed)) / NOTCHES)
