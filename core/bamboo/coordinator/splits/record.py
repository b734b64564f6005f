"""What a coordinator knows of the split of the layers: one that it is changing, and who is how fast."""

from collections.abc import Mapping
from dataclasses import dataclass, field

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
