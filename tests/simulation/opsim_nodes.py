"""The nodes of a simulated cluster: a scheduler that makes one for each pod, kubelets, and losses of nodes."""

import random
from collections.abc import Callable
from typing import Any, Protocol

from bamboo_core.names import LABEL_NODE_POOL, TRAINER_CONTAINER
from opsim_loop import VirtualLoop
from opsim_scenario import CRASHING, MISSING
from opsim_server import Object, Server, Watch

GRACE_SECONDS = 30.0
MANY = 1 << 20
ZONE = "topology.kubernetes.io/zone"
TAINT = {"key": "aws-node-termination-handler/spot-itn", "value": "", "effect": "NoSchedule"}


class Process(Protocol):
    """A worker's process. Its exit code is negative after a signal, and None if its node was lost."""

    alive: bool

    def term(self) -> None: ...
    def end(self, code: int | None, silent: float = 0.0) -> None: ...
    def freeze(self, frozen: bool) -> None: ...


class Nodes:
    """The scheduler and all kubelets.

    start: starts a pod's worker process. full: names of pools without free nodes. room: the most nodes in use at once.
    """

    def __init__(
        self, loop: VirtualLoop, rng: random.Random, server: Server, nodes: Watch, start: Callable[[Object], Process]
    ) -> None:
        self._loop, self._rng, self._server, self._nodes, self._start = loop, rng, server, nodes, start
        self.processes: dict[str, Process] = {}  # by the pod's uid
        self._pods: dict[str, Object] = {}
        self._gated: set[str] = set()  # uids of pods that are not to be scheduled yet
        self._told: set[str] = set()  # uids of pods whose end has begun
        self._dead: set[str] = set()  # names of nodes that run nothing any more
        self._made = 0
        self.full: set[str] = set()
        self.room = MANY

    # notifications by the API server

    def created(self, pod: Object) -> None:
        self._pods[pod["metadata"]["uid"]] = pod
        if pod["spec"].get("schedulingGates"):
            self._gated.add(pod["metadata"]["uid"])
        else:
            self._soon(0.05, 1.0, self._schedule, pod)

    def modified(self, pod: Object) -> None:
        """Schedule a pod whose last gate is gone, and terminate a pod whose deletion was requested."""
        if pod["metadata"]["uid"] in self._gated and not pod["spec"].get("schedulingGates"):
            self._gated.discard(pod["metadata"]["uid"])
            self._soon(0.05, 1.0, self._schedule, pod)
        if "deletionTimestamp" in pod["metadata"] and pod["metadata"]["uid"] not in self._told:
            self._told.add(pod["metadata"]["uid"])
            self._soon(0.0, 0.3, self._terminate, pod)

    def deleted(self, pod: Object) -> None:
        """Kill the process of a deleted pod, even if its kubelet has not seen the request to delete it."""
        self._pods.pop(pod["metadata"]["uid"], None)
        self._soon(0.0, 2.0, self._kill, pod["metadata"]["uid"])

    # scheduling

    def _there(self, pod: Object) -> bool:
        return pod["metadata"]["uid"] in self._pods

    def _taken(self) -> int:
        """Return the number of nodes with a pod that has not ended."""
        ended = ("Succeeded", "Failed")
        return sum("nodeName" in p["spec"] and p["status"].get("phase") not in ended for p in self._pods.values())

    def _schedule(self, pod: Object) -> None:
        if not self._there(pod) or pod["spec"].get("nodeName") or "deletionTimestamp" in pod["metadata"]:
            return
        pool = pod["metadata"]["labels"].get(LABEL_NODE_POOL, "")
        if pool in self.full or self._taken() >= self.room:
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node"}
            if pod["status"].get("conditions") != [condition]:
                pod["status"]["conditions"] = [condition]
                self._server.modified("pods", pod)
            self._soon(1.0, 2.0, self._schedule, pod)
            return
        self._made += 1
        zone = f"zone-{self._made % 3}"
        body = {"metadata": {"name": f"node-{self._made}", "labels": {ZONE: zone}}, "spec": {}, "status": {}}
        node = self._server.create("nodes", body)
        pod["spec"]["nodeName"] = node["metadata"]["name"]
        pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
        self._server.modified("pods", pod)
        self._soon(0.1, 1.5, self._run, pod)

    def _run(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        if not self._there(pod) or "deletionTimestamp" in pod["metadata"] or not self._works(pod):
            return
        stamp = self._loop.date().strftime("%Y-%m-%dT%H:%M:%SZ")
        image = pod["spec"]["containers"][0]["image"]
        if image.startswith(MISSING):
            self._container(pod, {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}, "Pending")
            return
        if image.startswith(CRASHING):
            self._container(pod, {"terminated": {"exitCode": 1, "finishedAt": stamp, "reason": "Error"}}, "Failed")
            return
        self._container(pod, {"running": {"startedAt": stamp}}, "Running")
        self.processes[uid] = self._start(pod)

    # the end

    def ended(self, pod: Object, code: int | None) -> None:
        """Report the end of a pod's process to the API server, if its node works. code: None counts as SIGKILL."""
        if self._works(pod):
            exit_code = 137 if code is None else code if code >= 0 else 128 - code
            self._soon(0.0, 0.5, self._report, pod, exit_code)

    def _report(self, pod: Object, code: int) -> None:
        if not self._there(pod) or not self._works(pod):
            return
        if "deletionTimestamp" in pod["metadata"]:
            self._server.remove("pods", pod)
            return
        stamp = self._loop.date().strftime("%Y-%m-%dT%H:%M:%SZ")
        terminated = {"exitCode": code, "finishedAt": stamp, "reason": "Error" if code else "Completed"}
        self._container(pod, {"terminated": terminated}, "Failed" if code else "Succeeded")

    def _container(self, pod: Object, state: Object, phase: str) -> None:
        pod["status"] |= {"phase": phase, "containerStatuses": [{"name": TRAINER_CONTAINER, "state": state}]}
        self._server.modified("pods", pod)

    def _terminate(self, pod: Object) -> None:
        process = self.processes.get(pod["metadata"]["uid"])
        if not self._there(pod) or not self._works(pod):
            return
        if process is None or not process.alive:
            self._server.remove("pods", pod)
            return
        process.term()
        self._loop.call_later(GRACE_SECONDS, process.end, -9)

    def _kill(self, uid: str) -> None:
        process = self.processes.get(uid)
        if process is not None:
            process.end(-9)

    # nodes

    def _node(self, pod: Object) -> Object | None:
        return self._nodes.objects.get(("", pod["spec"].get("nodeName") or ""))

    def _works(self, pod: Object) -> bool:
        """Return whether the pod's node exists and its kubelet works."""
        return self._node(pod) is not None and pod["spec"]["nodeName"] not in self._dead

    def take(self, pod: Object, seconds: float, stays: bool) -> None:
        """Taint the pod's node, and remove the taint (`stays`) or the node after `seconds`. Ignore a tainted node."""
        node = self._node(pod)
        if node is None or node["spec"].get("taints"):
            return
        node["spec"]["taints"] = [TAINT]
        self._server.modified("nodes", node)
        self._loop.call_later(seconds, self._unmark if stays else self.vanish, node if stays else pod)

    def _unmark(self, node: Object) -> None:
        node["spec"]["taints"] = []
        self._server.modified("nodes", node)

    def _stop(self, pod: Object) -> Object | None:
        """Stop everything on the pod's node and return the node; None if the pod has no working node."""
        node = self._node(pod)
        if node is None or not self._works(pod):
            return None
        self._dead.add(node["metadata"]["name"])
        if process := self.processes.get(pod["metadata"]["uid"]):
            process.end(None, silent=self._rng.uniform(0.0, 5.0))
        return node

    def vanish(self, pod: Object) -> None:
        """Take a pod's node away with everything on it. The node and pod objects are removed later, in any order."""
        if (node := self._stop(pod)) is None:
            return
        self._soon(0.0, 40.0, self._server.remove, "nodes", node)
        self._soon(0.0, 60.0, self._server.remove, "pods", pod)

    def hang(self, pod: Object, seconds: float) -> None:
        """Stop the pod's node without deleting it. After `seconds` delete the pod, which then stays Terminating."""
        if self._stop(pod) is None:
            return
        self._loop.call_later(seconds, self._delete, pod)

    def _delete(self, pod: Object) -> None:
        if self._there(pod):
            self._server.delete("pods", pod)

    def _soon(self, least: float, most: float, act: Callable[..., Any], *arguments: Any) -> None:
        self._loop.call_later(self._rng.uniform(least, most), act, *arguments)
