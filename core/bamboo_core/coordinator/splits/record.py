"""The coordinator's record of splits of the layers: a re-split in progress, and a split that is faster."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.planning.plan import Cell, WorkerId
from bamboo_core.planning.splits.resplit import Grid
from bamboo_core.planning.splits.uneven_split import Ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Resplit:
    """A re-split of the layers in progress (`resplit`).

    number: of the request for a cut, at step `at` or a later one. asked, asked_at: the root that was last asked, and
    when. cut: set once a commit has carried the request. since: when the request, then the cut, came. held: by worker,
    the layers of the cut's state that it reports to hold. stages: the new split, if it is only for speed; grid and
    places stay.
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
    """The filling of workers before a re-split (`filling`). replicas: for each cell, the workers that become replicas.

    It is valid for one origin of the plan in force, one future grid and one set of staying workers.
    """

    origin: int
    grid: Grid
    staying: frozenset[WorkerId]
    replicas: Mapping[Cell, tuple[WorkerId, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FasterSplit:
    """A split with which a step should be shorter. why: a sentence for a person."""

    stages: Ranges
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """All splits of the layers that the coordinator considers.

    resplit: the re-split in progress. filling: the filling before it. uneven: since when, and since which step, another
    split should be faster (`by_speed`). faster: that split, once this has lasted long enough. evened: the workers, cell
    by cell, for whose speeds the layers were split, and when. pause: of the last re-split, in seconds.
    """

    resplit: Resplit | None = None
    filling: Filling | None = None
    uneven: tuple[float, int] | None = None
    faster: FasterSplit | None = None
    evened: tuple[tuple[WorkerId, ...], float] | None = None
    pause: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPace:
    """A worker's times for its layers so far, for comparison with itself.

    newest: seconds of a microbatch at the last looks, oldest first. usual: the least median over a full list of looks;
    None until the first full list.
    """

    newest: tuple[float, ...] = ()
    usual: float | None = None
