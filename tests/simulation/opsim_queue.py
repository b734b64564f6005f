"""A queue of Kueue in a simulated cluster, whose manager is played; and others who want its quota."""

import asyncio
import contextlib
from typing import TYPE_CHECKING

from kueue_manager import Manager, holds, usage
from opsim_server import Object

if TYPE_CHECKING:
    from opsim_simulation import OperatorSimulation

CYCLE_SECONDS = 0.3  # of the manager
OVERDRAWN_SECONDS = 150.0  # for which there may be more pods than quota: of a worker that leaves, or saves its state


class SimQueue:
    """away: nobody admits or evicts."""

    def __init__(self, simulation: "OperatorSimulation", quota: int) -> None:
        self._simulation = simulation
        self.manager, self.away = Manager(quota), False
        self._competitors: set[str] = set()
        self._made = 0
        self._enough_at = 0.0  # when there were no more pods than quota

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(CYCLE_SECONDS)
            if not self.away:
                self._cycle()

    def _cycle(self) -> None:
        workloads, server, log = self._simulation.workloads, self._simulation.server, self.manager.log
        for changed in self.manager.step(list(workloads.objects.values()), self._simulation.loop.date()):
            thing = workloads.objects[changed["metadata"]["namespace"], changed["metadata"]["name"]]
            thing["status"] = changed["status"]
            server.modified("workloads", thing)
        while log:
            self._simulation.log(f"Kueue: {log.pop(0)}")

    # the job's Workloads

    def _of_job(self) -> list[Object]:
        found = self._simulation.workloads.objects.values()
        return [one for one in found if one["metadata"]["name"] not in self._competitors]

    def seats(self) -> int:
        """The pods that the job may have."""
        return sum(usage(one) for one in self._of_job() if not holds(one, "Evicted"))

    def judge(self) -> None:
        """The job may not keep more pods than it has quota for."""
        simulation = self._simulation
        living = [pod for pod in simulation.living_pods() if "deletionTimestamp" not in pod["metadata"]]
        quota, now = sum(map(usage, self._of_job())), simulation.loop.time()
        troubled = simulation.controller is None or simulation.server.trouble
        if len(living) <= quota or troubled or now < simulation.workers.reachable_at:
            self._enough_at = now
        if now - self._enough_at > OVERDRAWN_SECONDS:
            simulation.fail(f"{len(living)} pods with quota for {quota} for {OVERDRAWN_SECONDS:g} s")
        if (used := self.manager.used(simulation.workloads.objects.values())) > self.manager.quota:
            simulation.fail(f"quota for {used} pods is used, of {self.manager.quota}")

    def set_active(self, active: bool) -> None:
        for one in self._of_job():
            one["spec"]["active"] = active
            self._simulation.server.modified("workloads", one)

    def forget_job(self) -> None:
        for one in self._of_job():
            self._simulation.server.remove("workloads", one)

    # others

    def compete(self, pods: int) -> str:
        """More important pods want quota; the name of their Workload."""
        self._made += 1
        name = f"important-{self._made}"
        self._competitors.add(name)
        sets = [{"name": "main", "count": pods, "template": {}}]
        spec = {"queueName": "queue", "priority": 100, "podSets": sets}
        self._simulation.server.create("workloads", {"metadata": {"namespace": "other", "name": name}, "spec": spec})
        return name

    def withdraw(self, name: str) -> None:
        with contextlib.suppress(KeyError):
            self._simulation.server.remove("workloads", self._simulation.workloads.objects["other", name])

    def heal(self) -> None:
        self.away = False
        for name in self._competitors:
            self.withdraw(name)
        self.set_active(True)
