"""What a coordinator knows of the job's checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bamboo.checkpoint.manifest import CheckpointPart
from bamboo.coordinator.checkpoint_counts import CheckpointCounts
from bamboo.planning.plan import CheckpointId, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """What the coordinator knows of the job's checkpoints (`checkpoints`).

    In progress: number, of the wish; at, its step or a later one; writers, of each stage, empty if none is in
    progress; dealt: which of them writes which layer; writing: the checkpoint, once a commit has carried the wish;
    parts: by layer. early, failed: parts of checkpoints whose commit is not heard of yet, and why one fails. stall:
    seconds for which training waited, so far.
    asked, asked_at: who has to act now, and when that was said last. since: when the wish, then the writing, began.
    kept: those committed and not known to be bad, newest first. kept_at: when the newest of them was. bad: those that
    turned out to be damaged.
    looked: whether it is known with which one (found) the job begins. spoiled: none can be used of those that there
    are. reason, message: why it has to go back to one.
    counts: what became of all of them. first: the step with which the job began.
    final: the one in progress is of the last state, and those who have finished were asked for it one by one.
    final_failures: of checkpoints of the last state.
    copies: of the newest ones, who keeps which layers in host memory.
    tidying: the newest one and who wrote it, while that worker removes others. endangered: the workers with notice for
    whose sake one was taken.
    """

    number: int = 0
    at: int = 0
    writers: tuple[tuple[WorkerId, ...], ...] = ()
    dealt: Mapping[int, WorkerId] = field(default_factory=dict)
    writing: CheckpointId | None = None
    parts: Mapping[int, CheckpointPart] = field(default_factory=dict)
    early: Mapping[CheckpointId, Mapping[int, CheckpointPart]] = field(default_factory=dict)
    failed: Mapping[CheckpointId, str] = field(default_factory=dict)
    asked: WorkerId | None = None
    asked_at: float = 0.0
    since: float = 0.0
    stall: float = 0.0
    back_since: float | None = None  # the job has to go back to one since then, and has not committed a step again
    pausing: bool = False  # before the store is asked again
    retry: bool = False  # the next one is due at once
    last_step: int = 0  # of the newest one, or of the newest attempt
    kept: tuple[CheckpointId, ...] = ()
    kept_at: float | None = None
    bytes: int = 0  # of the newest one
    seconds: float = 0.0  # that it took
    bad: tuple[CheckpointId, ...] = ()
    question: int = 0  # the number of the newest one to a worker that looks
    looked: bool = False
    found: CheckpointId | None = None
    spoiled: bool = False
    problem: str = ""  # why the store does not tell
    reason: str = ""
    message: str = ""
    counts: CheckpointCounts = field(default_factory=CheckpointCounts)
    first: int = 0
    final: bool = False
    final_failures: int = 0
    copies: Mapping[CheckpointId, Mapping[WorkerId, frozenset[int]]] = field(default_factory=dict)
    tidying: tuple[CheckpointId, WorkerId] | None = None
    endangered: frozenset[WorkerId] = frozenset()
