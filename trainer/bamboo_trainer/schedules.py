"""Learning rate schedules, also for an optimizer's other hyperparameters: cosine, linear, one-cycle and others.

Each function here returns a pure function of the number of steps done (0 for the first step), for
`Task.learning_rate` or `Task.schedules`.

A linear warm-up lasts `warmup` steps: the first step has peak / warmup, the last one has the peak. The decay of
`polynomial`, `linear` and `cosine` ends when `steps` steps are done; from then on the value is `final`.
Invalid arguments raise ValueError.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

Schedule = Callable[[int], float]


def constant(value: float, warmup: int = 0) -> Schedule:
    """Return a schedule with a constant value, after a linear warm-up if `warmup` is given."""
    _check(warmup=warmup)
    return lambda step: _warming(value, warmup, step, value)


def linear(peak: float, *, steps: int, warmup: int = 0, final: float = 0.0) -> Schedule:
    """Return a schedule that decays linearly from the peak to `final`."""
    return polynomial(peak, steps=steps, warmup=warmup, final=final, power=1.0)


def polynomial(peak: float, *, steps: int, warmup: int = 0, final: float = 0.0, power: float = 2.0) -> Schedule:
    """Return the schedule final + (peak - final) * (1 - p) ** power; p: from 0 after the warm-up to 1 at `steps`."""
    _check(warmup=warmup, steps=steps)
    if power <= 0:
        raise ValueError(f"power must be positive, got {power}")

    def at(step: int) -> float:
        return _warming(peak, warmup, step, final + (peak - final) * (1 - _progress(step, warmup, steps)) ** power)

    return at


def cosine(peak: float, *, steps: int, warmup: int = 0, final: float = 0.0) -> Schedule:
    """Return a cosine decay schedule, along half a cosine from the peak to `final`."""
    _check(warmup=warmup, steps=steps)

    def at(step: int) -> float:
        down = (1 + math.cos(math.pi * _progress(step, warmup, steps))) / 2
        return _warming(peak, warmup, step, final + (peak - final) * down)

    return at


def inverse_sqrt(peak: float, *, warmup: int) -> Schedule:
    """Return the inverse square root schedule of the original Transformer: after the warm-up, the value at `step` is
    peak * sqrt(warmup / (step + 1)).
    """
    if warmup < 1:
        raise ValueError(f"warmup must be at least 1, got {warmup}")
    return lambda step: _warming(peak, warmup, step, peak * math.sqrt(warmup / (step + 1)))


def milestones(value: float, at: Sequence[int], factor: float = 0.1) -> Schedule:
    """Return a step decay schedule, like torch's MultiStepLR: each step in `at` multiplies the value by `factor`."""
    steps = sorted(at)
    if steps and steps[0] < 0:
        raise ValueError(f"milestones must be steps from 0 up, got {steps[0]}")
    return lambda step: float(value * factor ** bisect_right(steps, step))


def one_cycle(
    peak: float, *, steps: int, rise: float = 0.3, start_factor: float = 25.0, final_factor: float = 1e4
) -> Schedule:
    """Return the same schedule as torch's OneCycleLR: from peak / start_factor up to the peak, and down to the start
    value / final_factor, along half cosines.

    rise: the share of the steps in which the value rises. For momentum or betas, which first fall, use `cycled`.
    """
    if min(start_factor, final_factor) <= 0:
        raise ValueError(f"start_factor and final_factor must be above 0, got {start_factor} and {final_factor}")
    low = peak / start_factor
    return _cycle((low, peak, low / final_factor), steps, rise)


def cycled(high: float, low: float, *, steps: int, rise: float = 0.3) -> Schedule:
    """Return a schedule for momentum or betas while the rate follows `one_cycle`: from high to low and back."""
    return _cycle((high, low, high), steps, rise)


def _cycle(values: tuple[float, float, float], steps: int, rise: float) -> Schedule:
    _check(steps=steps)
    if not 0 < rise < 1:
        raise ValueError(f"rise must be between 0 and 1, got {rise}")
    begin, middle, end = values
    turn, last = rise * steps - 1, steps - 1

    def at(step: int) -> float:
        if step <= turn and turn > 0:
            return _between(begin, middle, step / turn)
        return _between(middle, end, min(1.0, (step - turn) / (last - turn)) if last > turn else 1.0)

    return at


def _between(begin: float, end: float, progress: float) -> float:
    return end + (begin - end) / 2 * (1 + math.cos(math.pi * progress))


def _warming(peak: float, warmup: int, step: int, after: float) -> float:
    return peak * (step + 1) / warmup if step < warmup else after


def _progress(step: int, warmup: int, steps: int) -> float:
    """Return the progress of the decay, from 0 at the end of the warm-up to 1 at `steps`."""
    if step >= steps:
        return 1.0
    return (step - warmup) / (steps - warmup) if step > warmup else 0.0


def _check(warmup: int = 0, steps: int | None = None) -> None:
    if warmup < 0:
        raise ValueError(f"warmup must be at least 0, got {warmup}")
    if steps is not None and steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if steps is not None and warmup > steps:
        raise ValueError(f"warmup must be at most steps ({steps}), got {warmup}")
