"""Simulation of a strategy on a timeline of nodes. Pure. Checkpoints are taken at intervals of training time; their
pauses are averaged into a constant slowdown.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bamboo.simulation.job.zone_traffic import ZONE_TRAFFIC_PRICE, traffic_usd
from strategies.policy import Policy, Reaction, View, crossing_bytes
from strategies.timeline import HOUR, NodesChange, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyResult:
    """The result of a simulated run of one strategy. Times are in seconds."""

    duration: float
    samples: float  # trained, without repetitions
    usd: float  # of nodes and of traffic between zones
    node_seconds: float
    preemptions: int
    # seconds, which add up to the duration
    productive: float
    redone: float  # repeated
    stalled: float  # without progress during a start or a repair
    idle: float  # without enough nodes
    saving: float  # pauses for checkpoints
    crossed: float = 0.0  # bytes that crossed zones
    zone_usd: float = 0.0  # the part of usd for traffic between zones

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.samples / self.duration

    @property
    def usd_per_hour(self) -> float:
        return self.usd / (self.duration / HOUR)

    @property
    def value(self) -> float:
        """Samples per second for each USD per hour; 0 if nothing was paid."""
        return self.throughput / self.usd_per_hour if self.usd else 0.0

    @property
    def goodput(self) -> float:
        """The share of the duration spent on training that was not repeated later, whatever its speed."""
        return self.productive / self.duration

    @property
    def nodes(self) -> float:
        return self.node_seconds / self.duration


def drive(policy: Policy, nodes: Timeline, zone_price: float = ZONE_TRAFFIC_PRICE) -> StrategyResult:
    """Simulate a strategy on a timeline of nodes. zone_price: USD per GB that crosses zones, each way."""
    return _Drive(policy, nodes, zone_price).run()


class _Drive:
    """The state of one run. _unsaved: training since the newest safe checkpoint, as (seconds, samples per second)."""

    def __init__(self, policy: Policy, nodes: Timeline, zone_price: float) -> None:
        self._policy, self._nodes, self._zone_price = policy, nodes, zone_price
        self._crossing = self._crossed = 0.0  # bytes between zones: per sample at present, and of all so far
        self._now = self._samples = self._rate = 0.0
        self._until = 0.0  # nothing is trained before this time
        self._wake: float | None = None
        self._unsaved: deque[tuple[float, float]] = deque()
        self._since = 0.0  # seconds of training since the newest safe checkpoint was taken
        self._redone = self._stalled = self._idle = self._trained = self._saving = 0.0
        saving = policy.saving
        self._share = saving.every / (saving.every + saving.pause) if saving else 1.0

    def run(self) -> StrategyResult:
        policy, ready = self._policy, dict[str, None]()
        state: Any = policy.begin()
        changes = deque(self._nodes.changes)
        while True:
            at = min(changes[0].at if changes else self._nodes.duration, self._nodes.duration)
            woken = self._wake is not None and self._wake < at
            if self._wake is not None and woken:
                at, self._wake = self._wake, None
            self._advance(at)
            if at >= self._nodes.duration:
                break
            change = NodesChange(at=at) if woken else changes.popleft()
            for name in change.lost:
                ready.pop(name, None)
            ready.update(dict.fromkeys(change.joined))
            view = View(
                now=at, ready=self._ordered(ready), joined=change.joined, lost=change.lost, next_save=self._next_save()
            )
            state, reaction = policy.react(state, view)
            if reaction is not None:
                self._apply(reaction)
            if self._nodes.zones:
                self._crossing = crossing_bytes(policy.costs, policy.placement(state), self._nodes.zones)
        return self._result()

    def _ordered(self, ready: Iterable[str]) -> tuple[str, ...]:
        """Return the nodes zone by zone, so that pipelines span few zones; within a zone, in order of arrival."""
        zones = self._nodes.zones
        return tuple(sorted(ready, key=lambda name: zones.get(name, ""))) if zones else tuple(ready)

    def _advance(self, at: float) -> None:
        stalled = max(0.0, min(at, self._until) - self._now)
        going = at - self._now - stalled
        self._now = at
        self._stalled += stalled if self._rate else 0.0
        self._idle += 0.0 if self._rate else stalled + going
        if not self._rate or not going:
            return
        training = going * self._share
        self._saving += going - training
        self._trained += training
        self._samples += training * self._rate
        self._crossed += training * self._rate * self._crossing
        if self._policy.saving:
            self._unsaved.append((training, self._rate))
            self._since += training
            self._save()

    def _save(self) -> None:
        """Drop the part of `_unsaved` that is saved: a checkpoint is safe `delay` seconds after its pause."""
        saving = self._policy.saving
        assert saving is not None
        safe = int((self._since - saving.delay * self._share) // saving.every) * saving.every
        if safe <= 0:
            return
        self._since -= safe
        while safe > 1e-9 and self._unsaved:
            seconds, rate = self._unsaved.popleft()
            if seconds > safe:
                self._unsaved.appendleft((seconds - safe, rate))
            safe -= seconds

    def _next_save(self) -> float:
        saving = self._policy.saving
        if not saving or not self._rate:
            return 0.0
        return (saving.every - self._since % saving.every) / self._share + max(0.0, self._until - self._now)

    def _apply(self, reaction: Reaction) -> None:
        before = self._rate
        if reaction.redo is None:
            self._again(sum(seconds for seconds, _ in self._unsaved), sum(a * b for a, b in self._unsaved))
            self._unsaved.clear()
            self._since = 0.0
        elif reaction.redo and before and self._now >= self._until:
            redo = min(reaction.redo, self._samples)
            self._again(redo / before, redo)
        self._rate = reaction.rate
        self._until = max(self._until, self._now + reaction.stall)
        self._wake = None if reaction.wake is None else self._now + reaction.wake

    def _again(self, seconds: float, samples: float) -> None:
        self._redone += min(seconds, self._trained - self._redone)
        self._samples = max(0.0, self._samples - samples)

    def _result(self) -> StrategyResult:
        nodes, across = self._nodes, traffic_usd(self._crossed, self._zone_price)
        return StrategyResult(
            duration=nodes.duration,
            samples=self._samples,
            usd=nodes.usd + across,
            node_seconds=nodes.node_seconds,
            preemptions=nodes.removed,
            productive=self._trained - self._redone,
            redone=self._redone,
            stalled=self._stalled,
            idle=self._idle,
            saving=self._saving,
            crossed=self._crossed,
            zone_usd=across,
        )
