"""Which candidate of a front is recommended, and why, in words that name figures. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bamboo.job.placement_spec import SpreadPolicy, SpreadSpec
from bamboo.job.spec import RedundancyMode
from bamboo.simulation.zone_price import traffic_usd
from bamboo.sizing.calm import Calm
from bamboo.sizing.candidate import Candidate
from bamboo.sizing.pareto import best_product
from bamboo.sizing.trials import Assessment
from bamboo.sizing.world import HOUR, World
from bamboo.text import count

SHOWN_ZONES = 4
ONE_EACH = SpreadSpec()  # a worker on each node
PLACES = {
    SpreadPolicy.INTERLEAVE: "neighbours in different zones",
    SpreadPolicy.ZONE_PER_PIPELINE: "each pipeline in one zone",
    SpreadPolicy.SINGLE_ZONE: "all in one zone",
    SpreadPolicy.NONE: "in whatever zones",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What the user can spend: USD of the whole job, and hours; None: no bound."""

    budget: float | None = None
    deadline: float | None = None

    def kept_by(self, one: Assessment) -> bool:
        """In 95 of 100 runs, as far as the ones that were simulated tell."""
        within = self.budget is None or one.sure("usd") <= self.budget
        return within and (self.deadline is None or one.sure("hours") <= self.deadline)


def choose(front: Sequence[Assessment], bounds: Bounds) -> Assessment | None:
    """Within a budget the fastest, before a deadline the cheapest; with neither, where time x cost is least.

    None if none keeps the bounds.
    """
    kept = [one for one in front if bounds.kept_by(one) and math.isfinite(one.hours)]
    if not kept:
        return None
    if bounds.deadline is not None:
        return min(kept, key=lambda one: (one.usd, one.hours))
    if bounds.budget is not None:
        return min(kept, key=lambda one: (one.hours, one.usd))
    return best_product(kept, lambda one: one.point)


def in_words(one: Candidate, several_zones: bool = True) -> str:
    """The candidate for a person, in one line; of zones nothing if there is only one."""
    grid = f"{count(one.stages, 'stage')} x {count(one.pipelines, 'pipeline')}"
    parts = [grid, f"microbatches of {one.micro_batch}"]
    if one.mode is RedundancyMode.NONE:
        parts.append("no replicas")
    else:
        parts.append(f"{one.mode.value}, {count(one.replicas, 'replica')}")
    if one.standby:
        parts.append(f"{one.standby} on standby")
    if one.on_demand is not None:
        parts.append(f"{one.on_demand} of {one.workers} on demand")
    return ", ".join([*parts, _place(one)] if several_zones else parts)


def _place(one: Candidate) -> str:
    if len(one.zones) > 1:
        return f"a pipeline in each of the zones {', '.join(one.zones)}"
    return f"all in zone {one.zones[0]}" if one.zones else PLACES[one.spread]


def zones_named(world: World, one: Candidate) -> str:
    """What it means that the manifest names zones, and what the others cost; "" if it names none."""
    if not one.zones:
        return ""
    others = [zone for zone in world.zones_for(one.machine, one.together) if zone not in one.zones][:SHOWN_ZONES]
    usd = {zone: f"{world.spot_usd(one.machine, zone):.3g}" for zone in (*one.zones, *others)}
    prices = ", ".join(f"{zone} {usd[zone]}" for zone in others)
    wanted, supplies = world.spec.spread.nodes(one.together), world.market.supplies
    have = {zone: f"{supplies[zone].mean(wanted):.1f} of {wanted} nodes" for zone in one.zones if zone in supplies}
    if len(one.zones) == 1:
        zone = one.zones[0]
        has = f", and there are {have[zone]} on average" if have else ""
        return (
            f" A node in zone {zone} costs {usd[zone]} USD an hour (in {prices}){has}; the manifest names that zone for"
            " its pods (nodeSelector), so while it has no nodes the job waits for it."
        )
    there = ", ".join(f"{have[zone]} in {zone}" for zone in have)
    return (
        f" A node costs {', '.join(f'{usd[zone]} USD an hour in {zone}' for zone in one.zones)} (in {prices})"
        f"{f', and on average there are {there}' if there else ''}; the manifest names these zones for its pods"
        " (nodeAffinity), so while one of them has no nodes its pipeline waits for it."
    )


