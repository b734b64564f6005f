"""A comparison of `bamboo simulate` with real local jobs: throughput, and the time lost to preemptions.

    python bench/prediction.py
    python bench/prediction.py --only chosen    # jobs whose grid the coordinator chooses
    python bench/prediction.py --only 4x1 --plot prediction.png --json prediction.json

`bamboo run` trains each job with real processes on nodes that come and go. The simulation gets the same nodes, and a
profile measured on this machine (`bamboo profile`). Layers sleep (`_emulated`), so that a machine with few cores shows
the schedule. One run on two stages before the cases calibrates the layers' times, a worker's start time and the
detection time. The calm duration of steps is their median in the second half of the time between two changes; the lost
time is the extra time of the steps in the first half, including the wait for another grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from _common import Lab, gaps, lab, machine, main, median, say, show, write_json
from _grid_run import LATER_SECONDS, bamboo_run, grid_job, nodes_of
from bamboo.local.trainer_calls.task_profile import PROFILE, profile_of
from bamboo.simulation.job.job_record import JobResult
from bamboo.simulation.job.job_run import JobRun, simulate_job
from bamboo.traces.trace import Trace, make_trace
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.profile import ModelProfile
from bamboo_core.planning.splits.resplit_plans import Grid

FIRST = 2  # the first step that counts: earlier steps test determinism, and call everything once
LIMIT_SECONDS = 400.0
REPEATS = 5
STEP_SECONDS = 1.0  # about


@dataclass(frozen=True, slots=True)
class PredictedCase:
    """A job whose workers come and go. workers: the number in each period of `seconds`; an equal next number means that
    a worker is lost and replaced. grid: None if the coordinator chooses it.

    Workers leave one by one: two neighbours at once would lose a stage, perhaps only in the run or the simulation.
    """

    workers: tuple[int, ...]
    grid: Grid | None = None
    notice: bool = False
    seconds: float = 20.0

    @property
    def name(self) -> str:
        grid = f"{self.grid.stages}x{self.grid.pipelines}" if self.grid else "chosen"
        return f"{grid}: {' '.join(map(str, self.workers))}{', notice' if self.notice else ''}"

    @property
    def nodes(self) -> Trace:
        return nodes_of(self.workers, self.seconds, notice=self.notice)

    @property
    def document(self) -> dict[str, Any]:
        """The job's manifest, with about as many steps as fit into the duration of `nodes`."""
        steps = int(len(self.workers) * self.seconds / STEP_SECONDS)
        return grid_job(steps, self.grid, max(self.workers))


CASES = (
    PredictedCase((2, 2), Grid(2, 1)),
    PredictedCase((4, 4, 4), Grid(4, 1)),
    PredictedCase((6, 6, 6), Grid(3, 2)),
    PredictedCase((6, 5, 3, 2, 4, 6)),
    PredictedCase((4, 2, 3, 5)),
    PredictedCase((5, 6, 4, 3), notice=True),
)


async def measured(place: Lab, document: dict[str, Any]) -> ModelProfile:
    """Measure a profile on this machine, as `bamboo profile` does. Raises RuntimeError if that fails."""
    answer = await place.pool.call(PROFILE, {"manifest": document, "repeats": REPEATS})
    if answer.get("problem"):
        raise RuntimeError(answer["problem"])
    return profile_of(parse_manifest(document), answer, REPEATS)


def course(case: PredictedCase, ends: Sequence[float]) -> dict[str, float]:
    """Return a run's duration from step FIRST on, the mean duration of a calm step, and the lost time, in seconds.
    ends: when each step ended, in seconds since training began.
    """
    steps = list(zip(ends[FIRST:], gaps(ends[FIRST - 1 :]), strict=True))
    last, usual, lost = len(case.workers) - 1, 0.0, 0.0
    for number in range(len(case.workers)):
        begin = number * case.seconds
        end = begin + case.seconds if number < last else ends[-1] + 1
        middle = (begin + min(end, ends[-1])) / 2
        mine = [(at, gap) for at, gap in steps if begin <= at < end]
        calm = median([gap for at, gap in mine if at >= middle])
        usual += len(mine) * calm
        lost += sum(gap - calm for at, gap in mine if at < middle) if number else 0.0
    return {"seconds": ends[-1] - ends[FIRST - 1], "step": usual / len(steps), "lost": lost}


def simulated_ends(case: PredictedCase, profile: ModelProfile) -> list[float]:
    """Simulate a case; return all steps' ends in seconds of training. Raises RuntimeError if steps are missing."""
    document, nodes = case.document, case.nodes

    def simulated(delay: float) -> JobResult:
        moved = [replace(c, at=c.at + delay) if c.at > 0 else c for c in nodes.changes]
        trace = make_trace(moved, duration=delay + 10 * nodes.duration)
        return simulate_job(JobRun(spec=parse_manifest(document), manifest=document, profile=profile, trace=trace))

    begun = 3600 * simulated(0.0).figures.begun
    result = simulated(begun)
    if result.figures.steps != document["spec"]["training"]["steps"]:
        raise RuntimeError(f"{case.name}: the simulated job ended after {result.figures.steps} steps: {result.message}")
    return [
        since + (until - since) * (number + 1) / count - begun
        for since, until, count in result.steps
        for number in range(int(count))
    ]


