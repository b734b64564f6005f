"""What a coordinator knows of the split of the layers: one that it is changing to, and one that is faster."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.planning.plan import Cell, WorkerId
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
    """What is known of splits of the layers.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPace:
    """What a worker has taken for its layers so far, so that it can be compared with itself.

    newest: seconds of a microbatch at the last looks, oldest first. usual: the least median of as many as are kept;
    None until there are as many.
    """

    newest: tuple[float, ...] = ()
    usual: float | None = None
