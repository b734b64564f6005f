"""What a coordinator knows of workers that are slow."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bamboo_core.coordinator.splits.record import OwnPace
from bamboo_core.planning.plan import Cell, WorkerId
from bamboo_core.planning.splits.speeds import Layers, WorkEstimate


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
class StragglerState:
    """What is known of workers' speeds, and who was replaced for them.

    slow: also those that are not found yet. paces: of owners, by the layers that they run now. estimate: the newest
    that covers all layers. looked_at: when that was found, in seconds.
    replaced: what workers took that were replaced, by their layers; replacements: how many were. asked_at: since when
    one worker more than the job has is asked for, to take the place of a slow one; again_at: when that may be done
    again.
    """

    slow: Mapping[WorkerId, Straggler] = field(default_factory=dict)
    paces: Mapping[tuple[WorkerId, Layers], OwnPace] = field(default_factory=dict)
    estimate: WorkEstimate | None = None
    looked_at: float = 0.0
    replaced: Mapping[tuple[WorkerId, Layers], float] = field(default_factory=dict)
    replacements: int = 0
    asked_at: float | None = None
    again_at: float = 0.0
