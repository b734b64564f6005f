"""Nodes that come and go as in the published simulator, with the same random draws in the same order. Pure.

In each hour every node is taken away with the same probability, at a random second, and each free place gets a node
with a probability that depends on the hour of the day. An hour's events are drawn when it begins.
"""

import heapq
import random

from bamboo.traces.trace import Change, Trace

HOUR_MS = 3_600_000
Moment = tuple[int, bool, str]  # milliseconds, whether the node is added, its name


class HourlyNodes:
    """A generator of one run's nodes. Call `first`, then `hour` for each hour in order: they share random numbers."""

    def __init__(self, seed: int, removal: float, capacity: int, start_hour: int = 0) -> None:
        self._rng = random.Random(seed)
        self._removal, self._capacity, self._start_hour = removal, capacity, start_hour
        self._additions = [self._rng.random() for _ in range(24)]
        self._named = 0

    def first(self) -> list[str]:
        """Return the initial nodes. Call it once, before the first hour."""
        rng, addition = self._rng, self._additions[self._start_hour]
        self._named = sum(addition > rng.random() for _ in range(self._capacity))
        return [_name(number + 1) for number in range(self._named)]

    def hour(self, begin: int, there: list[str]) -> list[Moment]:
        """Return the events of the hour that begins at `begin` (ms). there: the present nodes, oldest first."""
        addition = self._additions[(self._start_hour + begin // HOUR_MS) % 24]
        probabilities = (self._removal, addition, begin)
        moments, self._named = _hour(self._rng, there, self._named, self._capacity, probabilities)
        return moments


def _hour(
    rng: random.Random, there: list[str], named: int, capacity: int, hour: tuple[float, float, int]
) -> tuple[list[Moment], int]:
    """Return an hour's events, and the number of nodes named so far. named: the number before this hour. hour: removal
    probability, addition probability, and the millisecond at which the hour begins.
    """
    removal, addition, begin = hour
    draw, second = rng.random, rng.randrange
    removals = [(begin + second(0, 3600) * 1000, node) for node in there if removal > draw()]
    heapq.heapify(removals)
    free = capacity - len(there) + len(removals)
    candidates = sorted(begin + second(0, 3600) * 1000 for _ in range(free) if addition > draw())
    count, number = len(there), 0
    moments: list[Moment] = []
    while removals or number < len(candidates):
        if number < len(candidates) and (not removals or candidates[number] <= removals[0][0]):
            at = candidates[number]
            number += 1
            if count >= capacity:
                continue
            count += 1
            named += 1
            moments.append((at, True, _name(named)))
            if removal > draw():
                gone = begin + second(0, 3600) * 1000
                if gone >= at:
                    heapq.heappush(removals, (gone, _name(named)))
        else:
            at, node = heapq.heappop(removals)
            count -= 1
            moments.append((at, False, node))
    return moments, named


def _name(number: int) -> str:
    return f"node{number}"


def recorded(trace: Trace) -> list[Moment]:
    """Return a recording's changes, with times in whole milliseconds."""
    return [(round(change.at * 1000), change.change is Change.ADD, change.node) for change in trace.changes]
