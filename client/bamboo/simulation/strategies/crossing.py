"""What strategies send from zone to zone while they train, which most clouds bill. Pure; docs/simulator.md."""

from collections.abc import Mapping
from itertools import pairwise

from bamboo.simulation.strategies.costs import Costs
from bamboo.simulation.strategies.policy import Placement


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
