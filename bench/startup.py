"""How fast do many workers start on this machine, and what memory does such a job take?

    python bench/startup.py [--workers 16] [--steps 20] [--json FILE]

A job of a byte-level GPT, one stage a worker; the fork server is started before. Memory is the proportional set size
(PSS) of launcher and workers, sampled twice a second: pages that they share count once.
"""

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from _common import Job, Lab, children, lab, machine, main, say, show, write_json
from bamboo_core.control.channel_events import Received, WorkerJoined
from bamboo_core.control.protocol import StepCommitted, WorkerReady

SAMPLE_SECONDS = 0.5


def run(
    workers: Annotated[int, typer.Option(min=2, max=64, help="Stages, and so workers.")] = 16,
    steps: Annotated[int, typer.Option(min=2)] = 20,
    json: Annotated[Path | None, typer.Option(help='Write the figures to this file, or to "-".')] = None,
) -> None:
    """Start the workers, train a few steps, print when what had happened."""
    main(_run(workers, steps, json))


async def _run(workers: int, steps: int, json: Path | None) -> None:
    began = time.monotonic()
    async with lab() as place:
        launcher = time.monotonic() - began
        say(f"{workers} workers, {steps} steps")
        figures = {"launcher_seconds": launcher, **await _measure(place, workers, steps)}
    rows = [[name.replace("_", " "), f"{value:.2f}"] for name, value in figures.items()]
    show(f"{workers} workers on {machine()['cpus']} cores", ["", ""], rows)
    write_json(json, {"machine": machine(), "workers": workers, "steps": steps, **figures})


async def _measure(place: Lab, workers: int, steps: int) -> dict[str, float]:
    job = Job(place, _manifest(workers, steps), main="bamboo_trainer.worker.launch.process:main")
    seen: dict[type, list[float]] = {WorkerJoined: [], WorkerReady: [], StepCommitted: []}

    def look(now: float, event: Any, commands: Any) -> None:
        kind = type(event.message) if isinstance(event, Received) else type(event)
        if kind in seen:
            seen[kind].append(now - began)

    job.look = look
    began = time.monotonic()
    peak = [0]
    sampler = asyncio.create_task(_sample(peak))
    try:
        await job.run()
    finally:
        sampler.cancel()
    return {
        "first_joined_seconds": seen[WorkerJoined][0],
        "all_joined_seconds": seen[WorkerJoined][workers - 1],
        "all_ready_seconds": seen[WorkerReady][workers - 1],
        "first_step_seconds": seen[StepCommitted][0],
        "job_seconds": time.monotonic() - began,
        "peak_memory_mib": peak[0] / 2**20,
    }


async def _sample(peak: list[int]) -> None:
    while True:
        await asyncio.sleep(SAMPLE_SECONDS)
        launcher = children(_own())[0]
        peak[0] = max(peak[0], sum(map(_pss, (launcher, *children(launcher)))))


def _own() -> int:
    return int(Path("/proc/self/stat").read_text().split()[0])


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _manifest(workers: int, steps: int) -> dict[str, Any]:
    config = {"dModel": 64, "heads": 4, "blocks": max(workers - 2, 1), "context": 64, "text": "stdlib"}
    return {
        "apiVersion": "bamboo.dev/v1alpha1",
        "kind": "BambooJob",
        "metadata": {"name": "startup"},
        "spec": {
            "task": {"entrypoint": "bamboo_trainer.models.gpt:build", "config": config},
            "training": {"steps": steps, "globalBatchSize": 2 * workers, "microBatchSize": 2},
            "topology": {"stages": workers},
            "redundancy": {"mode": "LazyForward"},
        },
    }


if __name__ == "__main__":
    typer.run(run)