def on_demand(world: World, calm: Sequence[tuple[Candidate, Calm]], chosen: Assessment) -> str:
    """What the cheapest grid would take on demand, where nothing is lost, that is not slower; "" without a price."""
    found = []
    for one, undisturbed in calm:
        price, start = world.on_demand_usd(one.machine), world.machines[one.machine].profile.times.start
        if price is None:
            continue
        hours = (start + world.steps * undisturbed.seconds) / HOUR
        traffic = world.steps * traffic_usd(undisturbed.between_zones, world.traffic_price)
        nodes = world.spec.spread.nodes(one.stages * one.pipelines)
        found.append((nodes * price * hours + traffic, hours, nodes, one))
    fast = [entry for entry in found if entry[1] <= chosen.hours] or sorted(found, key=lambda entry: entry[1])[:1]
    if not fast or not chosen.usd:
        return ""
    usd, hours, nodes, one = min(fast)
    return (
        f"On demand, where no node is lost, {count(nodes, 'node')} of {one.machine} would take"
        f" {hours:.2f} h and cost {usd:.2f} USD, {usd / chosen.usd:.1f} times as much."
    )


def reasons(
    chosen: Assessment,
    front: Sequence[Assessment],
    simulated: Sequence[Assessment],
    bounds: Bounds,
    *,
    several_zones: bool = True,
    spread: SpreadSpec = ONE_EACH,
) -> str:
    """A paragraph. simulated: for comparisons, with runs as long as those of the front, which is ascending in time.
    several_zones: whether where nodes are is worth a word. spread: of the job, which says how many workers a node has.
    """
    said = [_what(chosen, several_zones, spread), _rule(chosen, bounds), _beside(chosen, front, spread)]
    said += [_without(chosen, simulated, "spread"), _without(chosen, simulated, "zones")]
    said += [_without(chosen, simulated, "mode")]
    said += [_without(chosen, simulated, "standby"), _money(chosen) if several_zones else "", _sure(chosen)]
    return " ".join(part for part in said if part)


def amount(one: Assessment, name: str, unit: str = "") -> str:
    """Mean and, of several runs, deviation; a dash for what has no end."""
    mean, away = one.mean(name), one.deviation(name)
    if not math.isfinite(mean):
        return "-"
    digits = 0 if mean >= 1000 else 1 if mean >= 10 else 2
    spread = f" ± {away:.{digits}f}" if len(one.outcomes) > 1 else ""
    return f"{mean:.{digits}f}{spread} {unit}".rstrip()


def _what(chosen: Assessment, several_zones: bool, spread: SpreadSpec) -> str:
    one = chosen.candidate
    nodes = f"{_nodes(one, spread)} of {one.machine} ({in_words(one, several_zones)})"
    return (
        f"Recommended are {nodes}: the job takes {amount(chosen, 'hours', 'h')} and costs"
        f" {amount(chosen, 'usd', 'USD')}."
    )


def _rule(chosen: Assessment, bounds: Bounds) -> str:
    if bounds.deadline is not None:
        more = f" and costs at most {bounds.budget:g} USD" if bounds.budget is not None else ""
        return (
            f"Of what ends within {bounds.deadline:g} h{more} in 95 of 100 runs it is the cheapest"
            f" (95 of 100 end within {chosen.sure('hours'):.2f} h, for at most {chosen.sure('usd'):.2f} USD)."
        )
    if bounds.budget is not None:
        return (
            f"Of what costs at most {bounds.budget:g} USD in 95 of 100 runs it is the fastest"
            f" (95 of 100 cost at most {chosen.sure('usd'):.2f} USD)."
        )
    return "Nothing else has a smaller product of time and cost; --deadline and --budget choose otherwise."


