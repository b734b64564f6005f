"""What a worker costs in a pool by the prices that are known now, in place of what the manifest says. Pure."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Final

from bamboo_core.job.placement_spec import Capacity, NodePool
from bamboo_core.job.spec import JobSpec
from bamboo_core.prices.price_list import MachinePrice, PriceList, zone_price

EXACT: Final = Decimal("0.000001")  # of a price

Zones = Mapping[str, Collection[str]]  # by the name of a pool: of each of its workers that has a node


def worker_price(pool: NodePool, job: JobSpec, prices: PriceList | None, zone: str = "") -> Decimal | None:
    """The price of one worker for an hour, its share of a node in that zone ("": of any); None if it has no price."""
    machine = _machine(pool, prices)
    found = None if machine is None else _of_node(pool, machine, zone)
    if found is None:
        return pool.price_per_hour
    return _exact(Decimal(str(found)) / job.spread.workers_per_node)


def _exact(price: Decimal) -> Decimal:
    """The price to the millionth, and not longer than that takes."""
    return price.quantize(EXACT).normalize() + 0


def _of_node(pool: NodePool, machine: MachinePrice, zone: str) -> float | None:
    if pool.capacity is Capacity.ON_DEMAND:
        return machine.on_demand
    there = zone_price(machine, zone) if zone else None
    return machine.spot if there is None else there


def _machine(pool: NodePool, prices: PriceList | None) -> MachinePrice | None:
    return prices.machines.get(pool.machine) if prices is not None and pool.machine is not None else None


def priced_pools(job: JobSpec, prices: PriceList | None, zones: Zones) -> tuple[NodePool, ...]:
    """The job's pools with what a worker costs there now: where zones differ, in the mean over those that are there."""

    def price(pool: NodePool) -> Decimal | None:
        there = Counter(zones.get(pool.name, ()) or ("",))
        found = [(worker_price(pool, job, prices, zone), workers) for zone, workers in there.items()]
        known = [(one, workers) for one, workers in found if one is not None]
        if len(known) < 2:
            return known[0][0] if known else None
        whole = sum((one * workers for one, workers in known), Decimal(0))
        return _exact(whole / sum(workers for _, workers in known))

    return tuple(pool if pool.machine is None else replace(pool, price_per_hour=price(pool)) for pool in job.node_pools)


def unknown_machines(job: JobSpec, prices: PriceList | None) -> Iterator[str]:
    """A sentence for each pool whose machine has no price of its kind, so that what the manifest says counts."""
    for index, pool in enumerate(job.node_pools):
        if pool.machine is None:
            continue
        machine, field = _machine(pool, prices), f"spec.nodePools[{index}].machine"
        counts = "pricePerHour counts" if pool.price_per_hour is not None else "its workers are not in the cost"
        if prices is None:
            yield f"{field}: the operator has read no prices (--prices); {counts}"
        elif machine is None:
            yield f"{field}: the operator's prices know no {pool.machine}; {counts}"
        elif pool.capacity is Capacity.ON_DEMAND and machine.on_demand is None:
            yield f"{field}: the operator's prices have no onDemand for {pool.machine}; {counts}"
