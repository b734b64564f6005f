"""The interface of all strategies: inputs, reactions, checkpoint intervals, and traffic between zones. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from strategies.costs import SNAPSHOT_BYTES, Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The times of a policy's checkpoints, in seconds."""

    every: float  # of training between two
    pause: float  # in which training stops for each
    delay: float  # until the copies of that pause are safe


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The nodes at one moment, as a strategy sees them."""

    now: float
    ready: tuple[str, ...]  # nodes in the order in which they came, but zone by zone if they are in several zones
    joined: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    next_save: float = 0.0  # seconds until the next checkpoint; 0 if nothing is trained or saved


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaction:
    """The effect on training of a strategy's reaction, to a change of the nodes or a wake-up."""

    rate: float  # samples per second after the stall
    stall: float = 0.0  # seconds without training, from now on
    redo: float | None = 0.0  # samples to train again; None for all since the newest safe checkpoint
    wake: float | None = None  # seconds until the strategy is called again; None cancels an earlier wake-up


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The nodes that run each pipeline, and the size of the copies that each node sends."""

    # nodes of each pipeline by stage; "" where others do the work
    rows: tuple[tuple[str, ...], ...] = ()
    # bytes that each node sends a neighbour in its pipeline at every step, in addition to the next stage's input
    copied: float = 0.0


def in_rows(cells: Sequence[str], stages: int) -> tuple[tuple[str, ...], ...]:
    """Split cells, which are listed pipeline by pipeline, into a tuple for each pipeline; () for 0 stages."""
    return tuple(tuple(cells[at : at + stages]) for at in range(0, len(cells), stages)) if stages else ()


class Policy(Protocol):
    """A strategy with its parameters. Its state is a frozen value of any type."""

    @property
    def costs(self) -> Costs: ...

    @property
    def saving(self) -> Saving | None: ...

    def begin(self) -> Any:
        """Return the policy's state before any node has come."""

    def react(self, state: Any, view: View) -> tuple[Any, Reaction | None]:
        """React to a change of nodes or a wake-up. Return the new state and the reaction; None if it has no effect."""

    def placement(self, state: Any) -> Placement:
        """Return the placement of training in a state of the policy."""


def young_daly(costs: Costs, stages: int, mtbf: float) -> Saving:
    """Return checkpoint times by Young (1974) and Daly (2006): every sqrt(2 x pause x mtbf), at least `delay` and 1 s.

    Training pauses while a stage's state is copied to host memory, and goes on while the copy is written to the
    store. mtbf: mean seconds between two losses that make the job go back.
    """
    state, storage = costs.stage(stages).state, costs.profile.storage
    pause, delay = state / SNAPSHOT_BYTES, storage.latency + state / storage.write
    return Saving(every=max(math.sqrt(2 * pause * mtbf), delay, 1.0), pause=pause, delay=delay)


def blocking(costs: Costs, stages: int, mtbf: float) -> Saving:
    """Return the times of checkpoints that stop training until they are in the store, as `torch.save` and, by default,
    `save_checkpoint` of Megatron-LM and DeepSpeed do. The interval is Young's and Daly's, at least 1 s.
    """
    storage = costs.profile.storage
    pause = storage.latency + costs.stage(stages).state / storage.write
    return Saving(every=max(math.sqrt(2 * pause * mtbf), 1.0), pause=pause, delay=0.0)


def pays(rate: float, new: float, stall: float, mtbf: float) -> bool:
    """Return whether a stall to get the rate `new` instead of `rate` pays off before the next expected loss."""
    return new * max(0.0, mtbf - stall) > rate * mtbf


def crossing_bytes(costs: Costs, placed: Placement, zones: Mapping[str, str]) -> float:
    """Return the bytes per sample that cross zones: boundary tensors, sums of gradients in a ring over the pipelines,
    and copies to neighbours. Copies of states after a loss are not counted. zones: each node's zone.
    """
    rows = [row for row in placed.rows if row]
    if not rows:
        return 0.0

    def crosses(one: str, other: str) -> bool:
        return bool(one and other) and zones.get(one, "") != zones.get(other, "")

    total = 0.0
    for row, following in zip(rows, (*rows[1:], rows[0]), strict=True):
        cost = costs.stage(len(row))
        hops = sum(crosses(one, other) for one, other in pairwise(row))
        total += hops * 2 * costs.microbatches / len(rows) * cost.boundary
        total += (hops + crosses(row[-1], row[0])) * placed.copied
        peers = (following[place * len(following) // len(row)] for place in range(len(row)))
        summed = sum(crosses(one, peer) for one, peer in zip(row, peers, strict=True))
        total += summed * 2 * (len(rows) - 1) / len(rows) * cost.gradients
    return total / costs.batch
