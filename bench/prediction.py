"""Compares `bamboo simulate` with real local jobs: throughput, and the time lost to preemptions.

    python bench/prediction.py
    python bench/prediction.py --only grids    # jobs whose grid the coordinator chooses while workers come and go
    python bench/prediction.py --only 4x1 --plot prediction.png --json prediction.json

Each point is a grid and a rate: a job whose layers sleep (`_emulated`, so that a machine with few cores shows the
schedule) runs with real processes, and owners are killed on a schedule; the same job is simulated with a profile
measured on this machine (`bamboo profile`), under a trace with the same losses. The engine's overhead for each forward
and backward, a worker's start time and the detection time come from one undisturbed run of another grid and from the
first losses, before the points. lost: seconds beyond the steps' calm duration.

Jobs whose grid the coordinator chooses are run by `bamboo run`, and their workers come and go with the nodes of a
recording, which the simulation also gets. Their calm duration is the median of the second half of the time with a
constant number of workers; lost is the extra time of the first half's steps, including the wait for another grid.
"""

import asyncio
import signal
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from _common import Job, Lab, TaskName, gaps, lab, machine, main, manifest, median, say, show, write_json
from _grid_run import APART_SECONDS, bamboo_run, grid_job, nodes_of
from bamboo.local.trainer_calls.task_profile import PROFILE, MachineOverrides, profile_of
from bamboo.simulation.job.job_record import JobResult
from bamboo.simulation.job.job_run import JobRun, simulate_job
from bamboo.traces.trace import Change, NodeChange, Trace, make_trace
from bamboo_core.control.channel_events import Received
from bamboo_core.control.protocol import WorkerReady
from bamboo_core.coordinator.events import AddWorkers, Command, Event, WorkerLost
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.plan import Cell
from bamboo_core.planning.profile import ModelProfile
from bamboo_core.planning.splits.resplit import Grid

AGENT = "bamboo_trainer.worker.launch.process:main"
SLOWER = 4  # times the layers of `_common.manifest`, so that a busy machine's overhead weighs less
FIRST = 2  # counted from its commit on: earlier steps test determinism, and call everything once
CALM_STEPS = 6  # before the first loss
LIMIT_SECONDS = 400.0
REPEATS = 5


@dataclass(frozen=True, slots=True)
class MeasuredCase:
    """A case in which the pause is measured."""

    stages: int
    pipelines: int
    losses: int  # the number of owners lost, evenly over the steps
    steps: int = 24

    @property
    def name(self) -> str:
        return f"{self.stages}x{self.pipelines} {self.losses}"


CALIBRATION = MeasuredCase(2, 1, 1, 16)
POINTS = (
    MeasuredCase(2, 1, 1),
    MeasuredCase(3, 1, 2),
    MeasuredCase(4, 1, 3),
    MeasuredCase(2, 2, 2),
    MeasuredCase(3, 2, 3),
)


