"""Operators that share a Lease, in virtual time: an API server with one Lease, and processes that die and freeze."""

import asyncio
import contextlib
import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

from bamboo_core.kube.errors import ApiError, ClusterUnreachable
from bamboo_operator.kube.access import TIMEOUT_SECONDS
from bamboo_operator.kube.lease import Lease, LeaseLost, LeaseName
from fake_api import FakeApi

PLACE = LeaseName("system", "operator")


class LeaseSimulation:
    """An API server with one Lease and the operators' pods; nothing takes time but sleep()."""

    def __init__(self) -> None:
        self.now, self.numbers = 0.0, count()
        self.queue: list[tuple[float, int, Process, asyncio.Future[None]]] = []
        self.api = FakeApi()
        self.processes: list[Process] = []
        self.checks: list[Callable[[], None]] = []

    @property
    def lease(self) -> dict[str, Any] | None:
        return self.api.all("leases").get(PLACE.name)

    @property
    def pods(self) -> dict[str, dict[str, Any]]:
        return self.api.all("pods")

    def start(self, name: str) -> "Process":
        """Starts an operator in a pod of that name."""
        self.api.put("pods", {"metadata": {"name": name}, "status": {"phase": "Running"}})
        self.processes.append(Process(self, name))
        return self.processes[-1]

    async def run(self, seconds: float) -> None:
        end = self.now + seconds
        await self._settle()
        while self.queue and self.queue[0][0] <= end:
            self.now, _, process, future = heapq.heappop(self.queue)
            if process.frozen:
                process.late.append(future)
            elif not future.done():
                future.set_result(None)
                await self._settle()
        self.now = end

    async def _settle(self) -> None:
        """Runs until all wait for the clock."""
        for _ in range(20):
            await asyncio.sleep(0)
        for check in self.checks:
            check()

    def at_work(self) -> list["Process"]:
        return [process for process in self.processes if process.works]

    async def close(self) -> None:
        for process in self.processes:
            await process.kill()


class Process:
    """One operator's, as far as the Lease goes; and its way to the API server."""

    def __init__(self, simulation: LeaseSimulation, name: str) -> None:
        self.simulation, self.name = simulation, name
        self.works = self.frozen = self.cut = False
        self.disturbed = -1e9  # when it was last frozen or cut off
        self.late: list[asyncio.Future[None]] = []
        self.writes = 0
        self.lease = self._lease()
        self.task = asyncio.create_task(self._live())

    def _lease(self) -> Lease:
        return Lease(self, PLACE, self.name, clock=lambda: self.simulation.now, sleep=self.sleep)

    async def _live(self) -> None:
        """Lives as a process does in a container that is started again whenever it ends."""
        while True:
            self.lease = self._lease()
            await self.lease.acquire()
            keeping = asyncio.create_task(self.lease.keep())
            settling = asyncio.create_task(self._settle())
            try:
                await asyncio.wait((keeping, settling), return_when=asyncio.FIRST_COMPLETED)
                self.works = not keeping.done()
                with contextlib.suppress(LeaseLost):
                    await keeping
            finally:
                self.works = False
                keeping.cancel()
                settling.cancel()
                await asyncio.gather(keeping, settling, return_exceptions=True)
            await self.sleep(1)

    async def _settle(self) -> None:
        await self.lease.settle()

    @property
    def in_its_pod(self) -> bool:
        """Which is there, and not told to leave."""
        pod = self.simulation.pods.get(self.name)
        return pod is not None and "deletionTimestamp" not in pod["metadata"]

    async def kill(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def again(self) -> None:
        """The container dies and is started again."""
        await self.kill()
        self.task = asyncio.create_task(self._live())

    async def end(self) -> None:
        """Ends the process as SIGTERM does."""
        await self.kill()
        with contextlib.suppress(ClusterUnreachable, ApiError):
            await self.lease.release()

    def freeze(self, *, frozen: bool) -> None:
        self.frozen, self.disturbed = frozen, self.simulation.now
        for future in self.late:
            heapq.heappush(self.simulation.queue, (self.simulation.now, next(self.simulation.numbers), self, future))
        self.late.clear()

    def cut_off(self, *, cut: bool) -> None:
        self.cut, self.disturbed = cut, self.simulation.now

    async def meet(self, action: str) -> None:
        """What befalls the operator, where it can."""
        match action:
            case "again" if self.in_its_pod:
                await self.again()
            case "end" if not self.cut:
                await self.end()
            case "vanish":
                await self.kill()
                self.simulation.pods.pop(self.name, None)
            case "evict":
                self.simulation.pods.get(self.name, {"metadata": {}})["metadata"]["deletionTimestamp"] = "now"
            case "cut" | "join":
                self.cut_off(cut=action == "cut")
            case "freeze" | "thaw":
                self.freeze(frozen=action == "freeze")

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(
            self.simulation.queue, (self.simulation.now + seconds, next(self.simulation.numbers), self, future)
        )
        await future

    # what the API server answers

    async def _reach(self) -> None:
        if self.cut:
            await self.sleep(TIMEOUT_SECONDS)
            raise ClusterUnreachable("late")

    async def read_lease(self, namespace: str, name: str) -> dict[str, Any] | None:
        await self._reach()
        assert namespace == PLACE.namespace
        return self.simulation.api.read("leases", name) if name in self.simulation.api.all("leases") else None

    async def create_lease(self, lease: dict[str, Any]) -> dict[str, Any]:
        await self._reach()
        return self._wrote(self.simulation.api.create("leases", lease))

    async def replace_lease(self, lease: dict[str, Any]) -> dict[str, Any]:
        await self._reach()
        return self._wrote(self.simulation.api.replace("leases", lease))

    def _wrote(self, lease: dict[str, Any]) -> dict[str, Any]:
        self.writes += 1
        return lease

    async def read_pod(self, namespace: str, name: str) -> dict[str, Any]:
        await self._reach()
        assert namespace == "system"
        return self.simulation.api.read("pods", name)
