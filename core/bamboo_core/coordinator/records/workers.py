"""The coordinator's records of the job's workers: present, ended and slow ones, and the checksums of their states."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from bamboo_core.control import protocol
from bamboo_core.control.memory import Memory, SentTraffic
from bamboo_core.control.platform import Platform
from bamboo_core.coordinator.records.grids import OwnPace
from bamboo_core.coordinator.replacing import Record, replace
from bamboo_core.planning.plan import Cell, Peer, WorkerId
from bamboo_core.planning.splits.speeds import Layers, StageTimes, WorkEstimate

MOST_WAIT_SECONDS: Final = 60.0  # before the next request for a worker after many refusals


@dataclass(frozen=True, kw_only=True)  # without slots, for a fast `replace`
class WorkerRecord:
    """A worker that joined and is not known to be lost."""

    peer: Peer
    seen: float
    platform: Platform = field(default_factory=Platform)
    doing: str = ""  # the worker's own description
    busy: float = 0.0  # seconds inside one instruction at its last heartbeat
    memory: Memory | None = None  # as last reported
    times: tuple[StageTimes, ...] = ()  # as last reported
    headroom: float | None = None  # available memory divided by used memory, as reported with the times
    traffic: SentTraffic | None = None  # as last reported
    backwards: int = 0  # as last reported
    worked_at: float = 0.0  # when `backwards` last changed
    ready: bool = False  # its task is loaded
    epoch: int = 0  # of the newest plan that it knew when it joined
    origin: int = 0  # of the newest plan that it obeys
    cut_since: float | None = None  # since when its channel is closed
    released: bool = False  # it was asked to leave


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnd:
    """The end of a worker. how: how it ended, or why it was declared lost. disrupted: it was taken away."""

    how: str
    disrupted: bool


class Workers(dict[WorkerId, WorkerRecord], Record):
    """All present workers, in order of joining. Never changed in place: the methods below return a new value."""

    def joined(self, hello: protocol.Hello, peer: Peer, now: float) -> "Workers":
        """Add a new worker, which has opened its channel."""
        epoch = hello.plan.epoch if hello.plan else 0
        return self.having(hello.worker, WorkerRecord(peer=peer, seen=now, platform=hello.platform, epoch=epoch))

    def without(self, gone: Collection[WorkerId]) -> "Workers":
        return Workers({w: r for w, r in self.items() if w not in gone})

    def beating(self, worker: WorkerId, heartbeat: protocol.Heartbeat, now: float) -> "Workers":
        """Record a heartbeat. Times (with headroom), traffic and memory keep their values if it leaves them out."""
        known = self[worker]
        new = replace(
            known,
            seen=now,
            doing=heartbeat.doing[: protocol.MOST_TEXT],
            busy=heartbeat.busy,
            times=known.times if heartbeat.times is None else heartbeat.times,
            headroom=known.headroom if heartbeat.times is None else heartbeat.headroom,
            traffic=known.traffic if heartbeat.traffic is None else heartbeat.traffic,
            memory=known.memory if heartbeat.memory is None else heartbeat.memory,
            backwards=heartbeat.backwards,
            worked_at=known.worked_at if heartbeat.backwards == known.backwards else now,
        )
        return self.having(worker, new)

    def having(self, worker: WorkerId, new: WorkerRecord) -> "Workers":
        """Add a worker's record, or replace it."""
        return Workers({**self, worker: new})


@dataclass(frozen=True, kw_only=True)  # without slots, for a fast `replace`
class Notice:
    """The notice of a worker that will leave.

    until: when the worker will be gone; infinite without a deadline. seconds: how long before `until` the notice came,
    or the worker joined if that was later. final: the shell cannot withdraw the notice. replaced: the coordinator gave
    it, because the worker is slow; the worker leaves once another one has taken its place. spared: the coordinator or
    its shell gave it, because the worker is not needed. free_since_step: step since which it has no stage, if known.
    """

    until: float = math.inf
    seconds: float = math.inf
    final: bool = False
    replaced: bool = False
    spared: bool = False
    free_since_step: int | None = None


