"""What measurements with noise say: how far they are believed, and for how long. Pure functions of values."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Final

from bamboo_core.planning.steps.grid_rates import ALIKE

KEPT: Final = 24  # measurements of one kind
PRIOR: Final = 6  # measurements for which all that were made on another grid count
HALF_LIFE: Final = 1800.0  # seconds in which a measurement loses half of its weight
LEAST_WEIGHT: Final = 0.1  # of a measurement; one that has less is forgotten
FREE_CHANGES: Final = 2  # of the grid, which do not wait for the ones before
REST: Final = 3600.0  # seconds from the last of these to the next change; twice as long before each further one
NORMAL: Final = 1.4826  # median deviations in a standard deviation
OF_MEDIAN: Final = 1.2533  # the standard error of a median over that of a mean

Looks = tuple[tuple[float, ...], ...]  # what each layer takes, as it was found at several moments, oldest first


def usual(looks: Looks) -> tuple[float, ...]:
    """What each layer takes: the median of what was found."""
    return tuple(map(median, zip(*looks, strict=True)))


def have_changed(looks: Looks) -> bool:
    """Do layers take longer, or less, than they did, by more than the noise? So it is if the newer half of all looks
    found more than each of the older half, or less: noise alone does that once in a million times.
    """
    works = [sum(costs) for costs in looks]
    older, newer = works[: KEPT // 2], works[KEPT // 2 :]
    apart = len(works) == KEPT and (min(newer) > max(older) or max(newer) < min(older))
    return apart and abs(median(newer) / median(older) - 1) > ALIKE


def doubt(seconds: Sequence[float]) -> float:
    """The share by which the median of these is uncertain: two standard errors. 0 of fewer than two."""
    if len(seconds) < 2:
        return 0.0
    middle = median(seconds)
    deviation = median(abs(one - middle) for one in seconds)
    return 2 * OF_MEDIAN * NORMAL * deviation / middle / math.sqrt(len(seconds))


def weight(age: float) -> float:
    """How much a measurement counts, from 1 to 0, so many seconds before the newest one. It falls in steps, so that
    what depends on it stays the same for a while.
    """
    found = math.exp2(-(age // HALF_LIFE))
    return found if found >= LEAST_WEIGHT else 0.0


def rest(changes: int) -> float:
    """Seconds from the newest change of the grid to the next one, after so many with the same workers and layers."""
    return REST * 2.0 ** (changes - FREE_CHANGES) if changes >= FREE_CHANGES else 0.0
