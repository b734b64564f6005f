"""How long a job makes no progress while its grid changes, against stopping it and starting it from a checkpoint.

    python bench/elastic.py                      # layers that sleep: 10 ms a forward, 20 ms a backward of a stage
    python bench/elastic.py --task gpt           # real arithmetic, and states that have a size

One job for each change, of real processes and sockets; this program is the coordinator's shell, and says how many
machines there are. In each: some undisturbed steps, the change, and steps until all is settled again.

    heal      a worker is killed, a standby takes its place
    roll      each worker in turn gets notice, and a new one takes its place
    grow      there are machines for a second pipeline
    shrink    the machines of the second pipeline get notice
    resplit   a worker is killed and there is no other: four stages become three
    regain    there is a machine again: three stages become four
    restore   all workers are killed, others go on from the newest checkpoint (every 20 steps), and repeat what followed

    losses    all workers are killed again and again, as often as --period says: goodput as it was, and as the time lost
              in `restore`, which is a late moment between two checkpoints, predicts it; also for one every 10 minutes

    lost      how much later the last of these steps is committed than if each had taken what a step takes before the
              change or after it, whichever is more (fewer workers are slower: that is no stall)
    worst     the longest time between two commits, in usual steps
    restart   the whole job killed and started from its checkpoint by plain torch (see pause.py), in the same run
"""

import asyncio
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from _common import (
    Job,
    Lab,
    TaskName,
    chosen_of,
    gaps,
    is_copied,
    lab,
    machine,
    main,
    manifest,
    median,
    say,
    show,
    write_json,
)
from _restart import restart
from bamboo_core.control.channel_events import Received
from bamboo_core.control.protocol import StepCommitted
from bamboo_core.coordinator.events import Command, Event, PreemptionNotice
from bamboo_core.planning.plan import Cell

MANY = 1_000_000  # steps of a job that is stopped when everything is measured
CALM = 8  # undisturbed steps before and after
NOTICE_SECONDS = 60.0
LIMIT_SECONDS = 240.0


