"""The interface of all strategies: what they are told, what they may do about it, how often they take checkpoints, and
what they send from zone to zone. Pure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from strategies.costs import SNAPSHOT_BYTES, Costs


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


def young_daly(costs: Costs, stages: int, mtbf: float) -> Saving:
    """The interval of Young (1974) and Daly (2006): sqrt(2 x pause x mtbf), but at least what writing takes. Training
    pauses while a stage's state is copied to host memory, and goes on while that is written. mtbf: seconds between two
    losses that make the job go back.
    """
    state, storage = costs.stage(stages).state, costs.profile.storage
    pause, delay = state / SNAPSHOT_BYTES, storage.latency + state / storage.write
    return Saving(every=max(math.sqrt(2 * pause * mtbf), delay, 1.0), pause=pause, delay=delay)


def blocking(costs: Costs, stages: int, mtbf: float) -> Saving:
    """The interval of `young_daly` for checkpoints during which training stops until they are in the store, as
    `torch.save` and the `save_checkpoint` of Megatron-LM and DeepSpeed do it if nothing is said about it.
    """
    storage = costs.profile.storage
    pause = storage.latency + costs.stage(stages).state / storage.write
    return Saving(every=max(math.sqrt(2 * pause * mtbf), 1.0), pause=pause, delay=0.0)


def pays(rate: float, new: float, stall: float, mtbf: float) -> bool:
    """Whether a stall is won back, by being faster, until the next loss."""
    return new * max(0.0, mtbf - stall) > rate * mtbf


def crossing_bytes(costs: Costs, placed: Placement, zones: Mapping[str, str]) -> float:
    """The bytes that cross zones for each sample, by the zones of nodes: outputs of stages and their gradients, the sum
    of gradients in a ring over the pipelines, and what a policy copies to neighbours; not states that are copied after
    a loss.
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
