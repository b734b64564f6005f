"""How long this worker waits at each place of its schedule, and whether a piece of redundant work fits there.

A wait that redundant work has lengthened elsewhere looks like a longer bubble, and filling that one would lengthen the
next. So bubbles are measured only in calibration steps, in which nobody runs redundant work: the second and third step
of an epoch, and every `PERIOD`-th after them. The smallest of the last two measurements counts.
"""

from collections import deque

from bamboo_core.planning.plan import Cell

PERIOD = 16  # steps
SAFETY = 0.95  # of the expected bubble is used
MARGIN = 1.1  # a piece may take that much longer than usual
SWITCHING_SECONDS = 0.0003
SMOOTHING = 0.3  # weight of the newest measurement of a cost

Slot = tuple[Cell, int]  # a cell and the index of the instruction that waits


class BubbleBudget:
    """Seconds throughout. Knows no clock."""

    def __init__(self) -> None:
        self._since = -1  # the step in which the epoch began
        self._bubbles: dict[Slot, deque[float]] = {}
        self._costs: dict[tuple[int, int], float] = {}
        self._own_layer: float | None = None

    def restart(self, step: int) -> None:
        """Roles have changed in that step: what was measured before says nothing any more."""
        self._since = step
        self._bubbles.clear()

    def measures(self, step: int) -> bool:
        """Is it a calibration step?"""
        age = step - self._since
        return age in (1, 2) or (age > 0 and age % PERIOD == 0)

    def waited(self, slot: Slot, seconds: float) -> None:
        """In a calibration step, the instruction at that slot had to wait so long."""
        self._bubbles.setdefault(slot, deque(maxlen=2)).append(seconds)

    def ran_forward(self, seconds: float, layers: int) -> None:
        """A whole forward of the worker's own stage: the first guess of what a layer of the next stage takes."""
        self._own_layer = _smooth(self._own_layer, seconds / layers)

    def ran_layer(self, stage: int, layer: int, seconds: float) -> None:
        self._costs[stage, layer] = _smooth(self._costs.get((stage, layer)), seconds)

    def fits(self, slot: Slot, idle: float, stage: int, layer: int) -> bool:
        """Is there room for that layer in the slot's bubble, of which `idle` seconds are over?"""
        bubbles, cost = self._bubbles.get(slot, ()), self._costs.get((stage, layer), self._own_layer)
        if len(bubbles) < 2 or cost is None:
            return False
        return min(bubbles) * SAFETY - idle - SWITCHING_SECONDS >= cost * MARGIN


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else (1 - SMOOTHING) * old + SMOOTHING * new
