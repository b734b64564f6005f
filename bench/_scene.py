"""Jobs on a control plane, their operator, the stand-ins that play their workers, and measured windows."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _common import say
from _fleet import Fleet
from _plane import MERGE, SYSTEM, Api, Json, Plane, plane, report_nodes, stand_in
from _process import IDENTITY, Operator, cpu_seconds, running_operator
from _standin import Play, Standin

KIND = "/apis/bamboo.dev/v1alpha1"
JOBS = f"{KIND}/bamboojobs"  # of all namespaces
NAMESPACE = "bench"
TAINT = {"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}
MICROBATCHES = 8
STEP_SECONDS = 1.0
START_SECONDS, WORKER_SECONDS = 120.0, 0.5  # the limit for starting a wave, and for each of its workers
PROGRESS_SECONDS = 15.0
LAYERS = 8  # of a model, at least
HEAR_SECONDS = 30.0
CALM_SECONDS = 2.5  # without a new plan
HEAL_SECONDS = 90.0
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    nodes: int
    jobs: int
    wave: int
    stages: int = 4
    pipelines: int = 2

    @property
    def layers(self) -> int:
        return max(LAYERS, self.stages)

    @property
    def workers(self) -> int:
        return self.stages * self.pipelines


@dataclass(slots=True, kw_only=True)
class Window:
    """The figures of one measured period."""

    seconds: float = 0.0
    cores: dict[str, float] = field(default_factory=dict)  # by process
    calls: dict[str, int] = field(default_factory=dict)  # the operator's
    memory_mib: float = 0.0  # the operator's RSS
    peak_memory_mib: float = 0.0
    late: float = 0.0  # the longest delay of this process's own loop
    cuts: int = 0  # channels that broke
    ended: list[str] = field(default_factory=list)  # workers that were told to stop without a notice, and why


class Scene:
    def __init__(self, size: Size, rng: random.Random, plane: Plane, api: Api, operator: Operator) -> None:
        self.size, self._rng, self._plane, self._api, self._operator = size, rng, plane, api, operator
        names = [f"job-{index:04}" for index in range(size.jobs)]
        self.plays = {name: Play(name, STEP_SECONDS, MICROBATCHES, size.layers) for name in names}
        self.fleet = Fleet(api, self.plays)
        self._pids = {"operator": operator.pid} | {**plane.pids(), "stand-ins": os.getpid()}
        self._next = 0

    async def start(self) -> Json:
        """Start all jobs in waves, each wave once all earlier jobs run, and wait until all jobs have settled. Return
        the figures (`Window`) of the time until all jobs run.
        """
        async with self.window() as window:
            names = list(self.plays)
            for first in range(0, len(names), self.size.wave):
                wave = names[first : first + self.size.wave]
                await asyncio.gather(*map(self._make, wave))
                await self._run(first + len(wave), len(wave))
                say(f"{first + len(wave)} of {len(names)} jobs run; {self.load()}")
        await self._healed(list(self.plays.values()))
        return window

    async def _make(self, name: str) -> None:
        await self._api.request("POST", f"{KIND}/namespaces/{NAMESPACE}/bamboojobs", _manifest(name, self.size))

    async def _run(self, wanted: int, new: int) -> None:
        """Wait until `wanted` jobs run, and report progress. Raises RuntimeError if a job fails or the wait takes too
        long. new: the number of jobs that have just been created.
        """
        began = said = time.monotonic()
        while (found := await self._states())["Running"] < wanted:
            now = time.monotonic()
            if now - began > START_SECONDS + WORKER_SECONDS * new * self.size.workers or found["Failed"]:
                raise RuntimeError(f"{wanted} jobs should run, but {dict(found)}; {self.load()}")
            if now - said > PROGRESS_SECONDS:
                said, connected = now, sum(len(play.workers) for play in self.plays.values())
                say(f"{found['Running']} of {wanted} jobs run, {connected} workers are connected; {self.load()}")
            await asyncio.sleep(0.5)

    async def _states(self) -> Counter[str]:
        """Count the jobs for which a condition is true, by the condition's type."""
        counts: Counter[str] = Counter()
        for job in (await self._api.get(JOBS))["items"]:
            conditions = (job.get("status") or {}).get("conditions") or ()
            counts.update(c["type"] for c in conditions if c["status"] == "True")
        return counts

    @asynccontextmanager
    async def window(self) -> AsyncIterator[Json]:
        """Measure the block. Yields a dictionary that gets the fields of a `Window` when the block has ended."""
        figures: Json = {}
        before, began, clock = cpu_seconds(self._pids), time.monotonic(), time.time()
        self.fleet.late = 0.0
        cuts = self._cuts()
        ended_before = {name: len(play.ended) for name, play in self.plays.items()}
        yield figures
        seconds = time.monotonic() - began
        after = cpu_seconds(self._pids)
        memory, peak = self._operator.memory()
        calls: Counter[str] = Counter()
        for (who, what), count in self._plane.calls(clock, time.time()).items():
            calls[f"{who}: {what}"] += count
        window = Window(
            seconds=seconds,
            cores={name: (after[name] - before[name]) / seconds for name in after},
            calls=dict(calls),
            memory_mib=memory,
            peak_memory_mib=peak,
            late=self.fleet.late,
            cuts=self._cuts() - cuts,
            ended=[text for name, play in self.plays.items() for text in play.ended[ended_before[name] :]],
        )
        figures.update(asdict(window))

    def _cuts(self) -> int:
        return sum(play.cuts for play in self.plays.values())

    async def notice(self, count: int) -> list[Json]:
        """Taint one node of each of the next `count` jobs at once, as a notice. Wait until the jobs have recovered, and
        remove the taints.

        Returns the seconds for each job from the start of the taint's write: `written` to its end, `first` and `last`
        to the new plan's arrival at the first and last survivor (None if a survivor lacks the plan after HEAR_SECONDS).
        """
        names = list(self.plays)
        plays = [self.plays[names[(self._next + index) % len(names)]] for index in range(count)]
        self._next += count
        await self._healed(plays)
        victims = [self._victim(play) for play in plays]
        found = await asyncio.gather(*map(self._take, plays, victims))
        await self._healed(plays)
        await asyncio.gather(*(self._taint(victim.node, []) for victim in victims))
        return list(found)

    def _victim(self, play: Play) -> Standin:
        """Return a random worker of the job, if possible one that has its node for itself."""
        workers = [play.workers[name] for name in sorted(play.workers)]
        return self._rng.choice([w for w in workers if self.fleet.alone(w)] or workers)

    async def _take(self, play: Play, victim: Standin) -> Json:
        assert play.plan is not None
        epoch, survivors = play.plan.epoch + 1, play.workers.keys() - {victim.name}
        began = time.monotonic()
        await self._taint(victim.node, [TAINT])
        written = time.monotonic() - began
        while time.monotonic() - began < HEAR_SECONDS:
            heard = {name: at for name, at in play.heard.get(epoch, {}).items() if name in survivors}
            if len(heard) == len(survivors):
                return {
                    "job": play.name,
                    "written": written,
                    "first": min(heard.values()) - began,
                    "last": max(heard.values()) - began,
                }
            await asyncio.sleep(POLL_SECONDS)
        say(f"{play.name}: {len(heard)} of {len(survivors)} have heard of a plan after {HEAR_SECONDS:g} s")
        return {"job": play.name, "written": written, "first": None, "last": None}

    async def _healed(self, plays: list[Play]) -> None:
        """Wait until the jobs have healed. Raises RuntimeError if one takes longer than HEAL_SECONDS."""
        deadline = time.monotonic() + HEAL_SECONDS
        while not all(play.calm(self.size.workers, CALM_SECONDS) for play in plays):
            if time.monotonic() > deadline:
                late = [play.name for play in plays if not play.calm(self.size.workers, CALM_SECONDS)]
                told = [text for play in self.plays.values() for text in play.ended]
                raise RuntimeError(
                    f"{len(late)} jobs have not healed after {HEAL_SECONDS:g} s; {self._cuts()} channels broke;"
                    f" {len(told)} workers without a notice were told to end {told[-1:]}; {self.load()}"
                )
            await asyncio.sleep(0.1)

    async def _taint(self, node: str, taints: list[dict[str, str]]) -> None:
        await self._api.request("PATCH", f"/api/v1/nodes/{node}", {"spec": {"taints": taints}}, content=MERGE)

    def load(self) -> str:
        """Return the operator's CPU time so far and its present memory, as text."""
        took = cpu_seconds(self._pids)["operator"]
        return f"the operator has used {took:.0f} s, {self._operator.memory()[0]:.0f} MiB"

    def troubles(self) -> list[str]:
        return list(self._operator.troubles())


