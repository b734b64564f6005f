"""What does it take until a job trains again after a worker was killed: Bamboo, and torchrun with its checkpoints?

    python bench/restarts.py
    python bench/restarts.py --megabytes 10 --megabytes 1000 --repeat 2 --json restarts.json

The same layers in the same stages, over gloo with `torch.distributed.pipelining` under torchrun (its elastic agent, one
process for each stage, `torch.distributed.checkpoint` every ten steps), and under Bamboo's coordinator with replicas.
Layers sleep, and have as many parameters as make up the state: AdamW keeps two numbers for each. One process is killed
(SIGKILL) in the middle of a step, some steps after a checkpoint. All times are seconds from the kill on:

    training   torchrun: until all processes are there again with the state of the checkpoint
    new        until the first step ends that had not ended before: torchrun repeats what followed the checkpoint
    step       what a step takes undisturbed
    lost       `new` beyond the rest of a step: how much later the job is than if nobody had been killed

Nobody has to find another machine, and checkpoints are read from the page cache: both are to torchrun's favour.
"""

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from _common import (
    HERE,
    Job,
    Lab,
    TaskName,
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
from _restart import Progress
from bamboo_core.control.channel_events import Received
from bamboo_core.control.protocol import StepCommitted
from bamboo_core.coordinator.events import Event
from bamboo_core.planning.plan import Cell

SIZES = (10, 100, 1000)  # megabytes of a state in all
LAYERS = 4
BYTES_EACH = 12  # of a parameter: float32, and two more in AdamW
EVERY, AFTER = 10, 4  # steps between checkpoints, and after the first one until the kill
CALM = 6  # steps before the kill
MANY = 1_000_000
LIMIT_SECONDS = 300.0
POLL_SECONDS = 0.002
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else gloo finds the addresses of the attempt before, and all fail
}


def job_of(megabytes: int, stages: int) -> Any:
    document = manifest(TaskName.EMULATED, stages, 8, MANY, mode="EagerForward")
    config = document["spec"]["task"]["config"]
    document["spec"]["task"] = {
        "entrypoint": "_emulated:build_wide",
        "config": {
            "layers": LAYERS,
            "forwardMs": config["forwardMs"],
            "backwardMs": config["backwardMs"],
            "width": 64,
            "weights": megabytes * 10**6 // (BYTES_EACH * LAYERS),
        },
    }
    return document


async def under_torchrun(document: Any, folder: Path, rng: random.Random) -> dict[str, float]:
    world = document["spec"]["topology"]["stages"]
    config = folder / "config.json"
    config.write_text(json.dumps({"manifest": document, "folder": str(folder), "every": EVERY}))
    agent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(world),
        "--max-restarts",
        "3",
        str(HERE / "_torchrun.py"),
        str(config),
        cwd=HERE,
        env={**os.environ, **ENVIRONMENT},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=(folder / "errors").open("wb"),
    )
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            first = Attempt(Progress(folder, 0, world), agent)
            await first.reach(EVERY + AFTER)
            ends = first.progress.ends()
            calm = median(gaps([ends[step] for step in range(EVERY + 1, EVERY + AFTER + 1)]))
            await asyncio.sleep(rng.random() * calm)
            newest = max(first.progress.ends())
            victim = rng.randrange(world)
            killed = asyncio.get_running_loop().time()
            os.kill(first.progress.pid(victim), signal.SIGKILL)
            second = Attempt(Progress(folder, 1, world), agent)
            end = await second.reach(newest + 1)
    finally:
        if agent.returncode is None:
            agent.terminate()
        await agent.wait()
    ready, resumed = second.progress.ready(), second.progress.resumed()
    found = {
        "training": ready - killed,
        "new": end - killed,
        "step": calm,
        "redone": newest + 1 - resumed,
        "lost": end - first.progress.ends()[newest] - calm,
    }
    say(f"torchrun: {found['new']:.2f} s until step {newest + 1}, from checkpoint {resumed}")
    return found


@dataclass(frozen=True, slots=True)
class Attempt:
    """One time that the agent has started the ranks."""

    progress: Progress
    agent: asyncio.subprocess.Process

    async def reach(self, step: int) -> float:
        """The moment at which that step ended, once it has. Raises RuntimeError if the agent ends before."""
        while (end := self.progress.ends().get(step)) is None:
            if self.agent.returncode is not None:
                errors = (self.progress.folder / "errors").read_text()
                raise RuntimeError(f"torchrun ended with {self.agent.returncode}: {errors[-2000:]}")
            await asyncio.sleep(POLL_SECONDS)
        return end


