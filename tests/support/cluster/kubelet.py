"""A kubelet for all fake nodes together, which can also fail and delete nodes."""

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from cluster import pod_runner
from cluster.api import Api, Json
from cluster.node import Mode, Node
from cluster.pod_runner import Place, PodRunner
from cluster.preloaded import Preloaded

logger = logging.getLogger(__name__)

PODS = "/api/v1/pods"


class Kubelet:
    """The kubelet of all fake nodes. folder: for volumes and logs. env: variables of every container."""

    def __init__(self, api: Api, folder: Path, env: Mapping[str, str]) -> None:
        self.api, self.folder, self.env = api, folder, dict(env)
        self.preloaded = Preloaded(folder / "preloaded")
        self.nodes: dict[str, Node] = {}
        self.runners: dict[str, PodRunner] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._beats: dict[str, asyncio.Task[None]] = {}
        self._helpers: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        async for kind, pods in self.api.watch(PODS, fieldSelector="spec.nodeName!="):
            if kind == "LIST":
                self._forget_all_but(pods)
            for pod in pods:
                if kind == "DELETED":
                    self._forget(pod["metadata"]["uid"])
                else:
                    self._sync(pod)

    async def add(self, node: Node) -> None:
        self.nodes[node.spec.name] = node  # pods may be bound to it before register() is through
        try:
            await node.register()
        except BaseException:
            del self.nodes[node.spec.name]
            raise
        self._beats[node.spec.name] = self._task(node.beat())

    async def close(self) -> None:
        for runner in self.runners.values():
            runner.kill()
        for task in (*self._lives.values(), *self._beats.values(), *self._helpers):
            task.cancel()
        await asyncio.gather(*self._lives.values(), *self._beats.values(), *self._helpers, return_exceptions=True)

    def log(self, namespace: str, pod: str, container: str | None = None) -> Path | None:
        """Return the log file of the newest pod with this name, or None. container: by default the first by name."""
        folders = (self.folder / "logs").glob(f"{namespace}_{pod}_*")
        newest = max(folders, key=lambda folder: folder.stat().st_mtime, default=None)
        files = sorted(newest.glob(f"{container or '*'}.log")) if newest else []
        return files[0] if files else None

    def address(self, namespace: str, pod: str) -> str | None:
        """Return the address of a pod on these nodes, running or ended; None if they have no such pod."""
        for runner in self.runners.values():
            meta = runner.pod["metadata"]
            if (meta["namespace"], meta["name"]) == (namespace, pod):
                return runner.place.pod_ip
        return None

    # What can be done to a node.

    def node(self, name: str) -> Node:
        if name not in self.nodes:
            raise ValueError(f"there is no node {name}; there are {', '.join(sorted(self.nodes))}")
        return self.nodes[name]

    def fail(self, name: str) -> None:
        """Simulate a power cut of a machine: kill its pods' processes and stop its heartbeats, without notice."""
        node = self.node(name)
        if node.mode is Mode.FAILED:
            return
        node.mode = Mode.FAILED
        self._beats.pop(name).cancel()
        uids = [uid for uid, runner in self.runners.items() if runner.pod["spec"]["nodeName"] == name]
        for uid in uids:
            self.runners[uid].kill()
        for uid in uids:
            self._forget(uid)

    async def delete(self, name: str) -> None:
        """Delete a machine and its Node object, as when a cloud takes a spot node."""
        self.fail(name)
        node = self.nodes.pop(name)
        await self.api.request("DELETE", node.path)

    def signal(self, namespace: str, pod: str, number: int) -> None:
        """Send a signal to a pod's processes. Raises ValueError if no such pod is on these nodes."""
        for runner in self.runners.values():
            meta = runner.pod["metadata"]
            if (meta["namespace"], meta["name"]) == (namespace, pod):
                for child in runner.children.values():
                    child.signal_group(number)
                return
        raise ValueError(f"no pod {namespace}/{pod} runs here")

    # Pods come and go.

    def _sync(self, pod: Json) -> None:
        node, uid = self.nodes.get(pod["spec"]["nodeName"]), pod["metadata"]["uid"]
        if node is None or node.mode is not Mode.UP:
            return
        runner = self.runners.get(uid)
        leaving = "deletionTimestamp" in pod["metadata"]
        if runner is not None and not runner.over:
            runner.update(pod)
        elif leaving:
            self._help(pod_runner.remove(self.api, pod))
        elif runner is None and pod["status"].get("phase") == "Pending":  # pods in other phases ran before a failure
            self._start(node, pod)

    def _start(self, node: Node, pod: Json) -> None:
        meta = pod["metadata"]
        place = Place(pod_ip=node.next_address(), host_ip=node.address, env=self.env, preloaded=self.preloaded)
        logs = self.folder / "logs" / f"{meta['namespace']}_{meta['name']}_{meta['uid']}"
        runner = PodRunner(self.api, pod, place, self.folder / "pods" / meta["uid"], logs)
        self.runners[meta["uid"]] = runner
        self._lives[meta["uid"]] = self._task(runner.run())

    def _forget_all_but(self, pods: list[Json]) -> None:
        for uid in self.runners.keys() - {pod["metadata"]["uid"] for pod in pods}:
            self._forget(uid)

    def _forget(self, uid: str) -> None:
        """Kill a pod's processes and forget the pod, if it runs on one of these nodes."""
        if runner := self.runners.pop(uid, None):
            runner.kill()
            self._lives.pop(uid).cancel()

    def _help(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._task(work)
        self._helpers.add(task)
        task.add_done_callback(self._helpers.discard)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(_told)
        return task


def _told(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        logger.error("a task of the kubelet failed", exc_info=error)
