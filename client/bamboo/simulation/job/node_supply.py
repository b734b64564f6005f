"""The nodes of a simulated job and their prices: spot nodes come and go by a trace, on-demand nodes stay.

The supply has no clock; its caller passes the time in seconds.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache, partial
from statistics import median

from bamboo.simulation.job.job_zones import named_zones, pool_allows, zone_allowed
from bamboo.traces.trace import PriceChange, Trace, price_series
from bamboo_core.job.placement_spec import Capacity, NodePool, SpreadPolicy, next_prices, pool_price
from bamboo_core.job.spec import JobSpec, most_pipelines, pod_spread, wanted_workers
from bamboo_core.planning.profile import Prices


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedNode:
    name: str
    zone: str = ""
    pool: NodePool | None = None  # its on-demand pool; None: a spot node
    spot: str = ""  # the spot pool that it is used for, if the job has any
    group: int = 0  # of nodes that should share a zone: a pipeline's with ZonePerPipeline, else 0


def _money(price: float | None) -> Decimal | None:
    return None if price is None else Decimal(repr(price))


class NodeSupply:
    """A supply of nodes, which places workers as a scheduler places the operator's pods (`spread`, templates' zones).

    Spot pools are tried in order; a pool uses nodes in the zones that its template allows. If a node holds several
    workers, nodes in use are filled first. price: USD per hour of a spot node, which overrides all other spot prices.
    """

    def __init__(self, trace: Trace, spec: JobSpec, prices: Prices | None, price: float | None = None) -> None:
        self._trace, self._prices, self._price = trace, prices, price
        self._spread, self._room, pools = pod_spread(spec), spec.spread.workers_per_node, spec.node_pools
        zones = dict.fromkeys(change.zone for change in trace.changes)
        self._may_be_in = cache(partial(zone_allowed, spec))
        self._zones = tuple(zone for zone in zones if self._may_be_in(zone)) or named_zones(spec) or ("",)
        count, wanted = most_pipelines(spec), wanted_workers(spec)
        self._most_of_group = [wanted // count + (group < wanted % count) for group in range(count)]
        self.spot = tuple(pool for pool in pools if pool.capacity is Capacity.SPOT) if pools else (NodePool(name=""),)
        self.fallbacks = tuple(pool for pool in pools if pool.capacity is Capacity.ON_DEMAND)
        self._zones_of: dict[str, dict[str, bool]] = {pool.name: {} for pool in self.spot}  # if allowed
        self._spec = spec
        self._node_price = spec.spread.node_price
        self._pool_prices = {pool.name: self._node_price(pool.price_per_hour) for pool in self.spot}
        self._pool_price = self._node_price(pool_price(self.spot, Capacity.SPOT))  # of pools without a price
        self._available: dict[str, SimulatedNode] = {}
        self._used: dict[str, SimulatedNode] = {}
        self._workers: Counter[str] = Counter()  # by node
        self._made = 0
        self._series: dict[str, tuple[tuple[float, ...], tuple[PriceChange, ...]]] = {}

    def came(self, name: str, zone: str) -> None:
        """Add a node, unless the job may not use its zone."""
        if self._may_be_in(zone):
            self._available[name] = SimulatedNode(name=name, zone=zone)

    def noticed(self, name: str) -> None:
        """Stop using a node for new workers, because it will be taken away."""
        self._available.pop(name, None)

    def went(self, name: str) -> bool:
        """Remove a node. Return whether it was used."""
        used = name in self._used
        self._available.pop(name, None)
        self._used.pop(name, None)
        self._workers.pop(name, None)
        return used

    def take(self) -> SimulatedNode | None:
        """Place a worker on the best spot node by pool, zone and age. Return the node, or None if none is suitable."""
        return next((node for pool in self.spot if (node := self._take_of(pool)) is not None), None)

    def _take_of(self, pool: NodePool) -> SimulatedNode | None:
        if pool.max_workers is not None and self._workers_of(pool) >= pool.max_workers:
            return None
        begun: dict[int, SimulatedNode] = {}
        if self._room > 1:
            used = (node for node in self._used.values() if node.pool is None and node.spot == pool.name)
            begun = {node.group: node for node in used if node.name in self._available and self._has_room(node)}
        free = self._free(pool)
        for group in self._groups():
            zones = self._allowed(group, Counter(node.zone for node in free))
            unused = (node for zone in zones for node in free if node.zone == zone)
            candidate = begun.get(group) or next(unused, None)
            if candidate is not None:
                return self._use(replace(candidate, group=group, spot=pool.name))
        return None

    def _free(self, pool: NodePool) -> list[SimulatedNode]:
        """Return the unused spot nodes in the zones that the pool allows."""
        return [
            node for node in self._available.values() if node.name not in self._used and self._allows(pool, node.zone)
        ]

    def _allows(self, pool: NodePool, zone: str) -> bool:
        allowed = self._zones_of[pool.name]
        if zone not in allowed:
            allowed[zone] = pool_allows(self._spec, pool, zone)
        return allowed[zone]

    def _workers_of(self, pool: NodePool) -> int:
        mine = (name for name, node in self._used.items() if node.pool is None and node.spot == pool.name)
        return sum(self._workers[name] for name in mine)

    def _has_room(self, node: SimulatedNode) -> bool:
        return self._workers[node.name] < self._room

    def _use(self, node: SimulatedNode) -> SimulatedNode:
        self._used[node.name] = node
        self._workers[node.name] += 1
        return node

    def _groups(self) -> Iterable[int]:
        """Return groups that lack workers, smallest first; if none does, the smallest; (0,) without ZonePerPipeline."""
        if self._spread is not SpreadPolicy.ZONE_PER_PIPELINE:
            return (0,)
        sizes: Counter[int] = Counter()
        for node in self._used.values():
            sizes[node.group] += self._workers[node.name]
        groups = sorted(range(len(self._most_of_group)), key=lambda group: sizes[group])
        return [group for group in groups if sizes[group] < self._most_of_group[group]] or groups[:1]

    def _allowed(self, group: int, free: Counter[str]) -> list[str]:
        """Return the zones allowed for the group's next node, best first. free: the number of unused nodes by zone."""
        used = Counter(node.zone for node in self._used.values())
        if self._spread is SpreadPolicy.INTERLEAVE:
            return sorted(free, key=lambda zone: used[zone])
        if mine := {node.zone for node in self._used.values() if node.group == group}:
            return sorted(mine)
        return sorted(free, key=lambda zone: (used[zone] > 0, -free[zone]))

    def take_on_demand(self, waited: float) -> SimulatedNode | None:
        """Place a worker on a node of the first on-demand pool that is due and not full. Return the node, or None.

        waited: seconds since the worker was requested.
        """
        for pool in self.fallbacks:
            mine = [node for node in self._used.values() if node.pool == pool]
            used = sum(self._workers[node.name] for node in mine)
            if waited >= pool.after_seconds and (pool.max_workers is None or used < pool.max_workers):
                group = next(iter(self._groups()), 0)
                if begun := next((node for node in mine if node.group == group and self._has_room(node)), None):
                    return self._use(begun)
                self._made += 1
                zone = self._allowed(group, Counter(self._zones))[0]
                return self._use(SimulatedNode(name=f"{pool.name}-{self._made}", zone=zone, pool=pool, group=group))
        return None

    def release(self, name: str) -> None:
        """Remove a worker from a node. An empty node is no longer paid; a spot node without notice can be reused."""
        self._workers[name] -= 1
        if self._workers[name] <= 0:
            del self._workers[name]
            self._used.pop(name, None)

    @property
    def used(self) -> int:
        return len(self._used)

    def usd_per_hour(self, now: float) -> float | None:
        """Return the USD per hour of all used nodes; None if a price is unknown."""
        total, known = 0.0, dict[tuple[int, str], float | None]()
        for node in self._used.values():
            kind = id(node.pool), node.zone
            if kind not in known:
                known[kind] = self._price_of(node, now)
            price = known[kind]
            if price is None:
                return None
            total += price
        return total

    def worker_prices(self, now: float) -> dict[str, float]:
        """Return the USD per hour of one worker on each used node, by node name, without nodes of unknown price."""
        prices = {name: self._price_of(node, now) for name, node in self._used.items()}
        return {name: price / self._room for name, price in prices.items() if price is not None}

    def next_prices(self, now: float) -> tuple[tuple[float, int], ...]:
        """Return (USD per hour of a worker, number of further workers) of pools with price and room, next one first."""
        counts = Counter[str]()
        for node in self._used.values():
            counts[node.pool.name if node.pool else node.spot] += self._workers[node.name]
        spot = (replace(pool, price_per_hour=_money(self.next_spot_price(pool, now))) for pool in self.spot)
        on_demand = (
            replace(pool, price_per_hour=_money(self._price_of(SimulatedNode(name="", zone="", pool=pool), now)))
            for pool in self.fallbacks
        )
        priced = next_prices((*spot, *on_demand), counts)
        return tuple((price / self._room, count) for price, count in priced)

    def next_spot_price(self, pool: NodePool, now: float) -> float | None:
        """Return the pool's median USD per node-hour in zones with free nodes, else in all zones; None if unknown."""
        zones = [node.zone for node in self._free(pool)] or [zone for zone in self._zones if self._allows(pool, zone)]
        prices = [
            self._price_of(SimulatedNode(name="", zone=zone, spot=pool.name), now) for zone in dict.fromkeys(zones)
        ]
        known = [price for price in prices if price is not None]
        return median(known) if known else None

    def _price_of(self, node: SimulatedNode, now: float) -> float | None:
        if node.pool is not None:
            known = self._prices.on_demand if self._prices else None
            price = self._node_price(node.pool.price_per_hour)
            return price if price is not None else known
        if self._price is not None:
            return self._price
        if node.zone not in self._series:
            series = price_series(self._trace, node.zone)
            self._series[node.zone] = tuple(price.at for price in series), series
        times, series = self._series[node.zone]
        if series:
            return series[max(0, bisect_right(times, now) - 1)].usd_per_hour
        if (price := self._pool_prices.get(node.spot)) is not None:
            return price
        if self._pool_price is not None:
            return self._pool_price
        return self._prices.spot if self._prices else None
