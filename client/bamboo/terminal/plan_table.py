"""The report of `bamboo plan`: recommended and alternative plans as text with a table, and as JSON. Pure."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group

from bamboo.sizing.choice import Alternative, Bounds, amount
from bamboo.sizing.search import SearchResult
from bamboo.sizing.trials.candidate import Candidate, edited, edits
from bamboo.sizing.trials.trial import Assessment
from bamboo.sizing.trials.world import World
from bamboo.sizing.units import ReadableUnit, money_unit, time_unit
from bamboo.terminal.tables import fitted, indented_json
from bamboo_core.text import count

FIELDS = (
    "MACHINE",
    "GRID",
    "MICROBATCH",
    "MODE",
    "REPLICAS",
    "STANDBY",
    "ZONES",
)
WORDS = ("MACHINE", "MODE", "ZONES")  # all others are numbers
MEANS = ("traffic_usd", "nodes", "throughput", "goodput", "preemptions", "takeovers", "restores", "fatal", "simulated")
WIDTH = 100  # largest width of paragraphs, in columns
NOISE = "how far these runs differ by chance, and nothing else."
EXPECT = "Expect a real job to reach 0.8 to 1.0 of the simulated speed."
NOTHING = None  # value of a field without effect in an option


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The content of a `bamboo plan` report: the search result, its reasons, alternatives and input."""

    found: SearchResult
    reasons: tuple[str, ...]  # sentences on why the chosen plan is recommended, or why none is
    instead: tuple[Alternative, ...]
    bounds: Bounds
    world: World


def plan_text(report: PlanReport, width: int | None = None) -> str:
    """Return the report as text: Pareto-optimal plans, then the recommended one's alternatives, reasons and changes.

    Values common to all plans follow the table; the scope of the search comes last. width: terminal columns, if any.
    """
    front = report.found.front
    fields = [_fields(one.candidate) for one in front]
    values_of = [{row[i] for row in fields} - {NOTHING} for i in range(len(FIELDS))]
    same = [len(values) < 2 and len(fields) > 1 for values in values_of]
    time, money = time_unit(one.hours for one in front), money_unit(one.usd for one in front)
    rows = []
    for number, (one, row) in enumerate(zip(front, fields, strict=True), start=1):
        kept = (value or "" for value, once in zip(row, same, strict=True) if not once)
        rows.append((f"{'*' if one is report.found.chosen else ' '} {number}", *_figures(one, time, money), *kept))
    heads = (
        "PLAN",
        *_heads(time, money),
        "NODES",
        "SAMPLES/S",
        "GOODPUT",
        *(name for name, once in zip(FIELDS, same, strict=True) if not once),
    )
    lines = _printed(1000, fitted(heads, rows, width, WORDS))
    once = [f"{n.lower()} {v}" for n, v, one in zip(FIELDS, map(_any, values_of), same, strict=True) if one and v]
    paragraphs: list[str | Group] = [f"In all of them: {', '.join(once)}."] if once else []
    if report.found.chosen is not None:
        if report.instead:
            paragraphs += ["", fitted(("INSTEAD", *_heads(time, money)), _instead(report.instead, time, money), width)]
        paragraphs += ["", *report.reasons, "", *_changes(report)]
    return "\n".join([*lines, *_printed(min(WIDTH, width or WIDTH), *paragraphs, "", _looked_at(report))])


def _printed(width: int, *parts: str | Group) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, highlight=False, width=width, color_system=None)
    for part in parts:
        console.print(part, markup=False)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def document(report: PlanReport) -> str:
    """Return a plan report as JSON."""
    spec = report.world.spec
    chosen = None
    if report.found.chosen is not None:
        changes = edits(report.found.chosen.candidate, spec)
        chosen = _document(report.found.chosen) | {
            "why": " ".join(report.reasons),
            "changes": {_path(path): value for path, value in changes.items()},
            "manifest": edited(report.world.document, changes),
        }
    return indented_json(
        {
            "job": spec.name,
            "steps": report.world.steps,
            "budget": report.bounds.budget,
            "deadlineHours": report.bounds.deadline,
            "recommended": chosen,
            "front": [_document(one) for one in report.found.front],
            "compared": [_document(one) for one in report.found.simulated if one not in report.found.front],
            "grids": report.found.shortlist.grids,
            "tooLarge": report.found.shortlist.too_large,
            "simulated": len(report.found.simulated),
            "runs": report.found.runs,
            "estimated": _estimated(report),
        }
    )