@dataclass(frozen=True, kw_only=True)  # without slots, for a fast `replace`
class Membership(Record):
    """The workers that leave or are gone, and the number of requested workers.

    leaving: the notices of workers, even of ones that have not joined yet. gone: workers declared lost, refused or
    dismissed, for good. counted: workers whose next preemption is not counted, because an earlier coordinator counted
    it or asked them to leave. requested: the number of requested workers that have not joined yet. preemptions: the
    number of joined workers' preemption notices and of losses without a notice. notices: that of the notices alone.
    silence_told: an event has reported that living workers do not reconnect to a restarted coordinator.
    """

    leaving: Mapping[WorkerId, Notice] = field(default_factory=dict)
    gone: frozenset[WorkerId] = frozenset()
    counted: frozenset[WorkerId] = frozenset()
    requested: int = 0
    preemptions: int = 0
    notices: int = 0
    silence_told: bool = False

    def withdrawing(self, count: int) -> "Membership":
        """Reduce the number of requested workers by `count`: they have joined, or will not come."""
        return replace(self, requested=max(0, self.requested - count))

    def without(self, worker: WorkerId) -> "Membership":
        """Record that a worker is gone for good and cannot rejoin; this also removes its notice."""
        return replace(self.not_leaving(worker), gone=self.gone | {worker})

    def with_notice(self, worker: WorkerId, notice: Notice) -> "Membership":
        return replace(self, leaving={**self.leaving, worker: notice})

    def not_leaving(self, worker: WorkerId) -> "Membership":
        """Remove the notice of a worker that is gone, or whose notice is withdrawn."""
        return replace(self, leaving={w: notice for w, notice in self.leaving.items() if w != worker})

    def losing(self, worker: WorkerId, *, taken: bool) -> "Membership":
        """Record a lost worker. taken: it counts as preempted, unless it is counted already."""
        more = taken and worker not in self.counted
        return replace(self.without(worker), preemptions=self.preemptions + more)

    def absent(self, workers: frozenset[WorkerId]) -> "Membership":
        """Record workers of an earlier coordinator that are gone. They count as preempted, unless counted already."""
        return replace(self, gone=self.gone | workers, preemptions=self.preemptions + len(workers - self.counted))


@dataclass(frozen=True, kw_only=True)  # without slots, for a fast `replace`
class Liveness(Record):
    """The broken links between workers, the first signs of losses, and how long to wait for silent workers.

    links: (reporter, peer) -> since when the reporter cannot reach the peer. first_signs: the time of the first sign of
    each loss since the last plan. patience: extra seconds to wait, until patient_until, as most workers were silent.
    """

    links: Mapping[tuple[WorkerId, WorkerId], float] = field(default_factory=dict)
    first_signs: Mapping[WorkerId, float] = field(default_factory=dict)
    patience: float = 0.0
    patient_until: float = 0.0

    def without(self, worker: WorkerId) -> "Liveness":
        return replace(self, links={pair: since for pair, since in self.links.items() if worker not in pair})

    def losing(self, worker: WorkerId, cut_since: float) -> "Liveness":
        """Record the first sign of a worker's loss, and drop its links. cut_since: when its channel closed, or now."""
        first = min([since for (_, peer), since in self.links.items() if peer == worker] + [cut_since])
        return replace(self.without(worker), first_signs={**self.first_signs, worker: first})


@dataclass(frozen=True, kw_only=True)  # without slots, for a fast `replace`
class WorkerEnds(Record):
    """The ends of lost workers, and the count of failures.

    failures: descriptions of workers that ended by themselves since the last commit. restarts: the total number of
    workers that ended by themselves. unexplained: lost workers whose end the shell has not reported. since_commit: the
    ends recorded since the last commit, or since the job last began anew.
    """

    failures: tuple[str, ...] = ()
    restarts: int = 0
    unexplained: frozenset[WorkerId] = frozenset()
    since_commit: Mapping[WorkerId, WorkerEnd] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)  # without slots, for a fast `replace`
