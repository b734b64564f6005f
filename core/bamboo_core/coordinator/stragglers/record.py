"""The coordinator's record of slow workers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bamboo_core.coordinator.splits.record import OwnPace
from bamboo_core.planning.plan import Cell, WorkerId
from bamboo_core.planning.splits.speeds import Layers, WorkEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A worker that takes longer for its layers than others would.

    since, step: when the coordinator first saw that, and the number of committed steps then. cell: the cell that it
    runs. seconds: its time for a microbatch. usual: the time that other workers would take. compared: measured against
    other workers, not against the counted costs of its layers. found: it has lasted long enough to report it. lasting:
    it has lasted long enough to act on it.
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
    """The workers' speeds, and the workers replaced because of them.

    slow: includes workers that are not reported yet. paces: of owners, by the layers that they run now. estimate: the
    newest one that covers all layers. looked_at: when it was made, in seconds. replaced: the times of replaced workers,
    by their layers. replacements: their number. asked_at: since when one additional worker is requested to take the
    place of a slow one. again_at: when that may be done again.
    """

    slow: Mapping[WorkerId, Straggler] = field(default_factory=dict)
    paces: Mapping[tuple[WorkerId, Layers], OwnPace] = field(default_factory=dict)
    estimate: WorkEstimate | None = None
    looked_at: float = 0.0
    replaced: Mapping[tuple[WorkerId, Layers], float] = field(default_factory=dict)
    replacements: int = 0
    asked_at: float | None = None
    again_at: float = 0.0
