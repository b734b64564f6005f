"""Plans as a person or a program reads them. Pure."""

import io
import json
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
from bamboo.terminal.simulation_table import fitted
from bamboo_core.text import count

FIELDS = (
    "MACHINE",
    "GRID",
    "MICROBATCH",
    "MODE",
    "REPLICAS",
    "STANDBY",
    "ON DEMAND",
    "CHECKPOINT",
    "ZONES",
)
WORDS = ("MACHINE", "MODE", "ZONES")  # all others are numbers
MEANS = ("traffic_usd", "nodes", "throughput", "goodput", "preemptions", "takeovers", "restores", "fatal", "simulated")
WIDTH = 100  # columns of the paragraph, at most
NOISE = "± is how far these runs differ by chance; how far the simulation is from a real job is not in it."
NOTHING = None  # of a field that does not matter in an option


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What is printed."""

    found: SearchResult
    told: tuple[str, ...]  # sentences about why the chosen one, or why none
    instead: tuple[Alternative, ...]  # what else could be done
    bounds: Bounds
    world: World


def plan_text(report: PlanReport, width: int | None = None) -> str:
    """A line for each option of the front, the recommended one marked; a line for each thing that could be done
    instead; the sentences; what was looked at. width: columns of the terminal, if there is one.

    What is the same in all options is said once, below them.
    """
    front = report.found.front
    fields = [_fields(one.candidate) for one in front]
    said = [{row[i] for row in fields} - {NOTHING} for i in range(len(FIELDS))]
    same = [len(values) < 2 and len(fields) > 1 for values in said]
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
    once = [f"{n.lower()} {v}" for n, v, one in zip(FIELDS, map(_any, said), same, strict=True) if one and v]
    told: list[str | Group] = [f"In all of them: {', '.join(once)}."] if once else []
    if report.found.chosen is not None:
        if report.instead:
            told += ["", fitted(("INSTEAD", *_heads(time, money)), _instead(report.instead, time, money), width)]
        told += ["", *report.told, "", *_changes(report)]
    return "\n".join([*lines, *_printed(min(WIDTH, width or WIDTH), *told, "", _looked_at(report))])


def _printed(width: int, *parts: str | Group) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, highlight=False, width=width, color_system=None)
    for part in parts:
        console.print(part, markup=False)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def document(report: PlanReport) -> str:
    """JSON for programs."""
    found, spec = report.found, report.world.spec
    counts = found.counts
    chosen = None
    if found.chosen is not None:
        changes = edits(found.chosen.candidate, spec, report.world.document)
        chosen = _document(found.chosen) | {
            "why": " ".join(report.told),
            "changes": {_path(path): value for path, value in changes.items()},
            "manifest": edited(report.world.document, changes),
        }
    return json.dumps(
        {
            "job": spec.name,
            "steps": report.world.steps,
            "budget": report.bounds.budget,
            "deadlineHours": report.bounds.deadline,
            "recommended": chosen,
            "front": [_document(one) for one in found.front],
            "compared": [_document(one) for one in found.ends if one not in found.front],
            "grids": counts.grids,
            "forbidden": counts.forbidden,
            "tooLarge": counts.too_large,
            "slow": counts.slow,
            "simulated": counts.simulated,
            "runs": counts.runs,
            "estimated": _estimated(report),
        },
        indent=2,
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
    """The values of FIELDS; "" where the option has none, NOTHING where it makes no difference: a single worker has
    nobody who keeps its state, and no neighbour to be apart from.
    """
    alone = option.workers == 1
    return [
        option.machine,
        f"{option.stages} x {option.pipelines}",
        str(option.micro_batch),
        NOTHING if alone else option.redundancy.mode.value,
        NOTHING if alone else str(option.redundancy.kept or ""),
        str(option.standby),
        "" if option.on_demand is None else str(option.on_demand),
        "" if option.every_steps is None else str(option.every_steps),
        NOTHING if alone else option.spread.value,
    ]


def _any(values: set[str | None]) -> str:
    return next((value for value in values if value), "")


def _changes(report: PlanReport) -> list[str]:
    assert report.found.chosen is not None
    changes = edits(report.found.chosen.candidate, report.world.spec, report.world.document)
    if not changes:
        return ["The manifest says so already."]
    told = [f"  {_path(path)}: {value}" for path, value in changes.items()]
    return ["To change in the manifest:", *told]


def _path(path: Sequence[str | int]) -> str:
    """The path as YAML's users write it; keys with a dot are in brackets."""
    steps = (f"[{step}]" if isinstance(step, int) or "." in step else f".{step}" for step in path)
    return "".join(steps)[1:]


def _looked_at(report: PlanReport) -> str:
    counts = report.found.counts
    left = [
        f"{number} {why}"
        for number, why in (
            (counts.forbidden, "that the manifest's rules do not allow"),
            (counts.too_large, "too large for the machine's memory"),
            (counts.slow, "whose undisturbed step is far slower and dearer than another's"),
        )
        if number
    ]
    said = f"Looked at: {count(counts.grids, 'grid')}" + (f", left out {', '.join(left)}" if left else "")
    said += f"; {count(counts.simulated, 'plan')} simulated in {count(counts.runs, 'run')}."
    said += f" {NOISE}"
    if estimated := _estimated(report):
        said += f" Nobody has measured, and so this is as good as the estimates of: {', '.join(estimated)}."
    return said


def _estimated(report: PlanReport) -> list[str]:
    """What of the machines' profiles is estimated, the microbatch's times included if they are in proportion."""
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
            "everySteps": option.every_steps,
            "onDemand": option.on_demand,
            "spread": option.spread.value,
            "workers": option.workers,
        },
        "runs": len(one.outcomes),
        **{name: _finite(getattr(one, name)) for name in ("hours", "usd")},
        **{f"{name}Deviation": _finite(one.deviation(name)) for name in ("hours", "usd")},
        **{f"{name}Of95": _finite(one.sure(name)) for name in ("hours", "usd")},
        "mean": {name: _finite(one.mean(name)) for name in MEANS},
    }


def _flat(one: Assessment, chosen: bool) -> dict[str, Any]:
    found = _document(one)
    rest = {key: value for key, value in found.items() if key not in ("plan", "mean")}
    return {"recommended": chosen, **found["plan"], **rest, **found["mean"]}


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