def _heads(time: ReadableUnit, money: ReadableUnit) -> tuple[str, ...]:
    return f"TIME {time.name.upper()}", f"COST {money.name.upper()}", f"TRAFFIC {money.name.upper()}"


def _instead(others: Sequence[Alternative], time: ReadableUnit, money: ReadableUnit) -> list[tuple[str, ...]]:
    return [
        (
            one.label,
            time.number(one.hours, one.hours_deviation),
            money.number(one.usd, one.usd_deviation),
            money.number(one.traffic_usd),
        )
        for one in others
    ]


def _figures(one: Assessment, time: ReadableUnit, money: ReadableUnit) -> list[str]:
    means = (f"{one.mean('nodes'):.1f}", f"{one.mean('throughput'):.1f}", f"{one.mean('goodput'):.3f}")
    named = (("hours", time), ("usd", money), ("traffic_usd", money))
    return [*(amount(one, name, unit) for name, unit in named), *means]


def _fields(option: Candidate) -> list[str | None]:
    """Return the values of FIELDS: "" for no replicas, NOTHING for fields without effect on a single worker."""
    alone = option.workers == 1
    return [
        option.machine,
        f"{option.stages} x {option.pipelines}",
        str(option.micro_batch),
        NOTHING if alone else option.redundancy.mode.value,
        NOTHING if alone else str(option.redundancy.kept or ""),
        str(option.standby),
        NOTHING if alone else option.spread.value,
    ]


def _any(values: set[str | None]) -> str:
    return next((value for value in values if value), "")


def _changes(report: PlanReport) -> list[str]:
    assert report.found.chosen is not None
    changes = edits(report.found.chosen.candidate, report.world.spec)
    if not changes:
        return ["The manifest already has this plan."]
    return ["To change in the manifest:", *(f"  {_path(path)}: {value}" for path, value in changes.items())]


def _path(path: Sequence[str | int]) -> str:
    """Return a path such as spec.topology.stages; list indices and keys with a dot are in brackets."""
    steps = (f"[{step}]" if isinstance(step, int) or "." in step else f".{step}" for step in path)
    return "".join(steps)[1:]


def _looked_at(report: PlanReport) -> str:
    """Return sentences on how many grids and plans were tried, and which figures are measured, estimated, or random."""
    listed, estimated = report.found.shortlist, _estimated(report)
    looked = f"Looked at: {count(listed.grids, 'grid')}"
    if listed.too_large:
        looked += f", of which {listed.too_large} need more memory than the machine has"
    measured = sorted({name for machine in report.world.machines.values() for name in machine.profile.sources})
    measured = [name for name in measured if name not in estimated]
    parts = [
        f"{looked}; the estimates of all others chose {count(len(report.found.simulated), 'plan')}, simulated in"
        f" {count(report.found.runs, 'run')}.",
        f"± is {NOISE}",
        f"Measured: {', '.join(measured) or 'nothing'}." if estimated else "All of the profile is measured.",
        f"Only estimated: {', '.join(estimated)}." if estimated else "",
        EXPECT,
    ]
    return " ".join(filter(None, parts))


def _estimated(report: PlanReport) -> list[str]:
    """Return the estimated fields of the machines' profiles, and layer times if the chosen plan scales them."""
    found = {name for machine in report.world.machines.values() for name in machine.profile.estimated}
    if report.found.chosen is not None:
        one = report.found.chosen.candidate
        if one.micro_batch != report.world.machines[one.machine].profile.samples:
            found.add(f"layers.seconds of microbatches of {one.micro_batch} (in proportion)")
    return sorted(found)


def _document(one: Assessment) -> dict[str, Any]:
    option = one.candidate
    return {
        "plan": {
            "machine": option.machine,
            "stages": option.stages,
            "pipelines": option.pipelines,
            "microBatchSize": option.micro_batch,
            "mode": option.redundancy.mode.value,
            "replicas": option.replicas,
            "standby": option.standby,
            "spread": option.spread.value,
            "workers": option.workers,
        },
        "runs": len(one.outcomes),
        **{name: getattr(one, name) for name in ("hours", "usd")},
        **{f"{name}Deviation": one.deviation(name) for name in ("hours", "usd")},
        **{f"{name}Of95": one.sure(name) for name in ("hours", "usd")},
        "mean": {name: one.mean(name) for name in MEANS},
    }
