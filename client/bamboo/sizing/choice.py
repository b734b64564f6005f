"""Choice of the recommended candidate from the Pareto front, and the reasons in sentences. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bamboo.sizing.estimate import Estimate
from bamboo.sizing.trials.candidate import Candidate
from bamboo.sizing.trials.trial import Assessment
from bamboo.sizing.trials.world import HOUR, World
from bamboo.sizing.units import ReadableUnit, money_unit, time_unit
from bamboo.traces.generate import Pattern
from bamboo_core.job.placement_spec import SpreadPolicy, SpreadSpec
from bamboo_core.text import count

HUNDRED = 100  # least number of runs for which "in 95 of 100 runs" is claimed
ALONE = (
    "This is a job for one node: no other one has a copy of its state, so a loss takes it back to its newest"
    " checkpoint, or to its beginning if it keeps none."
)
PLACES = {
    SpreadPolicy.INTERLEAVE: "neighbours in different zones",
    SpreadPolicy.ZONE_PER_PIPELINE: "each pipeline in one zone",
    SpreadPolicy.SINGLE_ZONE: "all in one zone",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The user's limits on the whole job: its cost (budget, USD) and its time (deadline, hours). None: no limit."""

    budget: float | None = None
    deadline: float | None = None

    @property
    def any(self) -> bool:
        return self.budget is not None or self.deadline is not None

    def rank(self, hours: float, usd: float) -> tuple[float, ...]:
        """Return a sort key: time x cost; with limits (excess, time, cost), or with a deadline (excess, cost, time)."""
        if not self.any:
            return (hours * usd,)
        excess = max(1.0, hours / (self.deadline or math.inf), usd / (self.budget or math.inf))  # 1: none
        return (excess, usd, hours) if self.deadline is not None else (excess, hours, usd)

    def kept_by(self, one: Assessment) -> bool:
        """Return whether a candidate keeps the bounds in 95 of 100 runs, estimated from the spread of its runs."""
        within = self.budget is None or one.sure("usd") <= self.budget
        return within and (self.deadline is None or one.sure("hours") <= self.deadline)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """An alternative to the recommended plan. The deviations are None unless the plan was simulated several times."""

    label: str
    hours: float
    usd: float
    traffic_usd: float
    hours_deviation: float | None = None
    usd_deviation: float | None = None


def choose(front: Sequence[Assessment], bounds: Bounds) -> Assessment | None:
    """Return the best candidate of the front, by `rank`, that keeps the bounds in finite time; None if none does."""
    kept = [one for one in front if bounds.kept_by(one) and math.isfinite(one.hours)]
    return min(kept, key=lambda one: bounds.rank(*one.point), default=None)


def _in_words(one: Candidate, several_zones: bool) -> str:
    """Return a phrase on the candidate's grid and protection, and on its placement if there are several zones."""
    grid = f"{count(one.stages, 'stage')} x {count(one.pipelines, 'pipeline')}"
    parts = [grid, f"microbatches of {one.micro_batch}"]
    if one.workers == 1:
        return ", ".join(parts)
    if not one.redundancy.kept:
        parts.append("no replicas")
    else:
        parts.append(f"{one.redundancy.mode.value}, {count(one.replicas, 'replica')}")
    if one.standby:
        parts.append(f"{one.standby} on standby")
    return ", ".join([*parts, PLACES[one.spread]] if several_zones else parts)


def on_demand(world: World, estimated: Sequence[Estimate], chosen: Assessment) -> Alternative | None:
    """Return the cheapest on-demand grid that is not slower than `chosen`, else the fastest, assuming no losses.

    None if no machine has an on-demand price, or the chosen candidate costs nothing.
    """
    found = []
    for one in estimated:
        grid, price = replace(one.candidate, standby=0), world.on_demand_usd(one.candidate.machine)
        if price is None:
            continue
        hours = (world.machines[grid.machine].profile.times.start + world.steps * one.seconds) / HOUR
        traffic, nodes = world.steps * one.traffic, world.spec.spread.nodes(grid.workers)
        found.append((nodes * price * hours + traffic, hours, nodes, grid.machine, traffic))
    fast = [entry for entry in found if entry[1] <= chosen.hours] or sorted(found, key=lambda entry: entry[1])[:1]
    if not fast or not chosen.usd:
        return None
    usd, hours, nodes, machine, traffic = min(fast)
    label = f"on demand, {count(nodes, 'node')} of {machine}"
    return Alternative(label=label, hours=hours, usd=usd, traffic_usd=traffic)


def comparisons(chosen: Assessment, simulated: Sequence[Assessment]) -> list[Alternative]:
    """Return the simulated plans that differ from the chosen one in only one of spread policy, mode and standbys.

    If the mode differs, replicas may differ, too. A single worker has no neighbours: only standbys are compared.
    """
    asked = ("standby",) if chosen.candidate.workers == 1 else ("spread", "mode", "standby")
    pairs = [(one, name) for name in asked for one in simulated if _only_differs(one.candidate, chosen.candidate, name)]
    return [_comparison(one, _value(one.candidate, name)) for one, name in pairs]


def _comparison(one: Assessment, label: str) -> Alternative:
    several = len(one.outcomes) > 1
    return Alternative(
        label=label,
        hours=one.hours,
        usd=one.usd,
        traffic_usd=one.mean("traffic_usd"),
        hours_deviation=one.deviation("hours") if several else None,
        usd_deviation=one.deviation("usd") if several else None,
    )