def _nodes(one: Candidate, spread: SpreadSpec) -> str:
    return count(spread.nodes(one.workers), "node")


def _beside(chosen: Assessment, front: Sequence[Assessment], spread: SpreadSpec) -> str:
    """Its neighbours on the front: what more or less money buys."""
    at = [one.candidate for one in front].index(chosen.candidate)
    said = []
    if at > 0:
        faster = front[at - 1]
        said.append(
            f"{_nodes(faster.candidate, spread)} would take {_less(faster.hours, chosen.hours)} less time"
            f" and cost {_more(faster.usd, chosen.usd)} more"
        )
    if at + 1 < len(front):
        cheaper = front[at + 1]
        said.append(
            f"{_nodes(cheaper.candidate, spread)} would cost {_less(cheaper.usd, chosen.usd)} less and take"
            f" {_more(cheaper.hours, chosen.hours)} more time"
        )
    return f"{'; '.join(said)}." if said else ""


def _without(chosen: Assessment, simulated: Sequence[Assessment], name: str) -> str:
    """The same with another value of one field, if that was simulated: what the choice is worth."""
    others = [one for one in simulated if _only_differs(one.candidate, chosen.candidate, name)]
    return " ".join(_instead(one, name) for one in others)


def _instead(best: Assessment, name: str) -> str:
    if not math.isfinite(best.hours):
        return f"With {_value(best.candidate, name)} it would not come to its end in every run."
    traffic = best.mean("traffic_usd")
    return (
        f"With {_value(best.candidate, name)} it would take {amount(best, 'hours', 'h')} and cost"
        f" {amount(best, 'usd', 'USD')}"
        f"{f', {traffic:.0f} USD of it for traffic between zones' if traffic >= 1 else ''}."
    )


def _only_differs(one: Candidate, other: Candidate, name: str) -> bool:
    ignored = {name, {"mode": "replicas", "spread": "zones"}.get(name, name)}
    same = (field for field in Candidate.__slots__ if field not in ignored)
    return getattr(one, name) != getattr(other, name) and all(getattr(one, f) == getattr(other, f) for f in same)


def _value(one: Candidate, name: str) -> str:
    if name in ("spread", "zones"):
        return _place(one)
    if name == "standby":
        return f"{one.standby or 'no'} on standby"
    return f"redundancy.mode {one.mode.value}"


def _money(chosen: Assessment) -> str:
    traffic = chosen.mean("traffic_usd")
    if not chosen.usd:
        return ""
    return f"Traffic between zones is {traffic:.2f} USD of its cost, {100 * traffic / chosen.usd:.0f} %."


def _sure(chosen: Assessment) -> str:
    """What the runs say, and what so few of them cannot say."""
    runs, losses, fatal = len(chosen.outcomes), int(chosen.total("preemptions")), int(chosen.total("fatal"))
    simulated = chosen.mean("simulated")
    said = f"That is from {count(runs, 'run')} of {simulated:.1f} h on average"
    if simulated < 0.999 * chosen.hours:
        said += f", the rest of {chosen.hours:.1f} h in proportion"
    if not losses:
        return f"{said}, in which no node was lost."
    if fatal:
        return f"{said}, with {count(losses, 'lost node')}; {count(fatal, 'time')} all copies of a stage were lost."
    few = 3 / losses  # the rule of three
    if few >= 1:
        return f"{said}, with {count(losses, 'lost node')}: too few to say how often all copies of a stage are lost."
    return (
        f"{said}, with {count(losses, 'lost node')}; never were all copies of a stage lost, so that happens in less"
        f" than {100 * few:.1f} of 100 losses, with 95 % confidence."
    )


def _less(one: float, other: float) -> str:
    return f"{100 * (1 - one / other):.0f} %"


def _more(one: float, other: float) -> str:
    return f"{100 * (one / other - 1):.0f} %"
