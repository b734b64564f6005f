"""What a coordinator knows of the split of the layers: one that it is changing, and who is how fast."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from bamboo.job.spec import PipelineSchedule
from bamboo.planning.plan import Cell, CheckpointId, WorkerId
from bamboo.planning.splits.backoff import Backoff
from bamboo.planning.splits.resplit import Grid
from bamboo.planning.splits.speeds import Layers, WorkEstimate
from bamboo.planning.splits.tried_splits import Trial, TriedSplit
from bamboo.planning.splits.uneven_split import Ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Resplit:
    """Layers that are to be split anew (`resplit`).

    number: of the wish for a cut, at that step or a later one. asked, asked_at: the root that was told last. cut: once
    a commit has carried the wish. since: when the wish, then the cut, came. held: by worker, the layers of the cut's
    state that it says it has copies of. stages: for the sake of speed; the grid stays, and everybody its place.
    """

    number: int
    at: int
    since: float
    asked: WorkerId | None = None
    asked_at: float = 0.0
    cut: CheckpointId | None = None
    held: Mapping[WorkerId, frozenset[int]] = field(default_factory=dict)
    stages: Ranges | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """Who is filled before the layers are split anew (`filling`): of each cell, the workers that become replicas.

    origin: of the plan in force; grid: that is to be; staying: the workers that count on that. It holds for these.
    """

    origin: int
    grid: Grid
    staying: frozenset[WorkerId]
    replicas: Mapping[Cell, tuple[WorkerId, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """resplit: layers that are to be split anew, if they are. filling: who is filled before that. Only the methods here
    make a new value.
    """

    resplit: Resplit | None = None
    filling: Filling | None = None

    def wished(self, number: int, at: int, stages: Ranges | None, now: float) -> "Splits":
        """A cut at that step is wished for. stages: of the split that is taken for the sake of speed."""
        return replace(self, resplit=Resplit(number=number, at=at, since=now, stages=stages))

    def asked_of(self, root: WorkerId, now: float) -> "Splits":
        assert self.resplit is not None
        return replace(self, resplit=replace(self.resplit, asked=root, asked_at=now))

    def carried(self, cut: CheckpointId, now: float) -> "Splits":
        """A commit has carried the wish."""
        assert self.resplit is not None
        return replace(self, resplit=replace(self.resplit, cut=cut, since=now))

    def held_by(self, worker: WorkerId, layers: Iterable[int], cut: CheckpointId, now: float) -> "Splits":
        """A worker has copies of these layers of the cut's state; it may be heard of before the commit is."""
        known = self.resplit
        if known is None or (known.cut is not None and known.cut != cut):
            known = Resplit(number=0, at=cut.step, since=now)
        elif known.cut is None:
            known = replace(known, since=now)
        held = {**known.held, worker: known.held.get(worker, frozenset()) | frozenset(layers)}
        return replace(self, resplit=replace(known, cut=cut, held=held))

    def not_resplit(self) -> "Splits":
        """The layers are split as they are to be, or the wish is withdrawn."""
        return self if self.resplit is None else replace(self, resplit=None)

    def filled(self, filling: Filling | None) -> "Splits":
        return self if filling is self.filling else replace(self, filling=filling)


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A worker that takes longer than others would for its layers.

    since, step: when that was seen first, and how many steps were committed then. cell: which it runs. seconds: that it
    takes for a microbatch; usual: that others would. compared: with others, not with the counted costs of its layers.
    found: for long enough to be told. lasting: for long enough that something is done about it.
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
class OwnPace:
    """What a worker has taken for its layers so far, so that it can be compared with itself.

    newest: seconds of a microbatch at the last looks, oldest first. usual: the least median of as many as are kept;
    None until there are as many.
    """

    newest: tuple[float, ...] = ()
    usual: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerState:
    """What is known of workers' speeds, and what was done (`stragglers`).

    slow: also those that are not found yet. paces: of owners, by the layers that they run now. estimate: the newest
    that covers all layers. uneven: since when, and since which step, another split of them is expected to be faster;
    better: that split, once it is for long enough. trial: the newest split for the sake of speed, until it is known
    whether it pays; unpaid: it did not, and the one before it is to be taken again. tried: what steps took with the
    splits that were measured. schedule: by which steps ran that these and the trial were measured with.
    replaced: what workers took that were replaced, by their layers. backoff, acted_step: of replacements and splits for
    the sake of speed. replacements: of these. asked_at: since when one worker more than the job has is asked for, to
    take the place of a slow one. pause: of the last split, in seconds.
    """

    slow: Mapping[WorkerId, Straggler] = field(default_factory=dict)
    paces: Mapping[tuple[WorkerId, Layers], OwnPace] = field(default_factory=dict)
    estimate: WorkEstimate | None = None
    uneven: tuple[float, int] | None = None
    better: Trial | None = None
    trial: Trial | None = None
    unpaid: bool = False
    tried: tuple[TriedSplit, ...] = ()
    schedule: PipelineSchedule | None = None
    replaced: Mapping[tuple[WorkerId, Layers], float] = field(default_factory=dict)
    backoff: Backoff = field(default_factory=Backoff)
    acted_step: int = 0
    replacements: int = 0
    asked_at: float | None = None
    looked_at: float = 0.0
    pause: float | None = None
