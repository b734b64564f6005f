"""Shared parts of the benchmarks: the machine, jobs run by the real coordinator, and the display of figures."""

import asyncio
import json
import os
import platform
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from bamboo.local.fork_server import ForkServer, exit_detail
from bamboo_core.control.protocol import Received, StepCommitted
from bamboo_core.control.server import ControlServer, token_check
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.events import (
    AddWorkers,
    Command,
    Event,
    Finish,
    Interrupted,
    Outcome,
    Send,
    Tick,
    WorkerLost,
)
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.plan import WorkerId

TICK_SECONDS = 0.05
MACHINES = 1000
HERE = Path(__file__).parent
IMPORTS = ("bamboo_trainer.models.gpt", "_emulated", "_pipelining", "_recorder")
WIDTH = 120


class TaskName(StrEnum):
    GPT = "gpt"
    EMULATED = "emulated"


def manifest(task: TaskName, stages: int, microbatches: int, steps: int, *, mode: str, standby: int = 0) -> Any:
    """Return a job's manifest. task: gpt is the quickstart's model; each stage of emulated sleeps 10 ms per forward and
    20 ms per backward. mode: redundancy.mode. standby: standby.workers.
    """
    layers = max(2, stages - 1) * stages  # also divisible among one stage fewer
    configs: dict[TaskName, tuple[str, dict[str, Any]]] = {
        TaskName.GPT: (
            "bamboo_trainer.models.gpt:build",
            {"dModel": 256, "heads": 4, "blocks": 6, "context": 64, "text": "stdlib"},
        ),
        TaskName.EMULATED: (
            "_emulated:build",
            {"layers": layers, "forwardMs": 10 * stages / layers, "backwardMs": 20 * stages / layers},
        ),
    }
    entrypoint, config = configs[task]
    return {
        "apiVersion": "bamboo.dev/v1alpha1",
        "kind": "BambooJob",
        "metadata": {"name": "bench"},
        "spec": {
            "task": {"entrypoint": entrypoint, "config": config},
            "training": {"steps": steps, "globalBatchSize": 4 * microbatches, "microBatchSize": 4, "seed": 0},
            "topology": {"stages": stages},
            "redundancy": {"mode": mode},
            "standby": {"workers": standby},
        },
    }


class Lab:
    """The fork server that all runs of a benchmark share, and a temporary folder for each run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pool = ForkServer(self._exited, folder / "workers.log", imports=IMPORTS)
        self.on_exit: Callable[[WorkerId, int | None], None] = lambda worker, code: None
        self._count = 0

    def new_folder(self) -> Path:
        self._count += 1
        path = self.folder / str(self._count)
        path.mkdir()
        return path

    def _exited(self, worker: WorkerId, code: int | None) -> None:
        self.on_exit(worker, code)

    def others(self) -> float:
        """Return the CPU seconds that processes outside this benchmark have used since boot. Compare two values only if
        no worker runs at either time.
        """
        own = 0
        for pid in (os.getpid(), *children(os.getpid())):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            own += sum(map(int, fields[11:13] if pid == os.getpid() else fields[11:15]))
        return busy_seconds() - own / os.sysconf("SC_CLK_TCK")

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[list[float]]:
        """Measure the CPU use of other processes during the block. Yields a list that gets one element after the block:
        the mean number of cores that they used.
        """
        began, before, share = time.monotonic(), self.others(), list[float]()
        yield share
        launcher = children(os.getpid())[0]
        while children(launcher):  # their CPU time is known once they are reaped
            await asyncio.sleep(TICK_SECONDS)
        share.append(round((self.others() - before) / (time.monotonic() - began), 3))


def busy_seconds() -> float:
    """Return the seconds since boot in which cores were neither idle nor waiting for I/O, summed over all cores."""
    ticks = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@asynccontextmanager
async def lab() -> AsyncIterator[Lab]:
    """Open a lab for the block. SIGTERM cancels the block. The lab's processes end with it, even on an error."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _cancel, asyncio.current_task())
    with tempfile.TemporaryDirectory(prefix="bamboo-bench-") as folder:
        place = Lab(Path(folder))
        try:
            await place.pool.open()
            yield place
        finally:
            await place.pool.close()


def _cancel(task: asyncio.Task[Any] | None) -> None:
    if task is not None:
        task.cancel()


