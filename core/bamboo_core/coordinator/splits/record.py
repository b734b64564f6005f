"""What a coordinator knows of the split of the layers: one that it is changing to, and one that is faster."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from bamboo_core.planning.plan import Cell, CheckpointId, WorkerId
from bamboo_core.planning.splits.resplit import Grid
from bamboo_core.planning.splits.uneven_split import Ranges


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

    def asked_of(self, root: WorkerId, now: float) -> "Resplit":
        return replace(self, asked=root, asked_at=now)

    def carried(self, cut: CheckpointId, now: float) -> "Resplit":
        """A commit has carried the wish."""
        return replace(self, cut=cut, since=now)

    def held_by(self, worker: WorkerId, layers: Iterable[int], cut: CheckpointId) -> "Resplit":
        held = {**self.held, worker: self.held.get(worker, frozenset()) | frozenset(layers)}
        return replace(self, cut=cut, held=held)


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
class FasterSplit:
    """A split with which a step is expected to be shorter. why: for a person."""

    stages: Ranges
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """What is known of splits of the layers. Only this room makes a new value.

    resplit: layers that are to be split anew, if they are. filling: who is filled before that. uneven: since when, and
    since which step, another split is expected to be faster (`by_speed`); faster: that one, once it is for long enough.
    evened: the workers, cell by cell, for whose speeds the layers were split, and when. pause: of the last split, in
    seconds.
    """

    resplit: Resplit | None = None
    filling: Filling | None = None
    uneven: tuple[float, int] | None = None
    faster: FasterSplit | None = None
    evened: tuple[tuple[WorkerId, ...], float] | None = None
    pause: float | None = None

    def wished(self, number: int, at: int, stages: Ranges | None, now: float) -> "Splits":
        """A cut at that step is wished for. stages: of the split that is taken for the sake of speed."""
        resplit = Resplit(number=number, at=at, since=now, stages=stages)
        return replace(self, resplit=resplit, uneven=None, faster=None)

    def asked_of(self, root: WorkerId, now: float) -> "Splits":
        assert self.resplit is not None
        return replace(self, resplit=self.resplit.asked_of(root, now))

    def carried(self, cut: CheckpointId, now: float) -> "Splits":
        """A commit has carried the wish."""
        assert self.resplit is not None
        return replace(self, resplit=self.resplit.carried(cut, now))

    def held_by(self, worker: WorkerId, layers: Iterable[int], cut: CheckpointId, now: float) -> "Splits":
        """A worker has copies of these layers of the cut's state; it may be heard of before the commit is."""
        known = self.resplit
        if known is None or (known.cut is not None and known.cut != cut):
            known = Resplit(number=0, at=cut.step, since=now)
        elif known.cut is None:
            known = known.carried(cut, now)
        return replace(self, resplit=known.held_by(worker, layers, cut))

    def not_resplit(self) -> "Splits":
        """The layers are split as they are to be, or the wish is withdrawn."""
        return self if self.resplit is None else replace(self, resplit=None)

    def expecting(self, since: tuple[float, int] | None, faster: FasterSplit | None) -> "Splits":
        """Another split has been expected to be faster since then; None if none is. faster: the one to take."""
        same = (since, faster) == (self.uneven, self.faster)
        return self if same else replace(self, uneven=since, faster=faster)

    def filled(self, filling: Filling | None) -> "Splits":
        return self if filling is self.filling else replace(self, filling=filling)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPace:
    """What a worker has taken for its layers so far, so that it can be compared with itself.

    newest: seconds of a microbatch at the last looks, oldest first. usual: the least median of as many as are kept;
    None until there are as many.
    """

    newest: tuple[float, ...] = ()
    usual: float | None = None