@asynccontextmanager
async def scene(folder: Path, size: Size, rng: random.Random) -> AsyncIterator[Scene]:
    """Run a control plane, operator and stand-ins for the block, without jobs at first. SIGTERM cancels the block."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with plane(folder, size.nodes) as control, control.api() as api:
        await _namespace(api, NAMESPACE)
        await _account(api, SYSTEM)
        stand_in(control.cluster, SYSTEM, IDENTITY)
        with running_operator(control.cluster, folder) as running:
            place = Scene(size, rng, control, api, running)
            tasks = [asyncio.create_task(place.fleet.run()), asyncio.create_task(report_nodes(api, size.nodes))]
            try:
                yield place
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


async def _namespace(api: Api, name: str) -> None:
    """Create the namespace, and wait for its default ServiceAccount, without which no pod is admitted."""
    await api.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    await _account(api, name)


async def _account(api: Api, namespace: str) -> None:
    while not await api.find(f"/api/v1/namespaces/{namespace}/serviceaccounts/default"):
        await asyncio.sleep(0.1)


def _manifest(name: str, size: Size) -> dict[str, Any]:
    groups = {"gradientGroups": size.pipelines} if size.pipelines > MICROBATCHES else {}
    return {
        "apiVersion": "bamboo.dev/v1alpha1",
        "kind": "BambooJob",
        "metadata": {"name": name},
        "spec": {
            "task": {"entrypoint": "bamboo_trainer.models.gpt:build", "config": {"blocks": size.layers - 2}},
            "training": {
                "steps": 1_000_000,
                "globalBatchSize": 4 * max(MICROBATCHES, size.pipelines),
                "microBatchSize": 4,
                **groups,
            },
            "topology": {"stages": size.stages, "pipelines": size.pipelines},
            "nodePools": [{"name": "spot", "preset": "Karpenter", "pricePerHour": "0.90"}],
        },
    }
