"""What a coordinator knows of the job's workers, while they are there and when they have ended."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Final

from bamboo_core.control import protocol
from bamboo_core.control.memory import Memory, SentTraffic
from bamboo_core.control.platform import Platform
from bamboo_core.coordinator.replacing import replace
from bamboo_core.planning.plan import Peer, Plan, WorkerId
from bamboo_core.planning.splits.stage_times import StageTimes, forward_share

MOST_WAIT_SECONDS: Final = 60.0  # until another worker is asked for, after many that were refused


@dataclass(frozen=True, kw_only=True)  # without slots, for a fast `replace`
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
    backwards: int = 0  # as it said last
    worked_at: float = 0.0  # when that number changed last
    ready: bool = False  # its task is loaded
    epoch: int = 0  # of the newest plan that it knew when it joined
    origin: int = 0  # of the newest plan that it obeys
    cut_since: float | None = None  # the channel is closed since then
    released: bool = False  # it was told to leave


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnd:
    """How a worker ended, or was missed. disrupted: it was taken away, for no reason of its own."""

    how: str
    disrupted: bool


class Roster:
    """What decisions ask of all workers after every event; none of it is what workers say all the time.

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
        """The forward's share of a microbatch's time there and back; None if nobody has said."""
        share = forward_share((one for record in self._workers.values() for one in record.times), math.nan)
        return None if math.isnan(share) else share


class Workers(dict[WorkerId, WorkerRecord]):
    """All that are there, in order of joining. Replaced, never written."""

    def __init__(
        self,
        workers: Mapping[WorkerId, WorkerRecord] = MappingProxyType({}),
        roster: Roster | None = None,
        said: SaidTimes | None = None,
    ) -> None:
        """roster: of workers that differ from these in nothing that it tells. said: of workers with the same times."""
        super().__init__(workers)
        self.roster = roster or Roster(self)
        self.said = said or SaidTimes(self)

    def joined(self, hello: protocol.Hello, peer: Peer, now: float) -> "Workers":
        """A new worker's channel was opened."""
        epoch = hello.plan.epoch if hello.plan else 0
        record = WorkerRecord(peer=peer, seen=now, platform=hello.platform, epoch=epoch)
        return Workers({**self, hello.worker: record})

    def without(self, gone: Collection[WorkerId]) -> "Workers":
        return Workers({w: r for w, r in self.items() if w not in gone})

    def heard(self, worker: WorkerId, now: float) -> "Workers":
        """It has sent a message."""
        return self._passing(worker, replace(self[worker], seen=now), self.said)

    def beating(self, worker: WorkerId, said: protocol.Heartbeat, now: float) -> "Workers":
        """It has sent a heartbeat, in which it says only what is new."""
        known = self[worker]
        new = replace(
            known,
            seen=now,
            doing=said.doing[: protocol.MOST_TEXT],
            busy=said.busy,
            times=known.times if said.times is None else said.times,
            headroom=known.headroom if said.times is None else said.headroom,
            traffic=known.traffic if said.traffic is None else said.traffic,
            memory=known.memory if said.memory is None else said.memory,
            backwards=said.backwards,
            worked_at=known.worked_at if said.backwards == known.backwards else now,
        )
        return self._passing(worker, new, None if said.times is not None else self.said)

    def obeying(self, worker: WorkerId, origin: int) -> "Workers":
        """The states that it works on began with the plan of that epoch."""
        known = self[worker]
        return self if known.origin == origin else self._passing(worker, replace(known, origin=origin), self.said)

    def having(self, worker: WorkerId, new: WorkerRecord) -> "Workers":
        """What is known of the worker now, which decisions about all workers look at."""
        return self._having(worker, new, None, self.said)

    def _passing(self, worker: WorkerId, new: WorkerRecord, said: SaidTimes | None) -> "Workers":
        """With what a worker says all the time, and what no decision about all workers looks at."""
        return self._having(worker, new, self.roster, said)

    def _having(self, worker: WorkerId, new: WorkerRecord, roster: Roster | None, said: SaidTimes | None) -> "Workers":
        made = Workers(self, roster, said)
        made[worker] = new
        return made


@dataclass(frozen=True, kw_only=True)  # without slots, for a fast `replace`
class Notice:
    """The notice of a worker that will leave.

    until: the time at which it will be gone; seconds: how long before that it was given. final: the node cannot take it
    back. replaced: the coordinator gave it, because the worker is slow; it goes if another one takes its place. spared:
    the coordinator or its shell gave it, because the worker is not needed. free_since_step: the step since which the
    worker has no part in the plan.
    """

    until: float = math.inf
    seconds: float = math.inf
    final: bool = False
    replaced: bool = False
    spared: bool = False
    free_since_step: int | None = None