@dataclass(frozen=True, slots=True)
class GridCase:
    """A job whose grid the coordinator chooses. workers: their numbers, each for `seconds`. No worker leaves together
    with a neighbour, which would lose a stage: a simulation loses other workers than a run.
    """

    workers: tuple[int, ...]
    notice: bool = False
    seconds: float = 20.0

    @property
    def name(self) -> str:
        return f"grids {' '.join(map(str, self.workers))}{', notice' if self.notice else ''}"

    @property
    def nodes(self) -> Trace:
        return nodes_of(self.workers, self.seconds, notice=self.notice, apart=APART_SECONDS)

    @property
    def document(self) -> dict[str, Any]:
        """The manifest of a job that ends when the last number of workers has been present about as long as the
        others.
        """
        last = len(self.workers) * self.seconds
        return grid_job(int(last / GRID_STEP_SECONDS), Grid(2, self.workers[0] // 2), max(self.workers), chosen=True)


GRID_CASES = (GridCase((6, 5, 3, 2, 4, 6)), GridCase((4, 2, 3, 5)), GridCase((5, 6, 4, 3), notice=True))
GRID_STEP_SECONDS = 1.0
LATER_SECONDS = 0.5  # the replacement comes later than the loss, or no worker would be taken


@dataclass(slots=True)
class Strikes:
    """Kills the first owners of cells at given seconds of training, and records what the simulator needs."""

    job: Job
    due: list[tuple[float, Cell]]
    begun: float | None = None
    asked: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    killed: dict[str, float] = field(default_factory=dict)
    detections: list[float] = field(default_factory=list)
    struck: list[tuple[float, Cell]] = field(default_factory=list)  # seconds of training, in order
    owners: dict[Cell, str] = field(default_factory=dict)

    def look(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        state = self.job.state
        if self.begun is None and state.plan is not None:
            self.begun = now
            self.owners = {cell: state.plan.at(cell).owner for cell in state.plan.cells()}
        for command in commands:
            if isinstance(command, AddWorkers):
                self.asked += [now] * command.count
        if isinstance(event, Received) and isinstance(event.message, WorkerReady) and self.asked:
            self.starts.append(now - self.asked.pop(0))
        if isinstance(event, WorkerLost) and event.worker in self.killed:
            self.detections.append(now - self.killed[event.worker])
        while self.due and self.begun is not None and now - self.begun >= self.due[0][0]:
            _, cell = self.due.pop(0)
            self.struck.append((now - self.begun, cell))
            self.killed[self.owners[cell]] = now
            self.job.lab.pool.signal(self.owners[cell], signal.SIGKILL)


def document_of(point: MeasuredCase) -> dict[str, Any]:
    document: dict[str, Any] = manifest(
        TaskName.EMULATED, point.stages, 8 * point.pipelines, point.steps, mode="Replicas"
    )
    config = document["spec"]["task"]["config"]
    config["forwardMs"], config["backwardMs"] = SLOWER * config["forwardMs"], SLOWER * config["backwardMs"]
    document["spec"]["topology"]["pipelines"] = point.pipelines
    return document


def schedule(point: MeasuredCase, step_seconds: float) -> list[tuple[float, Cell]]:
    """Return the times and cells of losses: different cells, at different places of a step, no neighbours within a few
    steps.
    """
    cells = [Cell(d, s) for d in range(point.pipelines) for s in range(point.stages)]
    every = (point.steps - CALM_STEPS) / (point.losses + 1)
    chosen = [*cells[1::2], *cells[::2]][: point.losses]
    return [((CALM_STEPS + every * (i + 0.5) + 0.37 * (i + 1)) * step_seconds, cell) for i, cell in enumerate(chosen)]


async def real(place: Lab, point: MeasuredCase, step_seconds: float) -> tuple[Job, Strikes]:
    job = Job(place, document_of(point), main=AGENT)
    strikes = Strikes(job, schedule(point, step_seconds))
    job.look = strikes.look
    await asyncio.wait_for(job.run(), LIMIT_SECONDS)
    return job, strikes


async def measured(place: Lab, document: dict[str, Any]) -> ModelProfile:
    """Measure the profile as `bamboo profile` does."""
    answer = await place.pool.call(PROFILE, {"manifest": document, "repeats": REPEATS})
    if answer.get("problem"):
        raise RuntimeError(answer["problem"])
    return profile_of(parse_manifest(document), answer, REPEATS, MachineOverrides())


def trace_of(point: MeasuredCase, struck: Sequence[tuple[float, Cell]], start: float) -> Trace:
    """Return the trace of the losses: nodes in the order of the cells; a new one comes whenever one goes."""
    nodes = {Cell(d, s): f"n{d * point.stages + s}" for d in range(point.pipelines) for s in range(point.stages)}
    changes = [NodeChange(at=0.0, change=Change.ADD, node=node) for node in nodes.values()]
    for number, (at, cell) in enumerate(struck):
        changes.append(NodeChange(at=start + at, change=Change.REMOVE, node=nodes[cell]))
        changes.append(NodeChange(at=start + at, change=Change.ADD, node=f"r{number}"))
    return make_trace(changes, duration=LIMIT_SECONDS)


def predicted(point: MeasuredCase, profile: ModelProfile, struck: Sequence[tuple[float, Cell]]) -> tuple[float, float]:
    """Simulate a point; return the seconds of training and of a calm step."""
    document = document_of(point)
    trace = trace_of(point, struck, profile.times.start)
    run = JobRun(spec=parse_manifest(document), manifest=document, profile=profile, trace=trace)
    result = simulate_job(run)
    if result.figures.steps != point.steps:
        raise RuntimeError(
            f"{point.name}: the simulated job ended after {result.figures.steps} steps: {result.message}"
        )
    figures = result.figures
    seconds = (figures.hours - figures.waited) * 3600
    return seconds, seconds * figures.goodput / figures.steps


async def calibrated(place: Lab) -> ModelProfile:
    """Return the profile with this machine's overheads. Its layers are replaced for each point."""
    profile = await measured(place, document_of(CALIBRATION))
    _, step = predicted(CALIBRATION, profile, [])
    job, strikes = await real(place, CALIBRATION, step)
    calm = median(gaps(list(job.committed.values()))[:CALM_STEPS])
    instructions = 2 * (8 + CALIBRATION.stages - 1)
    replacement = strikes.starts[CALIBRATION.stages :] or strikes.starts
    times = msgspec.structs.replace(
        profile.times,
        instruction=max(0.0, (calm - step) / instructions),
        start=statistics.fmean(replacement),
        detection=statistics.fmean(strikes.detections),
    )
    say(
        f"calibration: a step {calm:.3f} s, predicted {step:.3f}; so {1000 * times.instruction:.2f} ms for each"
        f" instruction; a worker starts in {times.start:.2f} s; a loss is known after {1000 * times.detection:.0f} ms"
    )
    return msgspec.structs.replace(profile, times=times)


async def compare(place: Lab, point: MeasuredCase, base: ModelProfile) -> dict[str, Any]:
    profile = msgspec.structs.replace(await measured(place, document_of(point)), times=base.times, network=base.network)
    _, step = predicted(point, profile, [])
    async with place.watched() as others:
        job, strikes = await real(place, point, step)
    assert strikes.begun is not None
    moments = list(job.committed.values())
    seconds, count = moments[-1] - moments[FIRST], point.steps - 1 - FIRST
    calm = median(gaps(moments)[FIRST:CALM_STEPS])
    foretold, foretold_step = predicted(point, profile, strikes.struck)
    foretold -= (1 + FIRST) * foretold_step
    batch = 4 * 8 * point.pipelines
    return {
        "point": point.name,
        "steps": point.steps,
        "losses": len(strikes.struck),
        "real": {"seconds": seconds, "step": calm, "lost": seconds - count * calm},
        "predicted": {"seconds": foretold, "step": foretold_step, "lost": foretold - count * foretold_step},
        "throughput": [count * batch / seconds, count * batch / foretold],
        "others": others[0],
    }


def course(case: GridCase, ends: Sequence[float]) -> dict[str, float]:
    """Return the seconds in all, the mean of a calm step, and the seconds lost. ends: of steps, in seconds of
    training.
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


def simulated_ends(case: GridCase, profile: ModelProfile) -> list[float]:
    """Return the ends of all steps, in seconds since training began."""
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


async def calibrated_grids(place: Lab) -> ModelProfile:
    """Return the profile, calibrated by a job on two stages that loses one worker while another node comes. Unexpected
    step time is attributed to the layers: on a busy machine each sleep ends late.
    """
    document = grid_job(16, Grid(2, 1), 2, chosen=False)
    profile, lost_at = await measured(place, document), 14.0
    before, after = nodes_of((2,), lost_at, notice=False), nodes_of((2, 1, 2), lost_at, notice=False)
    came = [replace(change, at=min(change.at, lost_at + LATER_SECONDS)) for change in after.changes]
    run = await bamboo_run(place.new_folder() / "run", document, make_trace(came, duration=LIMIT_SECONDS))
    calm = median(run.gaps(run.ends[FIRST], lost_at))
    still = make_trace(before.changes, duration=LIMIT_SECONDS)
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


async def compare_grids(place: Lab, case: GridCase, base: ModelProfile) -> dict[str, Any]:
    document, profile = case.document, base
    nodes = case.nodes
    run = await bamboo_run(place.new_folder() / "run", document, nodes)
    ends = simulated_ends(case, profile)
    batch = document["spec"]["training"]["globalBatchSize"]
    real, foretold = course(case, run.ends), course(case, ends)
    samples = batch * (len(ends) - FIRST)
    return {
        "point": case.name,
        "steps": len(ends),
        "losses": len(nodes.changes),
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
        lost = f"{100 * (other['lost'] / one['lost'] - 1):+.0f} %" if f["losses"] else "-"
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
        "stages x pipelines, losses",
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
            ("seconds lost", [(f["real"]["lost"], f["predicted"]["lost"]) for f in found if f["losses"]]),
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
    only: Annotated[str | None, typer.Option(help="Only points whose name begins so, such as 4x1.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the points, as PNG.")] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write all figures there; - for stdout.")] = None,
) -> None:
    """Real local jobs under a schedule of losses, beside their simulations."""
    known: tuple[MeasuredCase | GridCase, ...] = (*POINTS, *GRID_CASES)
    points = [point for point in known if only is None or point.name.startswith(only)]
    if not points:
        raise typer.BadParameter(f"expected one of {', '.join(p.name for p in known)}", param_hint="--only")

    async def body() -> None:
        found = []
        async with lab() as place:
            simple = [point for point in points if isinstance(point, MeasuredCase)]
            base = await calibrated(place) if simple else None
            grids = await calibrated_grids(place) if len(simple) < len(points) else None
            for point in points:
                if isinstance(point, GridCase):
                    assert grids is not None
                    found.append(await compare_grids(place, point, grids))
                else:
                    assert base is not None
                    found.append(await compare(place, point, base))
                one, other = found[-1]["real"], found[-1]["predicted"]
                say(f"{point.name}: {one['seconds']:.1f} s, {other['seconds']:.1f} foretold")
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
