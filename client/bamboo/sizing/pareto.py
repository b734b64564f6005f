"""Pareto-optimal choices by time and cost. Pure."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
Point = tuple[float, float]  # time and cost; less is better, infinite if it never ends


def dominates(one: Point, other: Point, slack: float = 0.0) -> bool:
    """Return whether point `one` is better than `other` in time or cost, and worse in neither.

    slack: if not 0, `one` must be better in both by more than this share.
    """
    if slack:
        return one[0] * (1 + slack) < other[0] and one[1] * (1 + slack) < other[1]
    return one[0] <= other[0] and one[1] <= other[1] and one != other


def front(choices: Sequence[T], point: Callable[[T], Point], slack: float = 0.0) -> list[T]:
    """Return the Pareto front in the choices' order. slack: as in `dominates`; 0 keeps only the first of equal choices.

    Choices with infinite time or cost are left out; if all choices are infinite, all are returned.
    """
    points = [point(choice) for choice in choices]
    ends = [i for i, (time, cost) in enumerate(points) if time + cost < float("inf")]
    if not ends:
        return list(choices)
    kept, least = list[int](), float("inf")
    for i in sorted(ends, key=lambda i: points[i]):
        time, cost = points[i]
        if slack:
            # Ascending in time: the cheapest choice among those faster by more than the slack decides.
            faster = [points[j][1] for j in ends if points[j][0] * (1 + slack) < time]
            if not faster or min(faster) * (1 + slack) >= cost:
                kept.append(i)
        elif cost < least:
            kept.append(i)
            least = cost
    return [choices[i] for i in sorted(kept)]