@dataclass(slots=True)
class BambooKill:
    """Kills the owner of a stage in the middle of a step, once all are copied, and stops two commits later."""

    job: Job
    rng: random.Random
    calm: float = 0.0
    killed: float | None = None
    newest: int = -1  # step, at the kill
    planned: bool = False

    def look(self, now: float, event: Event, commands: Sequence[Any]) -> None:
        if not (isinstance(event, Received) and isinstance(event.message, StepCommitted)):
            return
        steps = list(self.job.committed.values())
        if self.killed is not None:
            if max(self.job.committed) >= self.newest + 2:
                self.job.stop()
        elif not self.planned and len(steps) > CALM and self._is_copied():
            self.planned, self.calm = True, median(gaps(steps[-CALM:]))
            asyncio.get_running_loop().call_later(self.rng.random() * self.calm, self._strike)

    def _is_copied(self) -> bool:
        state, plan = self.job.state, self.job.state.plan
        return plan is not None and is_copied(plan, state.plans.synced)

    def _strike(self) -> None:
        plan = self.job.state.plan
        assert plan is not None
        self.newest, self.killed = max(self.job.committed), asyncio.get_running_loop().time()
        victim = plan.at(Cell(0, self.rng.randrange(len(plan.stages)))).owner
        self.job.lab.pool.signal(victim, signal.SIGKILL)


async def under_bamboo(place: Lab, document: Any, rng: random.Random) -> dict[str, float]:
    job = Job(place, document, main="bamboo_trainer.worker.launch.process:main")
    kill = BambooKill(job, rng)
    job.look = kill.look
    await asyncio.wait_for(job.run(), LIMIT_SECONDS)
    assert kill.killed is not None
    end = job.committed[kill.newest + 1]
    found = {
        "new": end - kill.killed,
        "step": kill.calm,
        "lost": end - job.committed[kill.newest] - kill.calm,
    }
    say(f"Bamboo: {found['new']:.2f} s until step {kill.newest + 1}")
    return found


async def measure(place: Lab, sizes: Sequence[int], stages: int, repeat: int) -> list[dict[str, Any]]:
    found, rng = [], random.Random(0)
    for megabytes in sizes:
        document = job_of(megabytes, stages)
        row: dict[str, Any] = {"megabytes": megabytes, "torchrun": [], "bamboo": []}
        for _ in range(repeat):
            row["bamboo"].append(await under_bamboo(place, document, rng))
            with tempfile.TemporaryDirectory(dir=place.folder) as folder:
                row["torchrun"].append(await under_torchrun(document, Path(folder), rng))
        found.append({**row, "load": os.getloadavg()[0]})
    return found


def report(found: Sequence[dict[str, Any]]) -> None:
    rows = []
    for row in found:
        theirs, ours = row["torchrun"], row["bamboo"]

        def middle(runs: Sequence[dict[str, float]], name: str) -> float:
            return median([run[name] for run in runs])

        rows.append(
            [
                str(row["megabytes"]),
                f"{middle(theirs, 'step'):.2f}",
                f"{middle(theirs, 'training'):.1f}",
                f"{middle(theirs, 'new'):.1f}",
                f"{middle(theirs, 'redone'):.0f}",
                f"{middle(theirs, 'lost'):.1f}",
                f"{middle(ours, 'step'):.2f}",
                f"{middle(ours, 'new'):.2f}",
                f"{middle(ours, 'lost'):.2f}",
                f"{row['load']:.0f}",
            ]
        )
    columns = [
        "state, MB",
        "torchrun: step",
        "training",
        "new",
        "redone",
        "lost",
        "Bamboo: step",
        "new",
        "lost",
        "load",
    ]
    show("a worker is killed; seconds, medians", columns, rows)


def command(
    megabytes: Annotated[list[int] | None, typer.Option(help="Of the state in all.")] = None,
    stages: Annotated[int, typer.Option(help="Processes, one for each.", min=2, max=LAYERS)] = 2,
    repeat: Annotated[int, typer.Option(help="Kills for each size, of each of the two.", min=1)] = 3,
    output: Annotated[Path | None, typer.Option("--json", help="Write all figures there; - for stdout.")] = None,
) -> None:
    """How long a job needs until it trains again after a worker was killed."""

    async def body() -> None:
        async with lab() as place:
            found = await measure(place, megabytes or SIZES, stages, repeat)
        if str(output) != "-":
            report(found)
        write_json(output, {"machine": machine(), "stages": stages, "sizes": found})

    main(body())


if __name__ == "__main__":
    typer.run(command)