def reasons(world: World, chosen: Assessment, bounds: Bounds) -> tuple[str, ...]:
    """Return sentences on the recommendation: what it is, by which rule, from how many runs; then warnings."""
    made_up, candidate, spread = world.market.generation, chosen.candidate, world.spec.spread
    sentences = [_what(chosen, len(world.market.zones) > 1, spread), _rule(chosen, bounds), _sure(chosen)]
    if spread.nodes(candidate.workers) == 1:
        sentences.append(ALONE)
    if made_up and made_up.pattern is not Pattern.ZONES and candidate.spread.packs:
        sentences.append("With these made-up nodes no zone is ever lost as a whole; see what --pattern zones says.")
    return tuple(sentences)


def no_plan(front: Sequence[Assessment], bounds: Bounds) -> tuple[str, ...]:
    """Return one sentence on why no plan is recommended. front: the Pareto-optimal plans, the fastest first."""
    if not any(one.hours < math.inf for one in front):
        failed = next((outcome.failed for one in front for outcome in one.outcomes if outcome.failed), "")
        return (f"no plan brings the job to its end in every run: {failed or 'there were too few nodes'}",)
    fastest, cheapest = front[0], min(front, key=lambda one: one.sure("usd"))
    hours, usd, least = fastest.sure("hours"), fastest.sure("usd"), cheapest.sure("usd")
    return (
        f"no plan keeps the bounds {odds(len(fastest.outcomes))}: the fastest takes up to"
        f" {time_unit((hours,)).say(hours)} for {money_unit((usd,)).say(usd)}, the cheapest costs up to"
        f" {money_unit((least,)).say(least)}",
    )


def amount(one: Assessment, name: str, unit: ReadableUnit) -> str:
    """Format the mean of figure `name` in the unit, with its deviation if it has several runs; "-" if not finite."""
    return unit.number(one.mean(name), one.deviation(name) if len(one.outcomes) > 1 else None)


def odds(runs: int) -> str:
    """Return a phrase on how certain a bound is after `runs` runs: "in 95 of 100 runs" from HUNDRED runs on."""
    if runs >= HUNDRED:
        return "in 95 of 100 runs"
    return "in the one run" if runs == 1 else f"by {runs} runs (mean and 1.645 deviations)"


def _figure(one: Assessment, name: str) -> str:
    unit = time_unit((one.hours,)) if name == "hours" else money_unit((one.usd,))
    return f"{amount(one, name, unit)} {unit.name}"


def _what(chosen: Assessment, several_zones: bool, spread: SpreadSpec) -> str:
    one = chosen.candidate
    number = spread.nodes(one.workers)
    verb = "is" if number == 1 else "are"
    nodes = f"{count(number, 'node')} of {one.machine} ({_in_words(one, several_zones)})"
    return f"Recommended {verb} {nodes}: the job takes {_figure(chosen, 'hours')} and costs {_figure(chosen, 'usd')}."


def _rule(chosen: Assessment, bounds: Bounds) -> str:
    hours, usd, sure = chosen.sure("hours"), chosen.sure("usd"), odds(len(chosen.outcomes))
    time, money = time_unit((hours,)).say(hours), money_unit((usd,)).say(usd)
    if bounds.deadline is not None:
        more = f" and costs at most {money_unit((bounds.budget,)).say(bounds.budget)}" if bounds.budget else ""
        end = time_unit((bounds.deadline,)).say(bounds.deadline)
        return f"It is the cheapest that ends within {end}{more} {sure}: at most {time} and {money}."
    if bounds.budget is not None:
        most = money_unit((bounds.budget,)).say(bounds.budget)
        return f"It is the fastest that costs at most {most} {sure}: at most {money}."
    return "Nothing else has a smaller product of time and cost; --deadline and --budget choose otherwise."


def _only_differs(one: Candidate, other: Candidate, name: str) -> bool:
    ignored = {name, "replicas"} if name == "mode" else {name}
    same = (field for field in Candidate.__slots__ if field not in ignored)
    return getattr(one, name) != getattr(other, name) and all(getattr(one, f) == getattr(other, f) for f in same)


def _value(one: Candidate, name: str) -> str:
    if name == "spread":
        return PLACES[one.spread]
    if name == "standby":
        return f"{one.standby or 'none'} on standby"
    return f"mode {one.redundancy.mode.value}"


def _sure(chosen: Assessment) -> str:
    """Return a sentence on the runs: number, duration, lost nodes, and how often all copies of a stage were lost."""
    runs, losses, fatal = len(chosen.outcomes), int(chosen.total("preemptions")), int(chosen.total("fatal"))
    simulated = chosen.mean("simulated")
    text = f"That is from {count(runs, 'run')} of {time_unit((simulated,)).say(simulated)} on average"
    if simulated < 0.999 * chosen.hours:
        text += f", the rest of {time_unit((chosen.hours,)).say(chosen.hours)} in proportion"
    if not losses:
        return f"{text}, in which no node was lost."
    if fatal:
        return f"{text}, with {count(losses, 'lost node')}; {count(fatal, 'time')} all copies of a stage were lost."
    few = 3 / losses  # the rule of three
    if few >= 1:
        return f"{text}, with {count(losses, 'lost node')}: too few to say how often all copies of a stage are lost."
    return (
        f"{text}, with {count(losses, 'lost node')}; never were all copies of a stage lost, so that happens in less"
        f" than {100 * few:.1f} of 100 losses, with 95 % confidence."
    )
