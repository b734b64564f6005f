"""The coordinator's records of the job's checkpoints and restores."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.checkpoint.manifest import CheckpointPart
from bamboo_core.coordinator.events import CheckpointCounts
from bamboo_core.coordinator.replacing import Record, replace
from bamboo_core.planning.plan import Plan, WorkerId
from bamboo_core.planning.shares import share

MOST_KEPT: Final = 100
MOST_EARLY: Final = 4  # checkpoints whose parts are reported before their commit
MOST_COPIED: Final = 4  # checkpoints whose copies in memory are known
MOST_FAILURES: Final = 2  # failed checkpoints of the last state; each attempt has the usual time


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState(Record):
    """The coordinator's record of checkpoints: of the one in progress, and of completed ones (`saving`)."""

    # the checkpoint in progress
    number: int = 0  # of the newest request, for it or for a cut
    at: int = 0  # the requested step; its own step may be later
    writers: tuple[tuple[WorkerId, ...], ...] = ()  # of each stage; empty if none is in progress
    dealt: Mapping[int, WorkerId] = field(default_factory=dict)  # the writer of each layer
    writing: CheckpointId | None = None  # set once a commit has carried the request, or at once if `final`
    parts: Mapping[int, CheckpointPart] = field(default_factory=dict)  # by layer
    # checkpoints whose commit is not reported yet: their parts, and why one fails
    early: Mapping[CheckpointId, Mapping[int, CheckpointPart]] = field(default_factory=dict)
    common: Mapping[CheckpointId, dict[str, Any]] = field(default_factory=dict)  # as in PartsWritten; also of `writing`
    failed: Mapping[CheckpointId, str] = field(default_factory=dict)
    asked: WorkerId | None = None  # the worker that has to act now
    asked_at: float = 0.0  # when it was last asked, or the writers if `final`
    since: float = 0.0  # when the request, then the writing, began
    stall: float = 0.0  # seconds for which training waited, of the worker that waited longest
    final: bool = False  # it is of the last state, requested from the workers that finished
    # earlier checkpoints
    retry: bool = False  # the next one is due at once
    last_step: int = 0  # committed steps at the newest checkpoint, abandonment or start
    kept: tuple[CheckpointId, ...] = ()  # committed and not known to be bad, newest first
    kept_at: float | None = None  # when the newest of them was committed
    bytes: int = 0  # of the newest checkpoint
    seconds: float = 0.0  # that the newest checkpoint took
    bad: tuple[CheckpointId, ...] = ()  # damaged, or perhaps with a wrong state: never restored
    counts: CheckpointCounts = field(default_factory=CheckpointCounts)  # of all checkpoints and restores
    first: int = 0  # the step with which the job began; 0 if a restarted coordinator does not know it
    final_failures: int = 0  # of checkpoints of the last state
    tidying: tuple[CheckpointId, WorkerId] | None = None  # the newest one and its writer, which removes older ones
    endangered: frozenset[WorkerId] = frozenset()  # workers under notice because of which a checkpoint was taken

    # one in progress

    def numbered(self) -> "CheckpointState":
        """Advance `number`, for the next request for a checkpoint or cut."""
        return replace(self, number=self.number + 1)

    def requested(
        self, at: int, writers: tuple[tuple[WorkerId, ...], ...], plan: Plan, now: float
    ) -> "CheckpointState":
        """Record the request for a checkpoint of the state after `at` or more steps, and deal layers to the writers."""
        dealt = {
            layer: worker
            for layers, mine in zip(plan.stages, writers, strict=True)
            for worker in mine
            for layer in share(mine, worker, layers)
        }
        return replace(
            self.numbered(),
            at=at,
            writers=writers,
            dealt=dealt,
            since=now,
            retry=False,
            early={},
            failed={},
            stall=0.0,
        )

    def with_parts(
        self, checkpoint: CheckpointId, parts: Mapping[int, CheckpointPart], stall: float, common: dict[str, Any]
    ) -> "CheckpointState":
        """Record durable parts of the checkpoint in progress, or of one whose commit is not reported yet.

        Parts that are reported again count once. stall, common: the reporting worker's, as in PartsWritten.
        """
        is_carried = checkpoint == self.writing
        known = self.parts if is_carried else self.early.get(checkpoint, {})
        more = sum(part.bytes for layer, part in parts.items() if layer not in known)
        counts = replace(self.counts, bytes=self.counts.bytes + more)
        states = dict(list({**self.common, checkpoint: common}.items())[-MOST_EARLY:])
        updated = replace(self, counts=counts, stall=max(self.stall, stall), common=states)
        if is_carried:
            return replace(updated, parts={**known, **parts})
        early = {**self.early, checkpoint: {**known, **parts}}
        return replace(updated, early=dict(list(early.items())[-MOST_EARLY:]))

    def uncommitted(self) -> tuple[CheckpointId, ...]:
        """Return known checkpoints that may have parts in the store and whose manifest no worker was asked to write."""
        return (*self.early, *((self.writing,) if self.writing and self.asked is None else ()))

    # existing checkpoints

    def keeping(self, kept: Iterable[CheckpointId]) -> "CheckpointState":
        """Keep only these checkpoints in `kept`, newest first; the others are missing or unusable. If the newest one
        changes, the time of its commit becomes unknown.
        """
        left = tuple(kept)
        return replace(self, kept=left, kept_at=self.kept_at if left[:1] == self.kept[:1] else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoringState(Record):
    """The search for the checkpoint with which the job begins or to which it goes back (`restoring`).

    looked: whether the search is over. found: its result; None: no checkpoint. asked: the worker that was last asked to
    search the store. asked_at: when it was asked or, before that, when the search began. question: the number of the
    newest FindCheckpoint. pausing: wait before the next one. spoiled: checkpoints exist, but none is usable. problem:
    why the store cannot be read. reason, message: why the job goes back, to a checkpoint or step 0; empty if it does
    not. back_since: when the job first had to go back since the last commit; None if it did not.
    """

    looked: bool = False
    found: CheckpointId | None = None
    asked: WorkerId | None = None
    asked_at: float = 0.0
    question: int = 0
    pausing: bool = False
    spoiled: bool = False
    problem: str = ""
    reason: str = ""
    message: str = ""
    back_since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesInMemory(Record):
    """Copies of the newest checkpoints in host memory (`copies`). held: the layers of which each worker has reported
    copies, by checkpoint; lost workers may be listed.
    """

    held: Mapping[CheckpointId, Mapping[WorkerId, frozenset[int]]] = field(default_factory=dict)

    def without(self, useless: Iterable[CheckpointId]) -> "CopiesInMemory":
        gone = set(useless)
        return replace(self, held={one: who for one, who in self.held.items() if one not in gone})
