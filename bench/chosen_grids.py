"""Does the coordinator choose the fastest grid for the workers that are there, and what does following them cost?

    python bench/chosen_grids.py
    python bench/chosen_grids.py --seconds 60 --json grids.json

`bamboo run` of a job with `elastic.objective: Throughput`, whose layers sleep (`_emulated`, so that a machine with few
cores shows the schedule). Its workers come and go with the nodes of a recording: 6, 5, 3, 2, 4 and 6, for so many
seconds each, without notice and with it. Before it and after it every grid that one of these numbers could run is run
by itself, fixed. Shown for each number of workers:

    grid       that ran in the end, and samples/s that were expected of it when it was chosen
    settled    its samples/s from two steps after the last change on, by the median of the steps
    best       the fastest of the fixed grids that so many workers can run, by the same measure, and its samples/s
    ratio      settled over best; the goal is 0.97
    until      seconds until the grid was the last one of this number
    lost       seconds by which the steps until then were longer than the slower of the two settled ones
    repeated   forwards and backwards that were done again

Final weights are compared bit by bit with those of a job that nothing befell.
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from _common import machine, main, median, show, write_json
from _grid_run import (
    APART_SECONDS,
    BACKWARD_MS,
    FEWEST_STAGES,
    FORWARD_MS,
    LAYERS,
    MICROBATCHES,
    MOST_STAGES,
    GridRun,
    bamboo_run,
    grid_job,
    nodes_of,
)
from bamboo_core.planning.splits.resplit import Grid

WORKERS = (6, 5, 3, 2, 4, 6)
LAST_STEPS = 25  # that the last number of workers does at least
SETTLED = 2  # steps after the last change
FIXED_STEPS, FIRST = 12, 4
CHANGES = ("GridChosen", "Resplit", "Resized", "TakenOver", "Growing", "Shrinking")


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """What is shown of a number of workers. Rates are samples/s."""

    workers: int
    grid: str
    expected: float | None  # None if nothing had been measured
    settled: float
    best: str
    best_rate: float
    until: float
    lost: float
    forwards: int
    backwards: int
    told: str

    @property
    def ratio(self) -> float:
        return self.settled / self.best_rate


def possible(workers: int) -> list[Grid]:
    return [Grid(stages, workers // stages) for stages in range(FEWEST_STAGES, min(workers, MOST_STAGES, LAYERS) + 1)]


def name(grid: Grid) -> str:
    """Stages x pipelines."""
    return f"{grid.stages} x {grid.pipelines}"


async def fixed(folder: Path, rates: dict[Grid, list[float]]) -> None:
    """Each grid by itself; seconds of its steps are added to what there is."""
    for grid in sorted({grid for workers in WORKERS for grid in possible(workers)}, key=name):
        place = folder / f"{grid.stages}-{grid.pipelines}-{len(rates.get(grid, ()))}"
        run = await bamboo_run(place, grid_job(FIXED_STEPS, grid, grid.cells, chosen=False))
        rates.setdefault(grid, []).extend(run.gaps(run.ends[FIRST], run.ends[-1]))


def phases(run: GridRun, seconds: float, batch: int, rates: Mapping[Grid, Sequence[float]]) -> list[PhaseResult]:
    found, before = [], 0.0
    for number, workers in enumerate(WORKERS):
        begin = number * seconds
        end = begin + seconds if number + 1 < len(WORKERS) else run.ends[-1] + 1.0
        choice = [one for one in run.choices if one.at < end][-1]
        changes = [at for at, reason, _ in run.events if reason in CHANGES and begin <= at < end]
        since = max([begin, *changes]) if number else max([0.0, *changes])
        calm = run.gaps(since, end)[SETTLED:]
        usual = median(calm)
        unsettled = run.gaps(begin - before, since + 2 * usual)
        lost = sum(max(0.0, gap - max(usual, before)) for gap in unsettled) if number else 0.0
        takeovers = [t for t in run.summary["takeovers"] if begin <= run.ends[min(t["step"], len(run.ends) - 1)] < end]
        best = min(possible(workers), key=lambda grid: median(rates[grid]))
        found.append(
            PhaseResult(
                workers=workers,
                grid=name(choice.grid),
                expected=choice.expected,
                settled=batch / usual,
                best=name(best),
                best_rate=batch / median(rates[best]),
                until=since - begin,
                lost=lost,
                forwards=sum(t["forwards"] for t in takeovers),
                backwards=sum(t["backwards"] for t in takeovers),
                told=choice.told,
            )
        )
        before = usual
    return found


def same_bits(one: GridRun, other: GridRun) -> bool:
    alike = one.weights.keys() == other.weights.keys()
    return alike and all(
        one.weights[key].numpy().tobytes() == other.weights[key].numpy().tobytes() for key in one.weights
    )


def report(what: str, run: GridRun, found: Sequence[PhaseResult], equal: bool) -> None:
    columns = ["workers", "grid", "expected", "settled", "best fixed", "ratio", "until, s", "lost, s", "repeated"]
    rows = [
        [
            str(one.workers),
            one.grid,
            f"{one.expected:.1f}" if one.expected else "-",
            f"{one.settled:.1f}",
            f"{one.best}: {one.best_rate:.1f}",
            f"{one.ratio:.3f}",
            f"{one.until:.1f}",
            f"{one.lost:.2f}",
            f"{one.forwards} + {one.backwards}",
        ]
        for one in found
    ]
    show(f"{what}: stages x pipelines, samples/s", columns, rows)
    bits = "the bits of an undisturbed job" if equal else "OTHER BITS than an undisturbed job"
    attempts = "no step twice" if run.attempts == 1 else f"{run.attempts} attempts"
    print(f"{len(run.ends)} steps in {run.ends[-1]:.0f} s, {attempts}; the weights have {bits}")
    print(f"others took {run.others:.2f} cores")
    for one in found:
        print(f"  {one.workers}: {one.told}")


def ideal(workers: int) -> float:
    """Seconds of a step if nothing but layers took any time."""
    layer = (FORWARD_MS + BACKWARD_MS) / 1e3
    return min(
        (math.ceil(MICROBATCHES / grid.pipelines) + grid.stages - 1) * math.ceil(LAYERS / grid.stages) * layer
        for grid in possible(workers)
    )


async def measure(folder: Path, seconds: float) -> dict[str, Any]:
    count = LAST_STEPS + int(sum(seconds / ideal(workers) for workers in WORKERS[:-1]))
    rates: dict[Grid, list[float]] = {}
    await fixed(folder, rates)
    document = grid_job(count, Grid(2, 3), max(WORKERS), chosen=True)
    calm = grid_job(count, Grid(2, 3), 6, chosen=False)
    calm["spec"]["task"]["config"] |= {"forwardMs": 0, "backwardMs": 0}  # the same numbers, sooner
    undisturbed = await bamboo_run(folder / "undisturbed", calm)
    runs = {}
    for what, notice in (("without notice", False), ("with notice", True)):
        nodes = nodes_of(WORKERS, seconds, notice=notice, apart=APART_SECONDS)
        runs[what] = await bamboo_run(folder / what.replace(" ", "-"), document, nodes)
    await fixed(folder, rates)
    batch = document["spec"]["training"]["globalBatchSize"]
    found: dict[str, Any] = {"fixed": {name(grid): batch / median(gaps) for grid, gaps in rates.items()}}
    for what, run in runs.items():
        rows = phases(run, seconds, batch, rates)
        equal = same_bits(run, undisturbed)
        report(what, run, rows, equal)
        found[what] = {
            "phases": [{**asdict(row), "ratio": row.ratio} for row in rows],
            "equal": equal,
            "others": run.others,
            "ends": run.ends,
            "events": run.events,
        }
    return found


def command(
    seconds: Annotated[float, typer.Option(help="For which each number of workers stays.", min=10)] = 40.0,
    output: Annotated[Path | None, typer.Option("--json", help="Write all figures there; - for stdout.")] = None,
) -> None:
    """Grids that the coordinator chooses while workers come and go, beside the best fixed ones."""

    async def body() -> None:
        with tempfile.TemporaryDirectory(prefix="bamboo-bench-") as folder:
            found = await measure(Path(folder), seconds)
        write_json(output, {"machine": machine(), "seconds": seconds, **found})

    main(body())


if __name__ == "__main__":
    typer.run(command)
