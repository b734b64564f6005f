"""The interface of all strategies: what they are told, and what they may do about it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bamboo.simulation.strategies.costs import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The checkpoints that a policy takes, in seconds."""

    every: float  # seconds of training between two
    pause: float  # for which training stops at each
    delay: float  # until what was copied in that pause is safe


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a strategy is told at one instant."""

    now: float
    ready: tuple[str, ...]  # nodes in the order in which they came
    joined: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    next_save: float = 0.0  # in how many seconds the next checkpoint is taken; 0 if nothing is trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaction:
    """What follows for the training."""

    rate: float  # samples a second from then on
    stall: float = 0.0  # seconds until then, in which nothing is trained
    redo: float | None = 0.0  # samples that are trained again; None for all since the newest checkpoint
    wake: float | None = None  # seconds until the strategy wants to be asked again; an earlier wish is forgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The nodes on which training is."""

    # nodes of each pipeline in the order of its stages; "" where others do the work
    rows: tuple[tuple[str, ...], ...] = ()
    # bytes that each node gives at every step to a neighbour in its pipeline, beside what the next stage needs
    copied: float = 0.0


def in_rows(cells: Sequence[str], stages: int) -> tuple[tuple[str, ...], ...]:
    """Cells one pipeline after the other, as pipelines."""
    return tuple(tuple(cells[at : at + stages]) for at in range(0, len(cells), stages)) if stages else ()


class Policy(Protocol):
    """A strategy with its parameters. State is whatever it wants to remember, a frozen value."""

    @property
    def costs(self) -> Costs: ...

    @property
    def saving(self) -> Saving | None: ...

    def begin(self) -> Any:
        """The state in which there are no nodes."""

    def react(self, state: Any, view: View) -> tuple[Any, Reaction | None]:
        """The new state, and how training goes on, after nodes came or went, or after a wish to be asked. None: as
        before.
        """

    def placement(self, state: Any) -> Placement:
        """The placement of what the policy trains in that state."""
