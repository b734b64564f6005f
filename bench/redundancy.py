"""The cost of replicas while nothing fails, and of a takeover when a worker is killed.

    python bench/redundancy.py                # cost
    python bench/redundancy.py --takeover     # cost, and kills
    python bench/redundancy.py --replicas 1 --replicas 2 --replicas 3 --mebibytes 32

Layers sleep, as if each worker had an accelerator of its own; processes and sockets are real. In each round every
variant runs the same job once, in an order that rotates; a ratio compares two runs of the same round. All must give the
same losses, to the last bit. The cost is how much longer the median step takes than with mode None.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from _common import Job, Lab, TaskName, lab, machine, main, manifest, median, quantile, say, show, write_json
from _disturb import disturb
from bamboo_core.job.spec import RedundancyMode

WARMUP = 5  # steps that do not count, rehearsals included
MANY = 1_000_000


@dataclass(frozen=True, slots=True)
class Case:
    """A case that is measured."""

    stages: int
    microbatches: int
    slow: float  # factor of the second stage's times

    def __str__(self) -> str:
        split = f", stage 1 takes {self.slow:g} times as long" if self.slow != 1 else ""
        return f"{self.stages} stages, {self.microbatches} microbatches{split}"


class Variant(NamedTuple):
    """A variant of the job to compare."""

    mode: RedundancyMode
    replicas: int = 1  # of each stage

    def __str__(self) -> str:
        return f"{self.mode}, {self.replicas} replicas" if self.replicas > 1 else str(self.mode)


OFF = Variant(RedundancyMode.NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancyOptions:
    """The options of the measurement."""

    forward_ms: float
    layers: int
    steps: int
    repeat: int
    kills: int
    seed: int
    mebibytes: int  # parameters of a stage, mostly unused except for their gradients' traffic
    modes: list[Variant]


def document(o: RedundancyOptions, case: Case, variant: Variant, steps: int, standby: int = 0) -> Any:
    """Return a manifest: forward_ms per forward of each stage, twice that per backward; equal layers except slowed
    ones.
    """
    result = manifest(TaskName.EMULATED, case.stages, case.microbatches, steps, mode=variant.mode, standby=standby)
    result["spec"]["redundancy"]["replicas"] = variant.replicas
    each = o.forward_ms / o.layers
    result["spec"]["task"]["config"] = {
        "layers": o.layers * case.stages,
        "forwardMs": each,
        "backwardMs": 2 * each,
        "slowed": [o.layers, 2 * o.layers, case.slow],
        "ballast": (o.mebibytes << 18) // o.layers,
    }
    return result


async def once(
    place: Lab, o: RedundancyOptions, case: Case, variant: Variant
) -> tuple[dict[str, Any], dict[int, float]]:
    async with place.watched() as others:
        job = await Job(place, document(o, case, variant, WARMUP + o.steps), main="_recorder:record").run()
    gaps = [job.committed[k] - job.committed[k - 1] for k in range(WARMUP, WARMUP + o.steps)]
    facts = {
        "median": 1e3 * median(gaps),
        "mean": 1e3 * sum(gaps) / len(gaps),
        "steps": [1e3 * g for g in gaps],
        "others": others[0],
    }
    return facts, job.losses


async def cost(place: Lab, o: RedundancyOptions, case: Case) -> dict[str, Any]:
    rounds: list[dict[str, Any]] = []
    for number in range(o.repeat):
        facts: dict[str, Any] = {}
        losses = {}
        first = number % len(o.modes)
        for mode in o.modes[first:] + o.modes[:first]:
            facts[str(mode)], losses[mode] = await once(place, o, case, mode)
        if any(losses[mode] != losses[OFF] for mode in o.modes):
            raise RuntimeError(f"{case}: the modes did not give the same losses")
        rounds.append(facts)
        told = ", ".join(f"{mode} {facts[str(mode)]['median']:.1f} ms" for mode in o.modes)
        say(f"{case}, {number + 1}/{o.repeat}: {told}; others {max(f['others'] for f in facts.values()):.2f}")
    return {"case": asdict(case), "rounds": rounds}


def costs(rounds: list[dict[str, Any]], mode: str, figure: str) -> list[float]:
    """Return the costs in percent over mode None of the same round."""
    return [100 * (facts[mode][figure] / facts[str(OFF)][figure] - 1) for facts in rounds]


def report_cost(o: RedundancyOptions, found: dict[str, Any]) -> None:
    case, rounds = Case(**found["case"]), found["rounds"]
    rows = []
    for mode in map(str, o.modes):
        times, by_mean = costs(rounds, mode, "median"), costs(rounds, mode, "mean")
        rows.append(
            [
                mode,
                f"{median([facts[mode]['median'] for facts in rounds]):.1f}",
                f"{median(times):+.2f}",
                f"{min(times):+.2f} to {max(times):+.2f}",
                f"{median(by_mean):+.2f}",
                f"{median([facts[mode]['others'] for facts in rounds]):.2f}",
            ]
        )
    columns = ["", "step, ms", "cost, %", "min to max", "by mean step", "others' cores"]
    show(f"{case}; {len(rounds)} rounds of {o.steps} steps", columns, rows)


async def takeover(place: Lab, o: RedundancyOptions, case: Case) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in o.modes[1:]:
        job = document(o, case, mode, MANY, standby=1)
        found[str(mode)] = await disturb(place, job, o.kills, notice=False, exits=True, seed=o.seed)
    return {"case": asdict(case), "modes": found}


def report_takeover(o: RedundancyOptions, found: dict[str, Any]) -> None:
    rows = []
    for mode, result in found["modes"].items():
        taken = result["takeovers"]
        told = [row["reported"] for row in taken]
        cells = [_spread([row[name] for row in taken], 0) for name in ("without_recompute", "pause")]
        rows.append(
            [
                mode,
                *cells,
                f"{median([row['calm'] for row in taken]):.0f}",
                _spread([row["ratio"] for row in taken], 2),
                *(_spread([t[name] for t in told], 0) for name in ("forwards", "backwards")),
                f"{result['others']:.2f}",
            ]
        )
    columns = [
        "",
        "before recomputing, ms",
        "pause, ms",
        "undisturbed step",
        "affected / that",
        "forwards",
        "backwards",
        "cores others took",
    ]
    show(f"{Case(**found['case'])}; {o.kills} kills in each mode: median (max)", columns, rows)


def _spread(values: list[float], digits: int) -> str:
    return f"{quantile(values, 0.5):.{digits}f} ({max(values):.{digits}f})"


def command(
    stages: Annotated[list[int], typer.Option(help="Numbers of stages, each a case.")] = [4, 8],  # noqa: B006
    per_stage: Annotated[list[int], typer.Option(help="Microbatches for each stage, each a case.")] = [2],  # noqa: B006
    slow: Annotated[list[float], typer.Option(help="Slowness of stage 1, each a case.")] = [1.0],  # noqa: B006
    forward_ms: Annotated[float, typer.Option(help="A stage's forward; its backward takes twice that.")] = 10.0,
    layers: Annotated[int, typer.Option(help="Layers of each stage.")] = 4,
    replicas: Annotated[list[int], typer.Option(help="Replicas of each stage, beside none.")] = [1],  # noqa: B006
    mebibytes: Annotated[int, typer.Option(help="More parameters of each stage, which nothing uses.")] = 0,
    steps: Annotated[int, typer.Option(help="Measured steps of each run.", min=2)] = 11,
    repeat: Annotated[int, typer.Option(help="Rounds; in each of them every variant runs once. 0: no cost.")] = 3,
    takeovers: Annotated[bool, typer.Option("--takeover", help="Also kill workers.")] = False,
    kills: Annotated[int, typer.Option(help="Workers to kill.")] = 4,
    seed: Annotated[int, typer.Option(help="Of stages and moments of the kills.")] = 0,
    output: Annotated[Path | None, typer.Option("--json", help="Write all figures there; - for stdout.")] = None,
) -> None:
    """What replicas cost while nothing fails, and what a takeover costs when a worker is killed."""
    modes = [OFF, *(Variant(RedundancyMode.REPLICAS, n) for n in replicas)]
    o = RedundancyOptions(
        forward_ms=forward_ms,
        layers=layers,
        steps=steps,
        repeat=repeat,
        kills=kills,
        seed=seed,
        mebibytes=mebibytes,
        modes=modes,
    )
    cases = [Case(p, p * m, f) for p in stages for m in per_stage for f in slow]

    async def body() -> None:
        async with lab() as place:
            found = [await cost(place, o, case) for case in cases] if repeat else []
            taken = [await takeover(place, o, case) for case in cases] if takeovers else []
        if str(output) != "-":
            for result in found:
                report_cost(o, result)
            for result in taken:
                report_takeover(o, result)
        write_json(output, {"machine": machine(), "options": asdict(o), "cost": found, "takeover": taken})

    main(body())


if __name__ == "__main__":
    typer.run(command)
