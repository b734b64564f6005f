"""Noisy measurements: how far they are trusted, and for how long. Pure functions of values."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Final

from bamboo_core.planning.steps.grid_rates import ALIKE

KEPT: Final = 24  # measurements of one kind
PRIOR: Final = 6  # weight, in measurements, of all measurements on the previous grid together
HALF_LIFE: Final = 1800.0  # seconds in which a measurement loses half of its weight
LEAST_WEIGHT: Final = 0.1  # weight below which a measurement is forgotten
FREE_CHANGES: Final = 2  # changes of the grid without a rest before them
REST: Final = 3600.0  # seconds between the last free change and the next one, doubled with each further one
NORMAL: Final = 1.4826  # median deviations in a standard deviation
OF_MEDIAN: Final = 1.2533  # the standard error of a median over that of a mean

Looks = tuple[tuple[float, ...], ...]  # measured seconds of each layer at several moments, oldest first


def usual(looks: Looks) -> tuple[float, ...]:
    """Return each layer's time: the median of its measurements."""
    return tuple(map(median, zip(*looks, strict=True)))


def have_changed(looks: Looks) -> bool:
    """Return whether the time of all layers together has changed by more than the noise.

    Of KEPT measurements, all of the newer half must lie above, or all below, the older half (by noise alone once in a
    million times), and the halves' medians must differ by more than ALIKE. False with fewer measurements.
    """
    works = [sum(costs) for costs in looks]
    older, newer = works[: KEPT // 2], works[KEPT // 2 :]
    apart = len(works) == KEPT and (min(newer) > max(older) or max(newer) < min(older))
    return apart and abs(median(newer) / median(older) - 1) > ALIKE


def doubt(seconds: Sequence[float]) -> float:
    """Return the relative uncertainty of the median: two standard errors; 0 for fewer than two values."""
    if len(seconds) < 2:
        return 0.0
    middle = median(seconds)
    deviation = median(abs(one - middle) for one in seconds)
    return 2 * OF_MEDIAN * NORMAL * deviation / middle / math.sqrt(len(seconds))


def weight(age: float) -> float:
    """Return the weight, 0 to 1, of a measurement that is `age` seconds older than the newest one.

    The weight falls in steps, so that results which depend on it stay the same for a while.
    """
    share = math.exp2(-(age // HALF_LIFE))
    return share if share >= LEAST_WEIGHT else 0.0


def rest(changes: int) -> float:
    """Return the least seconds from the last of `changes` grid changes, with the same workers, to the next change."""
    return REST * 2.0 ** (changes - FREE_CHANGES) if changes >= FREE_CHANGES else 0.0
