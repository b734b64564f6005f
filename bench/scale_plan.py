"""The cost of a change of plan with many workers: bytes, the coordinator's CPU time, or half an hour of virtual time.

    python bench/scale_plan.py [--workers 1000] [--losses 10] [--json FILE]
    python bench/scale_plan.py --half-hour [--workers 1000] [--rate 0.06] [--chosen] [--json FILE]

The first command drives the real coordinator with workers that answer at once, loses some of them one after the other,
and encodes its messages as a server does. All times are CPU times. A change is a new plan; its decision is the event
that led to it; its answers are all workers' messages about it. A status is what a shell makes once per step. The second
command runs a job of ten stages for half an hour of virtual time.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from _common import machine, median, say, show, write_json
from _plane import Json
from bamboo.profiles.files import read_profile
from bamboo.simulation.job.job_run import JobRun, simulate_job
from bamboo.traces.generate import Generation, generate
from bamboo_core.control import protocol
from bamboo_core.control.channel_events import Received, WorkerJoined
from bamboo_core.control.codec import Frames
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.events import AddWorkers, Event, Send, WorkerLost
from bamboo_core.coordinator.job_status import status
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.plan import Cell, WorkerId

STAGES = 10
LAYERS = 50
STATUSES = 9


def document(workers: int, *, chosen: bool) -> Json:
    """Return a manifest. chosen: the coordinator chooses the stages, too, instead of only the pipelines."""
    pipelines = workers // STAGES
    return {
        "apiVersion": "bamboo.dev/v1alpha1",
        "kind": "BambooJob",
        "metadata": {"name": "big"},
        "spec": {
            "task": {"entrypoint": "published:build"},
            "training": {
                "steps": 10_000_000,
                "globalBatchSize": 4 * workers,
                "microBatchSize": 1,
                "gradientGroups": max(16, 2 * pipelines),
            },
            "topology": {} if chosen else {"stages": STAGES},
            "elastic": {"minStages": 2 if chosen else 1, "maxWorkers": workers, "stabilizationSeconds": 60},
            "redundancy": {"mode": "Replicas", "placement": "Host"},
            "checkpoint": {"storage": "s3://bench/checkpoints", "everySteps": 50},
        },
    }


@dataclass
class Job:
    """The coordinator and what it sends."""

    workers: int
    now: float = 0.0
    pending: deque[Event] = field(default_factory=deque)
    frames: Frames = field(default_factory=Frames)
    made: list[Json] = field(default_factory=list)  # for each plan

    def __post_init__(self) -> None:
        manifest = document(self.workers, chosen=False)
        del manifest["spec"]["checkpoint"]
        spec = parse_manifest(manifest)
        self.state = coordinator.initial(spec, manifest, secret="", now=0.0)
        self.tell(protocol_join(0))
        for number in range(1, self.workers):
            self.tell(protocol_join(number))
        for number in range(self.workers):
            self.tell(Received(name(number), protocol.WorkerReady()))
        self.settle()

    def tell(self, event: Event) -> None:
        """Process an event. Its CPU time counts towards the plan that it leads to or answers."""
        self.now += 1e-5
        before, began = self.state.plan, time.process_time()
        self.state, commands = coordinator.step(self.state, event, self.now)
        decided = time.process_time()
        plans: list[tuple[WorkerId, protocol.SendPlan]] = []
        size = 0
        for command in commands:
            match command:
                case Send(worker, protocol.SendPlan() as message):
                    plans.append((worker, message))
                    size += len(self.frames.of(message))
                case Send(worker, protocol.ProfileRequest()):
                    self.pending.append(Received(worker, protocol.Profile(costs=(1.0,) * LAYERS)))
                case AddWorkers():
                    pass  # none comes
        encoded = time.process_time()
        if plans and self.state.plan is not before:
            plan = plans[0][1].plan
            self.made.append(
                {
                    "reason": plan.reason,
                    "workers": len(plans),
                    "bytes": size,
                    "decision": decided - began,
                    "encoding": encoded - decided,
                    "answers": 0.0,
                }
            )
        elif self.made:
            self.made[-1]["answers"] += decided - began
        for worker, message in plans:
            self.pending.append(Received(worker, protocol.PlanApplied(epoch=message.plan.epoch)))
        for worker, message in plans:
            for cell in message.plan.owned_by(worker):
                for replica in message.plan.at(cell).replicas:
                    self.pending.append(Received(worker, protocol.ReplicaSynced(cell=cell, replica=replica)))

    def settle(self) -> None:
        while self.pending:
            self.tell(self.pending.popleft())

    def lose(self, cell: Cell) -> None:
        assert self.state.plan is not None
        self.tell(WorkerLost(self.state.plan.at(cell).owner, "its node was taken away"))
        self.settle()


def name(number: int) -> WorkerId:
    return f"big-w{number}"


def protocol_join(number: int) -> WorkerJoined:
    address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
    return WorkerJoined(protocol.Hello(worker=name(number), host=address, port=7000, zone=f"zone-{number % 3}"))


def run(
    workers: Annotated[int, typer.Option(min=2 * STAGES, max=10_000)] = 1000,
    losses: Annotated[int, typer.Option(min=1, help="One after the other.")] = 10,
    half_hour: Annotated[bool, typer.Option("--half-hour", help="Half an hour of virtual time.")] = False,
    rate: Annotated[float, typer.Option(help="Probability within an hour that a node is taken away.")] = 0.06,
    chosen: Annotated[bool, typer.Option("--chosen", help="The coordinator chooses the stages, too.")] = False,
    json: Annotated[Path | None, typer.Option(help='Write the figures to this file, or to "-".')] = None,
) -> None:
    """Lose workers one after the other, or run half an hour of virtual time."""
    if half_hour:
        write_json(json, _half_hour(workers, rate, chosen=chosen))
        return
    say(f"{workers} workers join")
    job = Job(workers)
    first = len(job.made)
    for number in range(losses):
        say(f"loss {number + 1} of {losses}")
        job.lose(Cell((7 * number) % (workers // STAGES - losses), number % STAGES))
    found: dict[str, list[Json]] = {}
    for one in job.made[first:]:
        found.setdefault(one["reason"], []).append(one)
    rows = [
        [
            reason,
            str(len(them)),
            f"{median([one['bytes'] for one in them]) / 1e6:.2f}",
            *(f"{1e3 * median([one[key] for one in them]):.1f}" for key in ("decision", "encoding", "answers")),
        ]
        for reason, them in found.items()
    ]
    show(
        f"a change with {workers} workers, medians",
        ("plan", "plans", "MB sent", "decision, ms", "encoding, ms", "all answers, ms"),
        rows,
    )
    seconds = _status_seconds(job.state)
    show(f"with {workers} workers, processor time", ("a status, ms",), [[f"{1e3 * seconds:.1f}"]])
    figures = {"workers": workers, "losses": losses, "plans": job.made[first:], "status": seconds}
    write_json(json, {"machine": machine(), **figures})


def _status_seconds(state: CoordinatorState) -> float:
    """Return the median CPU time of a status, which is made with each step and for viewers of the job."""
    times = []
    for _ in range(STATUSES):
        began = time.process_time()
        status(state, 0.0)
        times.append(time.process_time() - began)
    return median(times)


def _half_hour(workers: int, rate: float, *, chosen: bool) -> Json:
    manifest = document(workers, chosen=chosen)
    trace = generate(Generation(nodes=workers + 2, hours=0.5, removal=rate, addition=0.5), 1)
    job = JobRun(spec=parse_manifest(manifest), manifest=manifest, profile=read_profile("gpt-2-v100"), trace=trace)
    began = time.process_time()
    figures = simulate_job(job).figures
    seconds = time.process_time() - began
    kind = "stages and pipelines chosen" if chosen else "pipelines chosen"
    show(
        f"half an hour of virtual time, {workers} workers, {kind}",
        ("steps", "workers lost", "processor time, s"),
        [[str(figures.steps), f"{figures.preemptions:g}", f"{seconds:.1f}"]],
    )
    return {
        "machine": machine(),
        "workers": workers,
        "rate": rate,
        "chosen": chosen,
        "seconds": seconds,
        "steps": figures.steps,
        "preemptions": figures.preemptions,
    }


if __name__ == "__main__":
    typer.run(run)
