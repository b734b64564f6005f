"""What a slow worker costs, and what is left of that when it is replaced or gets fewer layers.

    python bench/straggler.py                    # layers that sleep: 2.5 ms a forward, 5 ms a backward; 4 for a stage
    python bench/straggler.py --factor 3

One job of real processes and sockets for each: some undisturbed steps, one worker becomes slower by a factor and stays
so, and steps until what is done about it is done, and some more.

    nothing   it is only reported
    replaced  a worker stands by, and takes its place
    resplit   none does; the layers are split anew

    slow      a step's duration while the worker is slow and nothing is done; after: once it is
    speed     steps a second after it, of the undisturbed ones
    found     seconds from the first slow step until it is decided; 1 s and 10 steps is the least here
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from _common import Job, Lab, TaskName, chosen_of, gaps, lab, machine, main, manifest, median, say, show, write_json
from bamboo_core.control.channel_events import Received
from bamboo_core.control.protocol import StepCommitted
from bamboo_core.coordinator.events import Command, Emit, Event
from bamboo_core.planning.plan import Cell

MANY = 1_000_000  # steps of a job that is stopped when everything is measured
CALM = 10  # steps of each kind that are measured
SLOW_STEPS = 40  # if nothing is done
LAYERS_PER_STAGE = 4
LIMIT_SECONDS = 240.0
WHAT = ("nothing", "replaced", "resplit")


@dataclass(slots=True)
class Slowdown:
    """One job in which one worker becomes slow."""

    job: Job
    what: str
    mark: Path  # the file that names it
    slow: str = ""
    calm: list[float] = field(default_factory=list)  # when steps were committed
    later: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    acted: float | None = None
    layers: tuple[int, ...] = ()

    def look(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if any(isinstance(c, Emit) and c.reason in ("StragglerReplaced", "Rebalancing") for c in commands):
            self.acted = self.acted or now
        if not (isinstance(event, Received) and isinstance(event.message, StepCommitted)):
            return
        if not self.slow:
            self._undisturbed(now)
        elif self.after or (self.later and self._is_done()):
            self.after.append(now)
        else:
            self.later.append(now)
        if len(self.after) > CALM or (self.what == "nothing" and len(self.later) > SLOW_STEPS):
            self.job.stop()

    def _undisturbed(self, now: float) -> None:
        plan = self.job.state.plan
        assert plan is not None
        ready = plan.worker_ids() <= self.job.state.plans.applied and len(self.job.state.workers) == self.job.machines
        self.calm = [*self.calm, now] if ready else []
        if len(self.calm) > CALM:
            self.slow = plan.at(Cell(0, 1)).owner
            self.mark.write_text(str(self.job.lab.pool.pid(self.slow)))

    def _is_done(self) -> bool:
        plan = self.job.state.plan
        if plan is None or not plan.worker_ids() <= self.job.state.plans.applied or plan.sources:
            return False
        self.layers = tuple(end - first for first, end in plan.stages)
        return plan.moved if self.what == "resplit" else self.slow not in plan.holders()

    def figures(self) -> dict[str, Any]:
        """Milliseconds, but for ratios and seconds."""
        calm, slow = median(gaps(self.calm)), median(gaps(self.later[1 : CALM + 1]))
        after = median(gaps(self.after)) if self.after else slow
        found = self.acted - self.later[0] if self.acted else float("nan")
        return {
            "calm": 1e3 * calm,
            "slow": 1e3 * slow,
            "after": 1e3 * after,
            "slow_speed": calm / slow,
            "speed": calm / after,
            "found": found,
            "layers": self.layers,
        }


async def slowdown(place: Lab, what: str, stages: int, factor: float) -> dict[str, Any]:
    """The figures of a slowdown, in a job of its own."""
    mark, layers = place.new_folder() / "slow", LAYERS_PER_STAGE * stages
    document = manifest(TaskName.EMULATED, stages, 8, MANY, mode="EagerForward", standby=int(what == "replaced"))
    config = {"layers": layers, "forwardMs": 10 * stages / layers, "backwardMs": 20 * stages / layers}
    document["spec"]["task"]["config"] = {**config, "slow": {"mark": str(mark), "factor": factor}}
    policy = "Report" if what == "nothing" else "Mitigate"
    document["spec"] |= {
        "stragglerPolicy": policy,
        "topology": {"stages": stages, "schedule": "1F1B"},
        "elastic": {"minWorkers": stages, "maxWorkers": stages, "stabilizationSeconds": 1},
    }
    job = Job(place, document, main="bamboo_trainer.worker.launch.process:main")
    job.machines = stages + (what == "replaced")
    wanted = Slowdown(job, what, mark)
    job.look = wanted.look
    await asyncio.wait_for(job.run(), LIMIT_SECONDS)
    figures = wanted.figures()
    say(f"{what}: {figures['slow']:.0f} ms a step while it is slow, then {figures['after']:.0f} ms")
    return figures


def report(found: dict[str, Any]) -> None:
    rows = [
        [
            what,
            f"{f['calm']:.0f}",
            f"{f['slow']:.0f}",
            f"{f['slow_speed']:.2f}",
            f"{f['after']:.0f}",
            f"{f['speed']:.2f}",
            f"{f['found']:.1f}",
            " ".join(map(str, f["layers"])) or "-",
            f"{f['others']:.2f}",
        ]
        for what, f in found.items()
    ]
    columns = ["", "step, ms", "slow, ms", "speed", "after, ms", "speed", "found, s", "layers", "others, cores"]
    show("One worker is slow", columns, rows)


def command(
    stages: Annotated[int, typer.Option(help="Stages.", min=2)] = 4,
    factor: Annotated[float, typer.Option(help="By which one worker is slower.", min=1)] = 2.0,
    only: Annotated[list[str] | None, typer.Option(help=f"Only these: {', '.join(WHAT)}.")] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write all figures there; - for stdout.")] = None,
) -> None:
    """What a slow worker costs, replaced or with fewer layers."""
    chosen = chosen_of(only, WHAT)

    async def body() -> None:
        found: dict[str, Any] = {}
        async with lab() as place:
            for what in chosen:
                async with place.watched() as others:
                    found[what] = await slowdown(place, what, stages, factor)
                found[what]["others"] = others[0]
        if str(output) != "-":
            report(found)
        write_json(output, {"machine": machine(), "stages": stages, "factor": factor, **found})

    main(body())


if __name__ == "__main__":
    typer.run(command)