class Job:
    """A job, and the loop that runs its coordinator and starts its workers. After each event the loop calls `look` with
    the monotonic time, the event and the resulting commands. machines: the most workers at once; others wait.
    """

    def __init__(self, place: Lab, document: Any, *, main: str) -> None:
        self.lab, self.manifest, self.main = place, document, main
        self.folder = place.new_folder()
        self.look: Callable[[float, Event, Sequence[Command]], None] = lambda now, event, commands: None
        self.committed: dict[int, float] = {}  # when the coordinator received each step's commit
        self.losses: dict[int, float] = {}
        self.norms: dict[int, float] = {}  # of the whole gradient
        self.finish: Finish | None = None
        self.queue: asyncio.Queue[Event] = asyncio.Queue()
        self._token, self._url, self._started = secrets.token_hex(8), "", 0
        self.machines, self._waiting = MACHINES, 0
        self.state = coordinator.initial(
            parse_manifest(document), document, secret=secrets.token_hex(8), now=time.monotonic()
        )

    async def run(self) -> "Job":
        """Run the job until it ends, and return it. Raises RuntimeError if it fails."""
        server = ControlServer(self.queue.put_nowait, token_check(self._token))
        self.lab.on_exit = self._exited
        ticking = asyncio.create_task(self._ticks())
        try:
            self._url = await server.start("127.0.0.1")
            while self.finish is None:
                self._step(await self.queue.get(), server)
            while self.lab.pool.alive:
                self._step(await self.queue.get(), server)  # tells late joiners that the job is over
        finally:
            ticking.cancel()
            await server.stop()
        if self.finish.outcome not in (Outcome.COMPLETE, Outcome.INTERRUPTED):
            raise RuntimeError(f"the job failed: {self.finish.message}\n{self.lab.pool.tail(30)}")
        return self

    def stop(self) -> None:
        self.queue.put_nowait(Interrupted())

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.queue.put_nowait(Tick())

    def _exited(self, worker: WorkerId, code: int | None) -> None:
        self.queue.put_nowait(WorkerLost(worker, exit_detail(code), code))

    def _step(self, event: Event, server: ControlServer) -> None:
        now = time.monotonic()
        self.state, commands = coordinator.step(self.state, event, now)
        for command in commands:
            match command:
                case Send(worker, message):
                    server.send(worker, message)
                case AddWorkers(count):
                    self._waiting += count
                    self.staff()
                case Finish():
                    self.finish = command
        if isinstance(event, Received) and isinstance(event.message, StepCommitted):
            self.committed.setdefault(event.message.step, now)
            message = event.message
            for told, figure in ((self.losses, message.loss), (self.norms, message.gradient_norm)):
                told.setdefault(message.step, float("nan") if figure is None else figure)
        self.look(now, event, commands)

    def staff(self) -> None:
        """Start workers that the coordinator has requested, until `machines` workers are alive."""
        while self._waiting and len(self.lab.pool.alive) < self.machines:
            self._waiting -= 1
            self._start()

    def _start(self) -> None:
        worker = f"w{self._started}"
        self._started += 1
        path = str(self.folder / f"{worker}.record")
        self.lab.pool.start(worker, url=self._url, token=self._token, zone="", main=self.main, trace=path)


def quantile(values: Sequence[float], q: float) -> float:
    """Return the q-quantile of the values, interpolated linearly; NaN without values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def gaps(times: Sequence[float]) -> list[float]:
    return [b - a for a, b in pairwise(times)]


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def chosen_of(only: Sequence[str] | None, known: Sequence[str], option: str = "--only") -> Sequence[str]:
    """Return the option's names, or all known names without it. Raises typer.BadParameter for an unknown name."""
    if unknown := sorted(set(only or ()) - set(known)):
        raise typer.BadParameter(f"expected some of {', '.join(known)}, got {unknown[0]}", param_hint=option)
    return only or known


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
    }


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=WIDTH).print(table)


def write_json(path: Path | None, document: Any) -> None:
    """Write JSON to a file, or to standard output for "-"; None writes nothing."""
    if path is not None:
        text = json.dumps(document, indent=1)
        print(text) if str(path) == "-" else path.write_text(text + "\n", encoding="utf-8")


def main(body: Any) -> None:
    """Run a benchmark. Exits with 130 after Ctrl-C or SIGTERM; after a RuntimeError, prints it and exits with 1."""
    with suppress(asyncio.CancelledError):
        try:
            asyncio.run(body)
            return
        except KeyboardInterrupt:
            say("interrupted")
        except RuntimeError as error:
            say(str(error))
            raise SystemExit(1) from None
    raise SystemExit(130)