class Admission(Record):
    """The check that joining workers fit the job's other workers.

    misfit: the newest worker that was refused for its platform or its data, and why. in_a_row: the number of refusals
    since a worker was last accepted as ready. ask_at: the earliest time to request workers again after refusals. data:
    the first worker that reported its data, and the report.
    """

    misfit: tuple[WorkerId, str] | None = None
    in_a_row: int = 0
    ask_at: float = 0.0
    data: tuple[WorkerId, protocol.WorkerReady] | None = None

    def refusing(self, worker: WorkerId, why: str, now: float) -> "Admission":
        """Record a refusal. From the second in a row on, requests wait 1 s, 2 s, 4 s and so on to MOST_WAIT_SECONDS."""
        wait = min(2.0 ** min(self.in_a_row - 1, 30), MOST_WAIT_SECONDS) if self.in_a_row else 0.0
        return replace(self, misfit=(worker, why), in_a_row=self.in_a_row + 1, ask_at=now + wait)

    def admitting(self, worker: WorkerId, ready: protocol.WorkerReady) -> "Admission":
        """Record a worker that fits the other workers. Keep the first report of data, to compare later ones with."""
        data = (worker, ready) if ready.samples and self.data is None else self.data
        return replace(self, data=data, in_a_row=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A worker that takes longer for its layers than other workers would, or than it took before.

    since, step: the time and the number of committed steps when it became slow. cell: a cell that it runs. seconds: its
    time for a microbatch there. usual: the expected time. compared: by measured times of other workers or earlier ones
    of its own, not by the counted costs of its layers. found: slow for long enough to be reported. lasting: slow for
    long enough that the coordinator acts.
    """

    since: float
    step: int
    cell: Cell
    seconds: float
    usual: float
    compared: bool
    found: bool = False
    lasting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerState(Record):
    """The workers' speeds, and the workers replaced because of them.

    slow: all stragglers, even if not reported yet. paces: the owners' times, by worker and its present layers.
    estimate: the newest estimate of layers' times that covers all layers. looked_at: when workers were last compared,
    in seconds. replaced: replaced workers' seconds per microbatch, by worker and layers. replacements: the number
    begun. asked_at: since when one more worker is requested to replace a slow one. again_at: when another may be.
    """

    slow: Mapping[WorkerId, Straggler] = field(default_factory=dict)
    paces: Mapping[tuple[WorkerId, Layers], OwnPace] = field(default_factory=dict)
    estimate: WorkEstimate | None = None
    looked_at: float = 0.0
    replaced: Mapping[tuple[WorkerId, Layers], float] = field(default_factory=dict)
    replacements: int = 0
    asked_at: float | None = None
    again_at: float = 0.0


KEPT_VERSIONS: Final = 4  # no worker lags by more than one step; at the start several consecutive versions are compared

Place = tuple[int, int]  # stage and version


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedState:
    """The reported checksums of a stage's state at a version. sums: by tensor, from the worker `first`. equal: all
    workers that reported these sums.
    """

    sums: Mapping[str, str]
    first: WorkerId
    equal: frozenset[WorkerId]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardState(Record):
    """Workers' checksums of stages' states: of the newest versions, and of the version that a checkpoint is saving.

    reported: the sums by stage and version. plan_origin: the origin of the plan under which the states were trained.
    differences: how many differences were found, in states and by spot checks.
    """

    plan_origin: int = 0
    reported: Mapping[Place, ReportedState] = field(default_factory=dict)
    differences: int = 0

    def at(self, origin: int, stage: int, version: int) -> ReportedState | None:
        """Return the reported checksums of a stage's state at a version; None without a report of this origin."""
        return self.reported.get((stage, version)) if origin == self.plan_origin else None

    def reporting(
        self, origin: int, place: Place, worker: WorkerId, sums: Mapping[str, str], kept: int | None
    ) -> "GuardState":
        """Record a worker's checksums, which must equal earlier reports of that state. kept: a version to keep, however
        old; or None.
        """
        before = self.reported if origin == self.plan_origin else {}
        known = before.get(place) or ReportedState(sums=sums, first=worker, equal=frozenset())
        reported = {**before, place: replace(known, equal=known.equal | {worker})}
        newest = {kept, *sorted({version for _, version in reported})[-KEPT_VERSIONS:]}
        kept_states = {one: state for one, state in reported.items() if one[1] in newest}
        return replace(self, plan_origin=origin, reported=kept_states)

    def are_equal(self, origin: int, version: int, holders: Collection[Collection[WorkerId]]) -> bool:
        """Return whether all holders of each stage have reported the same sums of that version. holders: workers by
        stage.
        """
        for stage, workers in enumerate(holders):
            reported = self.at(origin, stage, version)
            if not (reported.equal if reported else frozenset()).issuperset(workers):
                return False
        return True
