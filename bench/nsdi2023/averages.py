"""Averages over time as the published simulator computes them: the same sums, of the same terms in the same order, so
that results agree to the last bit. Arguments `now` and `took` are in milliseconds, `begin` and `end` in hours.
"""

from bamboo.simulation.figures import SimulationError
from nsdi2023.workloads import SPOT_USD

SECOND_MS = 1000.0
HOUR_MS = 3_600_000.0


class BilledHours:
    """The number of billed nodes over time, and their cost. The first number recorded after moment 0 counts from hour
    0, so a node may be billed before it comes.
    """

    def __init__(self) -> None:
        self._since: list[float] = []
        self._nodes: list[int] = []

    def moment_over(self, now: int, nodes: int) -> None:
        """Record the number of nodes after a moment's events. The number at moment 0 is not recorded."""
        if not self._since:
            if now > 0:
                self._change(0.0, nodes)
        elif nodes != self._nodes[-1]:
            self._change(now / HOUR_MS, nodes)

    def _change(self, hour: float, nodes: int) -> None:
        self._since.append(hour)
        self._nodes.append(nodes)

    def usd_per_hour(self) -> float:
        """Return the present USD per hour."""
        return self._nodes[-1] * SPOT_USD

    def usd(self, begin: float, end: float) -> float:
        """Return the USD that the nodes cost between two hours, summed from the latest change to the earliest."""
        total = 0.0
        for since, nodes in zip(reversed(self._since), reversed(self._nodes), strict=True):
            if since <= begin:
                return total + nodes * SPOT_USD * (end - begin)
            total += nodes * SPOT_USD * (end - since)
            end = since
        raise AssertionError("the first change is at hour 0")

    def averages(self, end: float) -> tuple[float, float]:
        """Return the mean number of nodes and the mean USD per hour, from hour 0 to `end`. Like the published
        simulator, it also counts changes after `end`; the last interval then has a negative length.
        """
        node_hours = usd = 0.0
        for since, until, nodes in zip(self._since, [*self._since[1:], end], self._nodes, strict=True):
            node_hours += (until - since) * nodes
            usd += (until - since) * (nodes * SPOT_USD)
        return node_hours / end, usd / end


class StepAverages:
    """The mean throughput (samples per second) and value (throughput per USD per hour) over the time of the steps."""

    def __init__(self, samples: int, billed: BilledHours) -> None:
        self._samples, self._billed = samples, billed
        self._first: int | None = None
        self._last = 0
        self._steps = 0
        self._throughput = self._value = 0.0

    def begin(self, now: int) -> None:
        """Record when the first grid begins to train. A later call changes nothing, so time without a grid counts as
        part of the next step.
        """
        if self._first is None:
            self._first = self._last = now

    @property
    def steps(self) -> int:
        return self._steps

    @property
    def last(self) -> int:
        """The millisecond at which the last step ended."""
        return self._last

    def complete(self, now: int) -> None:
        """Record a step in which nodes may have come and gone. Raises SimulationError if no node was billed in it."""
        began, ended, took = self._last / HOUR_MS, now / HOUR_MS, now - self._last
        per_second = self._samples / (took / SECOND_MS)
        usd = self._billed.usd(began, ended)
        if not usd:
            raise _nobody_paid(ended)
        usd_per_hour = usd / (took / HOUR_MS)
        self._throughput += (ended - began) * per_second
        self._value += (ended - began) * (per_second / usd_per_hour)
        self._last = now
        self._steps += 1

    def complete_alike(self, took: int, count: int) -> None:
        """Record `count` consecutive steps of `took` ms on the present nodes. Raises SimulationError without nodes."""
        per_second, took_hours, usd = self._samples / (took / SECOND_MS), took / HOUR_MS, self._billed.usd_per_hour()
        throughput, value, began = self._throughput, self._value, self._last / HOUR_MS
        if not usd:
            raise _nobody_paid((self._last + took) / HOUR_MS)
        for now in range(self._last + took, self._last + took * count + 1, took):
            ended = now / HOUR_MS
            hours = ended - began
            throughput += hours * per_second
            value += hours * (per_second / (usd * hours / took_hours))
            began = ended
        self._throughput, self._value = throughput, value
        self._last += took * count
        self._steps += count

    def averages(self) -> tuple[float, float]:
        """Return the mean throughput and value from the first grid's start to the last step. Needs a complete step."""
        assert self._first is not None
        hours = self._last / HOUR_MS - self._first / HOUR_MS
        return self._throughput / hours, self._value / hours


def _nobody_paid(hour: float) -> SimulationError:
    """Return the error for a step without a billed node. Even a grid without nodes steps on until it is formed anew."""
    return SimulationError(f"a step ends after {hour:.2f} hours without a node that is paid for, so it has no value")
