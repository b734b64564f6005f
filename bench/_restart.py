"""The cost of a job that is killed as a whole and restarted from its last checkpoint."""

import asyncio
import json
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import Lab, gaps, median, say

POLL_SECONDS = 0.002
GONE_SECONDS = 10.0
WARMUP = 4


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress that the ranks of a job's `number`-th start report in files of a folder."""

    folder: Path
    number: int
    world: int  # ranks

    def told(self, rank: int) -> list[tuple[str, int, float]]:
        """Return a rank's events so far: name, value, time."""
        path = self.folder / f"progress-{self.number}-{rank}"
        text = path.read_text() if path.exists() else ""
        return [tuple(json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def ends(self) -> dict[int, float]:
        """Return when each step ended on the first rank, which ends it last."""
        return {value: at for event, value, at in self.told(0) if event == "step"}

    def pid(self, rank: int) -> int:
        return next(value for event, value, _ in self.told(rank) if event == "pid")

    def ready(self) -> float:
        """Return when all ranks had their state."""
        return max(at for rank in range(self.world) for event, _, at in self.told(rank) if event == "ready")

    def resumed(self) -> int:
        """Return the step from which they resumed."""
        return next(value for event, value, _ in self.told(0) if event == "ready")


class RestartedRun:
    """The ranks of one start of the job."""

    def __init__(self, place: Lab, document: Any, folder: Path, number: int, every: int) -> None:
        self.progress = Progress(folder, number, document["spec"]["topology"]["stages"])
        arguments = {
            "manifest": document,
            "steps": document["spec"]["training"]["steps"],
            "folder": str(folder),
            "attempt": number,
            "every": every,
        }
        self.ranks = [
            asyncio.ensure_future(place.pool.call("_pipelining:run", {**arguments, "rank": r}))
            for r in range(self.progress.world)
        ]
        for rank in self.ranks:
            rank.add_done_callback(lambda done: done.cancelled() or done.exception())  # mark the exception as retrieved

    async def reach(self, step: int) -> float:
        """Wait until that step has ended; return when it did."""
        while (end := self.progress.ends().get(step)) is None:
            await asyncio.sleep(POLL_SECONDS)
            for rank in self.ranks:
                if rank.done():
                    rank.result()
                    assert step in self.progress.ends(), f"the ranks ended before step {step}"
        return end

    async def kill(self) -> float:
        """Kill every rank with SIGKILL and wait until they are gone; return when the signal was sent."""
        pids = [self.progress.pid(rank) for rank in range(self.progress.world)]
        now = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            await asyncio.sleep(POLL_SECONDS)
            if time.monotonic() - now > GONE_SECONDS:
                raise RuntimeError(f"a killed process among {pids} does not go")
        for rank in self.ranks:
            rank.cancel()
        await asyncio.gather(*self.ranks, return_exceptions=True)
        return now


async def restart(place: Lab, document: Any, every: int, rng: random.Random) -> dict[str, float]:
    """Kill a job at a random moment between two checkpoints, restart it, and return figures in milliseconds and
    steps.
    """
    folder = place.new_folder()
    first = RestartedRun(place, document, folder, 0, every)
    step = every + WARMUP + rng.randrange(every - WARMUP)  # not too near, so that there are calm steps to compare
    await first.reach(step - 1)
    ends = first.progress.ends()
    calm = median(gaps([ends[k] for k in sorted(ends) if k > every]))
    await asyncio.sleep(rng.random() * calm)
    step = max(first.progress.ends()) + 1
    began = max(first.progress.ends().values())
    killed = await first.kill()
    gone = time.monotonic()
    second = RestartedRun(place, document, folder, 1, every)
    end = await second.reach(step)
    ready, resumed = second.progress.ready(), second.progress.resumed()
    await second.kill()
    figures = {
        "step": step,
        "resumed": resumed,
        "redone": step - resumed,
        "calm": 1e3 * calm,
        "end": 1e3 * (gone - killed),
        "start": 1e3 * (ready - gone),
        "redo": 1e3 * (end - ready),
        "delay": 1e3 * (end - began - calm),
    }
    say(f"restart at step {step} from {resumed}: {figures['delay']:.0f} ms later than undisturbed")
    return figures
