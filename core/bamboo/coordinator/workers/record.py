"""What a coordinator knows of a worker, while it is there and when it has ended."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from bamboo.control.memory import Memory, SentTraffic
from bamboo.control.platform import Platform
from bamboo.planning.plan import Peer, Plan, WorkerId
from bamboo.planning.splits.stage_times import StageTimes, forward_share


@dataclass(frozen=True, kw_only=True)  # no slots, for `changed`
class WorkerRecord:
    """A worker that joined and is not known to be lost."""

    peer: Peer
    seen: float
    platform: Platform = field(default_factory=Platform)
    doing: str = ""  # in its own words
    busy: float = 0.0  # seconds for which it had been inside one instruction when it was heard last
    memory: Memory | None = None  # as it said last
    times: tuple[StageTimes, ...] = ()  # as it said last
    headroom: float | None = None  # how many times as much memory as now there is for it, as it said with the times
    traffic: SentTraffic | None = None  # as it said last
    ready: bool = False  # its task is loaded
    epoch: int = 0  # of the newest plan that it knew when it joined
    origin: int = 0  # of the newest plan that it obeys
    cut_since: float | None = None  # the channel is closed since then
    notice_until: float | None = None
    notice_seconds: float = 0.0
    notice_final: bool = False
    replaced: bool = False  # the notice is ours: it is slow, and goes if another one takes its place
    spared: bool = False  # the notice is ours: it is not needed any more
    free_since_step: int | None = None  # it has a notice and no part any more
    released: bool = False  # it was told to leave


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnd:
    """How a worker ended, or was missed. disrupted: it was taken away, for no reason of its own."""

    how: str
    disrupted: bool


# What a worker says all the time, and what no decision about all workers looks at.
PASSING: Final = frozenset({"seen", "doing", "busy", "memory", "times", "headroom", "traffic", "epoch", "origin"})


class Roster:
    """What decisions ask of all workers after every event; none of it is of PASSING fields.

    Each answer is found when it is first asked for, and the same object from then on.
    """

    def __init__(self, workers: Mapping[WorkerId, WorkerRecord]) -> None:
        self._workers = workers
        self._live: tuple[Plan, dict[WorkerId, Peer]] | None = None
        self._lost: tuple[Plan, frozenset[WorkerId]] | None = None

    @cached_property
    def ready(self) -> tuple[WorkerId, ...]:
        """On whom plans may count, in order of joining."""
        return tuple(w for w, r in self._workers.items() if r.ready)

    @cached_property
    def noticed(self) -> tuple[WorkerId, ...]:
        """Who has a notice, in order of joining."""
        return tuple(w for w, r in self._workers.items() if r.notice_until is not None)

    @cached_property
    def staying(self) -> int:
        """How many of the ready ones have no notice."""
        return len(self.ready) - sum(1 for w in self.noticed if self._workers[w].ready)

    @cached_property
    def replaced(self) -> tuple[WorkerId, ...]:
        """Who is to go if another one takes its place, and has not been told to leave."""
        return tuple(w for w in self.noticed if self._workers[w].replaced and not self._workers[w].released)

    def live(self, plan: Plan) -> dict[WorkerId, Peer]:
        """The workers that the plan after that one names, in order of joining."""
        if self._live is None or self._live[0] is not plan:
            named = plan.worker_ids()
            self._live = plan, {w: r.peer for w, r in self._workers.items() if r.ready or w in named}
        return self._live[1]

    def lost(self, plan: Plan) -> frozenset[WorkerId]:
        """Whom that plan names and who is not there."""
        if self._lost is None or self._lost[0] is not plan:
            self._lost = plan, plan.worker_ids() - self._workers.keys()
        return self._lost[1]


class SaidTimes:
    """What all workers say that their stages take, looked through once as long as nobody says anything else."""

    def __init__(self, workers: Mapping[WorkerId, WorkerRecord]) -> None:
        self._workers = workers

    @cached_property
    def forward_share(self) -> float | None:
        """Of what microbatches take there and back; None if nobody has said."""
        share = forward_share((one for record in self._workers.values() for one in record.times), math.nan)
        return None if math.isnan(share) else share


class Workers(dict[WorkerId, WorkerRecord]):
    """All that are there, in order of joining; replaced, never written. roster, said: of them."""

    roster: Roster
    said: SaidTimes

    @staticmethod
    def of(
        workers: Mapping[WorkerId, WorkerRecord], roster: Roster | None = None, said: SaidTimes | None = None
    ) -> "Workers":
        """roster: of workers that differ from these in PASSING fields alone. said: of workers with the same times."""
        found = Workers(workers)
        found.roster = roster or Roster(found)
        found.said = said or SaidTimes(found)
        return found


def roster_of(workers: Mapping[WorkerId, WorkerRecord]) -> Roster:
    return workers.roster if isinstance(workers, Workers) else Roster(workers)


def said_by(workers: Mapping[WorkerId, WorkerRecord]) -> SaidTimes:
    return workers.said if isinstance(workers, Workers) else SaidTimes(workers)