async def calibrated(place: Lab) -> ModelProfile:
    """Return a measured profile, calibrated by a job of two stages that loses and replaces a worker. The layers' times
    are scaled to the real step time, since on a busy machine each sleep ends late.
    """
    document = grid_job(16, Grid(2, 1), 2)
    profile, lost_at = await measured(place, document), 14.0
    run = await bamboo_run(place.new_folder() / "run", document, nodes_of((2, 2), lost_at))
    calm = median(gaps([end for end in run.ends if run.ends[FIRST] <= end <= lost_at]))
    still = make_trace(nodes_of((2,), lost_at).changes, duration=LIMIT_SECONDS)
    (since, until, count), *_ = simulate_job(
        JobRun(spec=parse_manifest(document), manifest=document, profile=profile, trace=still)
    ).steps
    slower = calm * count / (until - since)
    layers = tuple(
        msgspec.structs.replace(layer, forward=slower * layer.forward, backward=slower * layer.backward)
        for layer in profile.layers
    )
    moments = {reason: at for at, reason, _ in run.events}  # the newest of each reason
    times = msgspec.structs.replace(
        profile.times,
        start=moments["WorkerJoined"] - moments["Preempting"] - LATER_SECONDS,
        detection=moments["WorkerLost"] - moments["Preempting"],
    )
    say(
        f"calibration: a step {calm:.3f} s, {slower:.3f} times as long as predicted; a worker starts in"
        f" {times.start:.2f} s; a loss is known after {1000 * times.detection:.0f} ms"
    )
    return msgspec.structs.replace(profile, layers=layers, times=times)


async def compare(place: Lab, case: PredictedCase, profile: ModelProfile) -> dict[str, Any]:
    document, nodes = case.document, case.nodes
    run = await bamboo_run(place.new_folder() / "run", document, nodes)
    ends = simulated_ends(case, profile)
    batch = document["spec"]["training"]["globalBatchSize"]
    real, foretold = course(case, run.ends), course(case, ends)
    samples = batch * (len(ends) - FIRST)
    return {
        "point": case.name,
        "steps": len(ends),
        "real": real,
        "predicted": foretold,
        "ends": [run.ends, ends],
        "throughput": [samples / real["seconds"], samples / foretold["seconds"]],
        "others": run.others,
        "grids": run.choices,
    }


def report(found: Sequence[dict[str, Any]]) -> None:
    rows = []
    for f in found:
        one, other = f["real"], f["predicted"]
        rate = 100 * (f["throughput"][1] / f["throughput"][0] - 1)
        lost = f"{100 * (other['lost'] / one['lost'] - 1):+.0f} %"
        rows.append(
            [
                f["point"],
                f"{one['step']:.3f}",
                f"{other['step']:.3f}",
                f"{f['throughput'][0]:.1f}",
                f"{f['throughput'][1]:.1f}",
                f"{rate:+.1f} %",
                f"{one['lost']:.2f}",
                f"{other['lost']:.2f}",
                lost,
                f"{f['others']:.2f}",
            ]
        )
    columns = [
        "grid: workers",
        "step, s",
        "foretold",
        "samples/s",
        "foretold",
        "",
        "lost, s",
        "foretold",
        "",
        "others, cores",
    ]
    show("real local jobs, and what was foretold", columns, rows)


def draw(found: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    for number, (title, values) in enumerate(
        (
            ("samples per second", [f["throughput"] for f in found]),
            ("seconds lost", [(f["real"]["lost"], f["predicted"]["lost"]) for f in found]),
        ),
        start=1,
    ):
        axes = figure.add_subplot(1, 2, number)
        most = 1.15 * max(max(pair) for pair in values)
        axes.plot([0, most], [0, most], color="#d8ded7")
        axes.scatter([a for a, _ in values], [b for _, b in values], color="#1d7f48")
        axes.set(title=title, xlabel="real", ylabel="simulated", xlim=(0, most), ylim=(0, most))
    figure.savefig(path, format="png", dpi=110)


def command(
    only: Annotated[str | None, typer.Option(help="Only cases whose name begins so, such as 4x1.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the points, as PNG.")] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write all figures there; - for stdout.")] = None,
) -> None:
    """Run local jobs whose workers come and go, and compare them with their simulations."""
    cases = [case for case in CASES if only is None or case.name.startswith(only)]
    if not cases:
        raise typer.BadParameter(f"expected one of {', '.join(case.name for case in CASES)}", param_hint="--only")

    async def body() -> None:
        found = []
        async with lab() as place:
            profile = await calibrated(place)
            for case in cases:
                found.append(await compare(place, case, profile))
                one, other = found[-1]["real"], found[-1]["predicted"]
                say(f"{case.name}: {one['seconds']:.1f} s, {other['seconds']:.1f} foretold")
                if str(output) != "-":
                    write_json(output, {"machine": machine(), "points": found})
        if str(output) != "-":
            report(found)
        else:
            write_json(output, {"machine": machine(), "points": found})
        if plot is not None:
            draw(found, plot)

    main(body())


if __name__ == "__main__":
    typer.run(command)
