"""A Kueue queue in a simulated cluster, with its webhook and manager, and other workloads that want its quota."""

import asyncio
from typing import TYPE_CHECKING

from bamboo_core.kube.errors import ApiError
from kueue_manager import (
    FINALIZER,
    Admit,
    Finalize,
    Manager,
    Outsider,
    Stop,
    defaulted,
    holds_quota,
    waits,
    without_gates,
)
from opsim_server import Object

if TYPE_CHECKING:
    from opsim_simulation import OperatorSimulation

CYCLE_SECONDS = 0.3  # of the manager
CLASSES = {"needed": 10, "growth": 1}


class SimQueue:
    """A Kueue queue. quota: in pods. away: whether Kueue is down: new pods are then refused, and none is admitted."""

    def __init__(self, simulation: "OperatorSimulation", quota: int) -> None:
        self._simulation = simulation
        self.manager, self.away = Manager(quota, CLASSES), False
        self._made = 0

    async def run(self) -> None:
        """Run the manager's cycles until cancelled."""
        while True:
            await asyncio.sleep(CYCLE_SECONDS)
            if not self.away:
                self._cycle()

    def admit(self, pod: Object) -> Object:
        """Return a new pod as Kueue's webhook changes it. Raises ApiError (500) while Kueue is down."""
        if self.away:
            raise ApiError(500, "InternalError", 'Internal error occurred: failed calling webhook "mpod.kb.io"')
        return defaulted(pod)

    def _cycle(self) -> None:
        server, pods = self._simulation.server, self._simulation.pods.objects
        for action in self.manager.step(list(pods.values())):
            metadata = action.pod["metadata"]
            pod = pods.get((metadata["namespace"], metadata["name"]))
            if pod is None:
                continue
            match action:
                case Finalize():
                    server.finalize(pod, FINALIZER)
                case Admit():
                    pod["spec"]["schedulingGates"] = without_gates(pod)
                    server.modified("pods", pod)
                case Stop():
                    conditions = pod["status"].get("conditions") or []
                    pod["status"]["conditions"] = [*conditions, action.condition(self._simulation.loop.date())]
                    server.modified("pods", pod)
                    server.delete("pods", pod)
        for line in self.manager.log:
            self._simulation.log(f"Kueue: {line}")
        self.manager.log.clear()

    def judge(self) -> None:
        """Fail the run if the quota is exceeded, or if more than one pipeline's pods plus one wait to grow the job."""
        simulation = self._simulation
        pods = simulation.living_pods()
        if (used := self.manager.used(pods)) > self.manager.quota:
            simulation.fail(f"quota for {used} pods is used, of {self.manager.quota}")
        growth = [
            pod
            for pod in pods
            if waits(pod) and pod["metadata"]["labels"].get("kueue.x-k8s.io/priority-class") == "growth"
        ]
        if len(growth) > simulation.scenario.arithmetic.stages + 1:
            simulation.fail(f"{len(growth)} pods wait to grow")

    def lacking(self) -> int:
        """Return the number of the job's pods without quota."""
        return sum(not holds_quota(pod) for pod in self._simulation.living_pods())

    def forget(self, pod: Object) -> None:
        """Delete a pod as Kueue does when the pod's Workload is deleted, even if the pod is gated."""
        stop = Stop(pod, "WorkloadDeleted", "Workload is deleted")
        pod["status"]["conditions"] = [
            *(pod["status"].get("conditions") or []),
            stop.condition(self._simulation.loop.date()),
        ]
        self._simulation.server.modified("pods", pod)
        self._simulation.server.delete("pods", pod)

    # others

    def compete(self, pods: int) -> str:
        """Add a workload of higher priority with `pods` pods, and return its name."""
        self._made += 1
        made = self._simulation.loop.date().strftime("%Y-%m-%dT%H:%M:%SZ")
        self.manager.outsiders[f"important-{self._made}"] = Outsider(pods=pods, priority=100, made=made)
        return f"important-{self._made}"

    def withdraw(self, name: str) -> None:
        self.manager.outsiders.pop(name, None)

    def heal(self) -> None:
        self.away = self.manager.stopped = False
        self.manager.outsiders.clear()
