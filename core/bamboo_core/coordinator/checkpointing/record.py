"""What a coordinator knows of the job's checkpoints."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.checkpoint.manifest import CheckpointPart
from bamboo_core.coordinator.checkpoint_counts import AbandonReason, CheckpointCounts
from bamboo_core.coordinator.replacing import replace
from bamboo_core.planning.plan import WorkerId

MOST_KEPT: Final = 100
MOST_EARLY: Final = 4  # checkpoints whose parts are heard of before their commit
MOST_COPIED: Final = 4  # checkpoints of which it is known who has copies
MOST_FAILURES: Final = 2  # of the last state's checkpoints; each has as long as any other one


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """What the coordinator knows of the checkpoints that it has made, and of the one that it makes (`checkpoints`)."""

    # the one in progress
    number: int = 0  # of the wish for it
    at: int = 0  # its step, or a later one
    writers: tuple[tuple[WorkerId, ...], ...] = ()  # of each stage; empty if none is in progress
    dealt: Mapping[int, WorkerId] = field(default_factory=dict)  # which of them writes which layer
    writing: CheckpointId | None = None  # once a commit has carried the wish
    parts: Mapping[int, CheckpointPart] = field(default_factory=dict)  # by layer
    # of checkpoints whose commit is not heard of yet: their parts, and why one fails
    early: Mapping[CheckpointId, Mapping[int, CheckpointPart]] = field(default_factory=dict)
    common: Mapping[CheckpointId, dict[str, Any]] = field(default_factory=dict)  # as in PartsWritten
    failed: Mapping[CheckpointId, str] = field(default_factory=dict)
    asked: WorkerId | None = None  # who has to act now
    asked_at: float = 0.0  # when that was said last
    since: float = 0.0  # when the wish, then the writing, began
    stall: float = 0.0  # seconds for which training waited, so far
    final: bool = False  # it is of the last state, and those who have finished were asked for it one by one
    # those before it
    retry: bool = False  # the next one is due at once
    last_step: int = 0  # of the newest one, or of the newest attempt
    kept: tuple[CheckpointId, ...] = ()  # committed and not known to be bad, newest first
    kept_at: float | None = None  # when the newest of them was committed
    bytes: int = 0  # that it has
    seconds: float = 0.0  # that it took
    bad: tuple[CheckpointId, ...] = ()  # that turned out to be damaged
    counts: CheckpointCounts = field(default_factory=CheckpointCounts)  # what became of all of them
    first: int = 0  # the step with which the job began
    final_failures: int = 0  # of checkpoints of the last state
    tidying: tuple[CheckpointId, WorkerId] | None = None  # the newest one and its writer, while that removes others
    endangered: frozenset[WorkerId] = frozenset()  # the workers with notice for whose sake one was taken

    # one in progress

    def numbered(self) -> "CheckpointState":
        """The next number is given to a wish, be it for a cut."""
        return replace(self, number=self.number + 1)

    def wished(
        self, at: int, writers: tuple[tuple[WorkerId, ...], ...], dealt: Mapping[int, WorkerId], now: float
    ) -> "CheckpointState":
        """One of that step, or of the next one, is wished for."""
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
        """Parts are durable, of the one in progress or of one whose commit is not heard of yet. Workers may say the
        same again. stall: seconds, of the worker that says so.
        """
        is_carried = checkpoint == self.writing
        known = self.parts if is_carried else self.early.get(checkpoint, {})
        more = sum(part.bytes for layer, part in parts.items() if layer not in known)
        counts = replace(self.counts, bytes=self.counts.bytes + more)
        states = dict(list({**self.common, checkpoint: common}.items())[-MOST_EARLY:])
        told = replace(self, counts=counts, stall=max(self.stall, stall), common=states)
        if is_carried:
            return replace(told, parts={**known, **parts})
        early = {**self.early, checkpoint: {**known, **parts}}
        return replace(told, early=dict(list(early.items())[-MOST_EARLY:]))

    def uncommitted(self) -> tuple[CheckpointId, ...]:
        """Return the checkpoints of which parts may be written, and which no worker was asked to commit."""
        return (*self.early, *((self.writing,) if self.writing and self.asked is None else ()))

    # those that there are

    def keeping(self, kept: Iterable[CheckpointId]) -> "CheckpointState":
        """The others are not there, or of no use; when the newest one was committed may not be known then."""
        left = tuple(kept)
        return replace(self, kept=left, kept_at=self.kept_at if left[:1] == self.kept[:1] else None)

    # the job goes back

    def left_behind(self) -> "CheckpointState":
        """If one is in progress, it counts as given up, as the job goes back."""
        return replace(self, counts=self.counts.abandoning(AbandonReason.WENT_BACK)) if self.writers else self


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoringState:
    """With which checkpoint the job begins, and why it goes back to one (`restoring`).

    looked: whether it is known with which one (found; None: with none) the job begins. asked, asked_at: who looks now,
    and since when; question: the number of the newest question. pausing: before the store is asked again. spoiled: none
    can be used of those that there are. problem: why the store does not tell.
    reason, message: why the job has to go back to one; empty if it has not. back_since: it has to since then, and has
    not committed a step again.
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
class CopiesInMemory:
    """held: of the newest checkpoints, who keeps which layers in host memory (`copies`)."""

    held: Mapping[CheckpointId, Mapping[WorkerId, frozenset[int]]] = field(default_factory=dict)

    def without(self, useless: Iterable[CheckpointId]) -> "CopiesInMemory":
        gone = set(useless)
        return replace(self, held={one: who for one, who in self.held.items() if one not in gone})
