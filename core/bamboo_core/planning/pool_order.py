"""In which order node pools are asked for the next worker (`poolOrder: Value`). Pure.

A worker's hour in a pool costs its price, and what the losses of such an hour cost: the whole job trains nothing for
some seconds, and the next worker is paid for before it trains. The pool in which that is least comes first; the one
that is first already stays so unless another one is cheaper by enough. Pools that gave no workers lately come last.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bamboo_core.job.placement_spec import Capacity, NodePool
from bamboo_core.planning.hazards import HOUR, Exposure, Place, hazard, of_pool

CHEAPER: Final = 0.02  # of its cost: by which another pool has to be better to come before the one that is first
UNPRICED: Final = 1.0  # money an hour in every pool, unless all of them have a price
PATIENCE_SECONDS: Final = 300.0  # for which a pod finds no node, until its pool counts as one that gives none
COOLDOWN_SECONDS: Final = 900.0  # for which it does


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCost:
    """What the loss of one worker costs. seconds: for which the whole job trains nothing; job: money an hour of all its
    workers. start: seconds for which the next worker is paid for and does not train.
    """

    seconds: float
    job: float
    start: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRank:
    """What an hour of a worker costs in a pool, with losses, of which there are so many in it. price: without them."""

    name: str
    cost: float
    price: float
    losses: float
    delivers: bool = True

    def __str__(self) -> str:
        told = f"{self.name} {self.cost:.4g} ({self.price:.4g} and {self.losses:.2g} losses an hour)"
        return told if self.delivers else f"{told}, which has given no workers"


def rank_pools(
    pools: Iterable[NodePool], seen: Mapping[Place, Exposure], loss: LossCost, failing: Iterable[str], first: str
) -> tuple[PoolRank, ...]:
    """The pools that are asked at once, the one for the next worker first. seen: what was recorded of their nodes.
    failing: those that have lately given no workers. first: the one that has been first.
    """
    asked = [pool for pool in pools if not pool.after_seconds]
    priced = all(pool.price_per_hour is not None for pool in asked)
    without = set(failing)
    found = []
    for pool in asked:
        price = float(pool.price_per_hour) if priced and pool.price_per_hour is not None else UNPRICED
        losses = 0.0 if pool.capacity is Capacity.ON_DEMAND else hazard(of_pool(seen, pool.name))
        lost = (loss.seconds * loss.job + loss.start * price) / HOUR
        delivers = pool.name not in without
        found.append(
            PoolRank(name=pool.name, cost=price + losses * lost, price=price, losses=losses, delivers=delivers)
        )
    return tuple(sorted(found, key=lambda rank: (not rank.delivers, rank.cost * (1 - CHEAPER * (rank.name == first)))))


def in_order(pools: Sequence[NodePool], ranks: Sequence[PoolRank]) -> tuple[NodePool, ...]:
    """The pools in that order. Those that ask for patience (afterSeconds), or have no rank, stay at their places in the
    list. Ranks of pools that are not there, such as those that a queue rules out, count for nothing.
    """
    asked = {pool.name: pool for pool in pools if not pool.after_seconds}
    ranked = {rank.name: asked[rank.name] for rank in ranks if rank.name in asked}
    in_turn = iter(ranked.values())
    return tuple(next(in_turn) if pool.name in ranked else pool for pool in pools)


def told_order(ranks: Sequence[PoolRank]) -> str:
    """A sentence on which pool comes first, and why."""
    each = ", ".join(map(str, ranks))
    return f"workers are asked for in pool {ranks[0].name}; an hour costs, with losses: {each}" if ranks else ""


def still_failing(failed: Mapping[str, float], waiting: Mapping[str, float], now: float) -> dict[str, float]:
    """The pools that gave no workers lately, and when that was seen last. failed: as it was. waiting: by the pool's
    name, since when the pod that has waited longest has found no node in it.
    """
    kept = {name: at for name, at in failed.items() if now - at < COOLDOWN_SECONDS}
    return kept | {name: now for name, since in waiting.items() if now - since >= PATIENCE_SECONDS}