@dataclass(frozen=True, kw_only=True)  # without slots, for a fast `replace`
class Membership:
    """Who is not there any more, and how many are to come.

    leaving: the notices of workers, be they yet to join. gone: workers declared lost, refused or dismissed, for good.
    counted: workers that are not gone and whose preemption a coordinator before this one has counted, or which it told
    to leave. requested: the number of workers asked for that have not joined yet. preemptions: the number of workers
    taken away, or about to be; notices: how many of them had a notice. silence_told: an event has said that the
    workers, which live, do not come back to a restarted coordinator.
    """

    leaving: Mapping[WorkerId, Notice] = field(default_factory=dict)
    gone: frozenset[WorkerId] = frozenset()
    counted: frozenset[WorkerId] = frozenset()
    requested: int = 0
    preemptions: int = 0
    notices: int = 0
    silence_told: bool = False

    def withdrawing(self, count: int) -> "Membership":
        """So many that were asked for will not come, or have."""
        return replace(self, requested=max(0, self.requested - count))

    def without(self, worker: WorkerId) -> "Membership":
        """It is dismissed, and cannot come back."""
        return replace(self.not_leaving(worker), gone=self.gone | {worker})

    def with_notice(self, worker: WorkerId, notice: Notice) -> "Membership":
        return replace(self, leaving={**self.leaving, worker: notice})

    def not_leaving(self, worker: WorkerId) -> "Membership":
        """The worker is gone, or its notice is withdrawn."""
        return replace(self, leaving={w: notice for w, notice in self.leaving.items() if w != worker})

    def refusing(self, worker: WorkerId) -> "Membership":
        """It is dismissed when it joins."""
        return self.without(worker).withdrawing(1)

    def losing(self, worker: WorkerId, *, taken: bool) -> "Membership":
        """taken: it counts as taken away, unless that is counted."""
        more = taken and worker not in self.counted
        return replace(self.without(worker), preemptions=self.preemptions + more)

    def absent(self, workers: frozenset[WorkerId]) -> "Membership":
        """They were taken away while nobody looked."""
        return replace(self, gone=self.gone | workers, preemptions=self.preemptions + len(workers - self.counted))


@dataclass(frozen=True, kw_only=True)  # without slots, for a fast `replace`
class Liveness:
    """Who can reach whom, and how long is waited for who cannot be heard.

    links: (reporter, peer) -> since when the reporter cannot reach the peer. first_signs: of workers just lost, when
    the first sign of it was. patience: seconds more to wait, until patient_until, since most were not heard.
    """

    links: Mapping[tuple[WorkerId, WorkerId], float] = field(default_factory=dict)
    first_signs: Mapping[WorkerId, float] = field(default_factory=dict)
    patience: float = 0.0
    patient_until: float = 0.0

    def witness_of(self, worker: WorkerId) -> WorkerId | None:
        """Another worker that cannot reach it."""
        return next((reporter for reporter, peer in self.links if peer == worker), None)

    def without(self, worker: WorkerId) -> "Liveness":
        return replace(self, links={pair: since for pair, since in self.links.items() if worker not in pair})

    def losing(self, worker: WorkerId, cut_since: float) -> "Liveness":
        """cut_since: when its channel was closed, or now."""
        first = min([since for (_, peer), since in self.links.items() if peer == worker] + [cut_since])
        return replace(self.without(worker), first_signs={**self.first_signs, worker: first})


@dataclass(frozen=True, kw_only=True)  # without slots, for a fast `replace`
class WorkerEnds:
    """How workers ended.

    failures: of workers that ended for reasons of their own, and how, since the last commit; restarts: all of these.
    unexplained: lost, and how they ended is not known (yet). since_commit: of the workers lost since the last commit.
    """

    failures: tuple[str, ...] = ()
    restarts: int = 0
    unexplained: frozenset[WorkerId] = frozenset()
    since_commit: Mapping[WorkerId, WorkerEnd] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)  # without slots, for a fast `replace`
class Admission:
    """Which workers fit to the others.

    misfit: the newest worker that was refused for its platform or its data, and why. in_a_row: how many were since a
    worker became ready. ask_at: no workers are asked for before that, since those that came were refused. data: who was
    first to say of what data they are, and this.
    """

    misfit: tuple[WorkerId, str] | None = None
    in_a_row: int = 0
    ask_at: float = 0.0
    data: tuple[WorkerId, protocol.WorkerReady] | None = None

    def refusing(self, worker: WorkerId, why: str, now: float) -> "Admission":
        """Another one is asked for, the sooner the fewer in a row had to go."""
        wait = min(2.0 ** (self.in_a_row - 1), MOST_WAIT_SECONDS) if self.in_a_row else 0.0
        return replace(self, misfit=(worker, why), in_a_row=self.in_a_row + 1, ask_at=now + wait)

    def admitting(self, worker: WorkerId, said: protocol.WorkerReady) -> "Admission":
        """Its data are the job's, if it is the first one that says of what they are."""
        data = (worker, said) if said.samples and self.data is None else self.data
        return replace(self, data=data, in_a_row=0)