@dataclass(slots=True)
class GridChange:
    """One change of one job."""

    job: Job
    ready: Callable[[Job], bool]
    begin: Callable[[Job], None]  # does it
    over: Callable[[Job], bool]  # is it done?
    began: float | None = None
    ended: float | None = None
    committed: list[float] = field(default_factory=list)
    _newest: int = -1  # step
    _calm_since: int = 0
    _done: int = 0

    def look(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if not (isinstance(event, Received) and isinstance(event.message, StepCommitted)):
            return
        if event.message.step <= self._newest:
            return  # repeated, or told again
        self._newest = event.message.step
        self.committed.append(now)
        if self.began is None:
            if not (self.ready(self.job) and settled(self.job)):
                self._calm_since = len(self.committed)
            elif len(self.committed) > self._calm_since + CALM:
                self.began = now
                self.begin(self.job)
        elif self.ended is None:
            if self.over(self.job) and settled(self.job):
                self.ended, self._done = now, len(self.committed)
        elif len(self.committed) > self._done + CALM:
            self.job.stop()

    def figures(self) -> dict[str, float]:
        """Milliseconds, but for ratios."""
        assert self.began is not None
        assert self.ended is not None
        before = [t for t in self.committed if t <= self.began][-CALM - 1 :]
        after = [t for t in self.committed if t >= self.ended]
        between = [t for t in self.committed if self.began <= t <= self.ended]
        calm, later = median(gaps(before)), median(gaps(after))
        lost = (self.ended - self.began) - (len(between) - 1) * max(calm, later)
        return {
            "calm": 1e3 * calm,
            "after": 1e3 * later,
            "lost": 1e3 * lost,
            "steps": len(between) - 1,
            "lost_steps": lost / calm,
            "worst": max(gaps(between)) / calm,
        }


def settled(job: Job) -> bool:
    """Does everybody obey the newest plan, with each stage on a worker of its own and copied?"""
    state, plan = job.state, job.state.plan
    if plan is None or state.phase != "Running" or not plan.worker_ids() <= state.plans.applied or plan.sources:
        return False
    owners = {plan.at(cell).owner for cell in plan.cells()}
    alone = len(owners) == len(plan.cells()) and len(plan.layouts) == 1
    noticed = any(r.notice_until is not None for r in state.workers.values())
    return alone and not noticed and is_copied(plan, state.plans.synced)


def grid(job: Job) -> tuple[int, int]:
    """Stages and pipelines."""
    plan = job.state.plan
    return (len(plan.stages), plan.target.pipelines) if plan else (0, 0)


def owner(job: Job, stage: int, pipeline: int = 0) -> str:
    plan = job.state.plan
    assert plan is not None
    return plan.at(Cell(pipeline, stage)).owner


def kill(job: Job, *workers: str, machines: int) -> None:
    job.machines = machines
    for worker in workers:
        job.lab.pool.signal(worker, signal.SIGKILL)


def more(machines: int) -> Callable[[Job], None]:
    def begin(job: Job) -> None:
        job.machines = machines
        job.staff()

    return begin


def notice(job: Job, workers: Sequence[str]) -> None:
    for worker in workers:
        job.queue.put_nowait(PreemptionNotice(worker, NOTICE_SECONDS))


class Roll:
    """Replaces all workers, the next one when all is settled."""

    def __init__(self, job: Job) -> None:
        self._old: list[str] = []
        self._job = job

    def begin(self, job: Job) -> None:
        self._old = [owner(job, stage) for stage in range(grid(job)[0])]
        self._next()

    def _next(self) -> None:
        notice(self._job, self._old[:1])

    def over(self, job: Job) -> bool:
        if self._old and settled(job):
            self._old.pop(0)
            self._next()
        return not self._old


async def change(place: Lab, what: str, task: TaskName, stages: int) -> dict[str, float]:
    """The figures of a change, in a job of its own."""
    document = manifest(task, stages, 8, MANY, mode="EagerForward", standby=1 if what in ("heal", "roll") else 0)
    spec = document["spec"]
    if what in ("grow", "shrink"):
        spec["elastic"] = {"maxWorkers": 2 * stages, "stabilizationSeconds": 1}
    elif what in ("resplit", "regain"):
        spec["topology"] = {"pipelines": 1}
        spec["elastic"] = {"maxWorkers": stages, "stabilizationSeconds": 1}
    spec["topology"]["schedule"] = "1F1B"
    if what == "restore":
        spec["checkpoint"] = {"storage": {"uri": place.new_folder().as_uri()}, "everySteps": 20}
    job = Job(place, document, main="bamboo_trainer.worker.launch.process:main")
    roll = Roll(job)
    scenes: dict[str, GridChange] = {
        "heal": GridChange(job, always, lambda j: kill(j, owner(j, 1), machines=stages + 1), always),
        "roll": GridChange(job, always, roll.begin, roll.over),
        "grow": GridChange(job, always, more(2 * stages), lambda j: grid(j) == (stages, 2)),
        "shrink": GridChange(
            job, lambda j: grid(j) == (stages, 2), lambda j: shrink(j, stages), lambda j: grid(j) == (stages, 1)
        ),
        "resplit": GridChange(
            job, always, lambda j: kill(j, owner(j, 1), machines=stages - 1), lambda j: grid(j) == (stages - 1, 1)
        ),
        "regain": GridChange(job, lambda j: short(j, stages), more(stages), lambda j: grid(j) == (stages, 1)),
        "restore": GridChange(
            job, kept, lambda j: kill(j, *j.state.workers, machines=stages), lambda j: grid(j) == (stages, 1)
        ),
    }
    job.machines = {"heal": stages + 1, "roll": stages + 2, "shrink": 2 * stages}.get(what, stages)
    wanted = scenes[what]
    job.look = wanted.look
    await asyncio.wait_for(job.run(), LIMIT_SECONDS)
    figures = wanted.figures()
    say(f"{what}: {figures['lost']:.0f} ms lost, {figures['lost_steps']:.2f} steps")
    return figures


@dataclass(slots=True)
class Losses:
    """All workers are killed every so many seconds."""

    job: Job
    period: float
    count: int
    newest: int = -1  # step
    committed: list[float] = field(default_factory=list)
    began: float | None = None
    kills: int = 0

    def look(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if not (isinstance(event, Received) and isinstance(event.message, StepCommitted)):
            return
        if event.message.step <= self.newest:
            return
        self.newest = event.message.step
        self.committed.append(now)
        if self.began is None:
            if len(self.committed) > CALM and kept(self.job):
                self.began = now
                asyncio.get_running_loop().call_later(self.period, self._strike)
        elif self.kills == self.count and now >= self.began + (self.count + 1) * self.period:
            self.job.stop()

    def _strike(self) -> None:
        self.kills += 1
        say(f"loss {self.kills}/{self.count} at step {self.newest}")
        kill(self.job, *self.job.state.workers, machines=self.job.machines)
        if self.kills < self.count:
            asyncio.get_running_loop().call_later(self.period, self._strike)

    def figures(self, lost_ms: float) -> dict[str, float]:
        assert self.began is not None
        before = [t for t in self.committed if t <= self.began][-CALM - 1 :]
        after = [t for t in self.committed if t >= self.began]
        calm = median(gaps(before))
        seconds = after[-1] - after[0]
        predicted = 1 - self.count * lost_ms / 1e3 / seconds
        return {
            "period": self.period,
            "losses": self.count,
            "goodput": (len(after) - 1) * calm / seconds,
            "predicted": predicted,
            "every_600_s": 1 - lost_ms / 1e3 / 600,
        }


async def losses(
    place: Lab, task: TaskName, stages: int, period: float, count: int, lost_ms: float
) -> dict[str, float]:
    document = manifest(task, stages, 8, MANY, mode="EagerForward")
    document["spec"]["checkpoint"] = {"storage": {"uri": place.new_folder().as_uri()}, "everySteps": 20}
    job = Job(place, document, main="bamboo_trainer.worker.launch.process:main")
    job.machines = stages
    wanted = Losses(job, period, count)
    job.look = wanted.look
    await asyncio.wait_for(job.run(), LIMIT_SECONDS + 2 * period * count)
    return wanted.figures(lost_ms)


def always(job: Job) -> bool:
    return True


def kept(job: Job) -> bool:
    """Is there a checkpoint, some steps ago?"""
    newest = job.state.checkpoints.kept
    return bool(newest) and job.state.step >= newest[0].step + 10


def shrink(job: Job, stages: int) -> None:
    job.machines = stages
    notice(job, [owner(job, stage, 1) for stage in range(stages)])


def short(job: Job, stages: int) -> bool:
    """One stage fewer; a worker is taken away for that first."""
    if grid(job) == (stages, 1) and settled(job) and job.machines == stages:
        kill(job, owner(job, 1), machines=stages - 1)
    return grid(job) == (stages - 1, 1)


WHAT = ("heal", "roll", "grow", "shrink", "resplit", "regain", "restore")


async def measure(
    place: Lab, task: TaskName, stages: int, only: Sequence[str], restarts: int, period: float
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for what in only:
        async with place.watched() as others:
            found[what] = await change(place, what, task, stages)
        found[what]["others"] = others[0]
    rng, document = random.Random(0), manifest(task, stages, 8, MANY, mode="EagerForward")
    if period and "restore" in found:
        found["losses"] = await losses(place, task, stages, period, 4, found["restore"]["lost"])
    found["restarts"] = [await restart(place, document, 20, rng) for _ in range(restarts)]
    return found


def report(found: dict[str, Any], task: TaskName) -> None:
    delays = [row["delay"] for row in found["restarts"]]
    stopped = median(delays)
    rows = []
    for what in (what for what in WHAT if what in found):
        f = found[what]
        ratio = f"{stopped / f['lost']:.1f}" if delays and f["lost"] > 0 else "-"
        rows.append(
            [
                what,
                f"{f['calm']:.0f}",
                f"{f['after']:.0f}",
                f"{f['lost']:.0f}",
                f"{f['lost_steps']:.2f}",
                f"{f['worst']:.2f}",
                ratio,
                f"{f['others']:.2f}",
            ]
        )
    columns = ["", "step, ms", "after", "lost, ms", "in steps", "worst", "restart / lost", "others, cores"]
    show(f"{task}: what a change of the grid costs", columns, rows)
    if "losses" in found:
        f = found["losses"]
        told = f"all workers lost every {f['period']:.0f} s, {f['losses']:.0f} times: goodput {f['goodput']:.3f}"
        print(f"{told}, predicted {f['predicted']:.3f}; every 10 minutes, predicted: {f['every_600_s']:.4f}")
    if delays:
        print(f"killed and restarted from a checkpoint every 20 steps: {stopped:.0f} ms (median of {len(delays)})")


def command(
    task: Annotated[TaskName, typer.Option(help="What to train.")] = TaskName.EMULATED,
    stages: Annotated[int, typer.Option(help="Stages.", min=2)] = 4,
    only: Annotated[list[str] | None, typer.Option(help=f"Only these: {', '.join(WHAT)}.")] = None,
    restarts: Annotated[int, typer.Option(help="Restarts of the whole job.")] = 3,
    period: Annotated[float, typer.Option(help="Seconds between losses of all workers; 0: none.", min=0)] = 0.0,
    output: Annotated[Path | None, typer.Option("--json", help="Write all figures there; - for stdout.")] = None,
) -> None:
    """How long a job makes no progress while its grid changes."""
    chosen = chosen_of(only, WHAT)

    async def body() -> None:
        async with lab() as place:
            found = await measure(place, task, stages, chosen, restarts, period)
        if str(output) != "-":
            report(found, task)
        write_json(output, {"machine": machine(), "task": task, "stages": stages, **found})

    main(body())


if __name__ == "__main__":
    typer.run(command)
