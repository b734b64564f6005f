"""A cluster's real nodes, each with containerd and a kubelet, and the cluster's network."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from cluster import children, image_archive, services
from cluster.addresses import NODES
from cluster.api import Api, ApiError, Json
from cluster.control_plane import ControlPlane
from cluster.name_server import NameServer
from cluster.node import Mode
from cluster.nodes import NodeSpec
from cluster.real_node import PAUSE_IMAGE, Programs, RealNode
from cluster.switch import Switch

logger = logging.getLogger(__name__)

READY_SECONDS = 180
POLL_SECONDS = 0.1
TOGETHER_SECONDS = 0.05  # changes within it become rules together
WATCHED = ("services", "endpoints")
PAUSE = ("/bin/sh", "-c", "trap exit TERM INT; while :; do sleep 3600 & wait $!; done")


class RealNodes:
    """The real nodes of a cluster. folder: the cluster's. images: archives that every node imports when it boots."""

    def __init__(
        self, api: Api, folder: Path, plane: ControlPlane, programs: Programs, switch: Switch, images: Sequence[Path]
    ) -> None:
        self.api, self.folder, self.plane, self.programs, self.switch = api, folder, plane, programs, switch
        self.nodes: dict[str, RealNode] = {}
        self.images = [*images]
        self._names = NameServer()
        self._known: dict[str, dict[str, Json]] = {}
        self._changed = asyncio.Event()
        self._rules: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.commands: dict[str, Callable[..., Awaitable[Any]]] = {
            "fail": self.fail,
            "delete": self.delete,
            "log": self.log,
        }

    async def open(self, stack: AsyncExitStack) -> None:
        busybox = self.programs.root / "bin" / "busybox"
        pause = self.folder / "pause.tar"
        await asyncio.to_thread(image_archive.write, pause, [PAUSE_IMAGE], busybox, PAUSE)
        self.images.insert(0, pause)
        await self._names.open(self.switch.addresses.machine)
        stack.callback(self._names.close)
        stack.push_async_callback(self._close)
        work = [*map(self._follow, WATCHED), self._keep_rules()]
        self._tasks += [asyncio.create_task(each) for each in work]

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for node in self.nodes.values():
            if node.mode is not Mode.FAILED and not node.has_ended():
                await node.cut_power()

    def trouble(self) -> str | None:
        """Return a text about a node or task that has ended though it never should; None if none has."""
        if ended := next((repr(task) for task in self._tasks if task.done()), None):
            return ended
        nodes = (name for name, node in self.nodes.items() if node.has_ended())
        return next((f"the node {name} has ended by itself" for name in nodes), None)

    def modes(self) -> dict[str, str]:
        return {name: str(node.mode) for name, node in self.nodes.items()}

    # What can be done to a node.

    async def add(self, specs: Sequence[NodeSpec]) -> None:
        """Boot nodes side by side, and wait until they are ready."""
        new = []
        for spec in specs:
            node = RealNode(spec, self._free_number(), self.folder / "nodes", self.programs, self.switch)
            await asyncio.to_thread(node.install, self.plane.pki, self.plane.server, self.images)
            self.nodes[spec.name] = node
            await node.boot()
            new.append(node)
        for node in new:
            await self._until_ready(node)

    def _free_number(self) -> int:
        taken = {node.number for node in self.nodes.values()}
        free = (number for number in NODES if number not in taken)
        if (number := next(free, None)) is None:
            raise ValueError(f"a cluster has at most {len(NODES)} real nodes")
        return number

    def node(self, name: str) -> RealNode:
        if name not in self.nodes:
            raise ValueError(f"there is no node {name}; there are {', '.join(sorted(self.nodes))}")
        return self.nodes[name]

    async def fail(self, node: str) -> None:
        found = self.node(node)
        if found.mode is not Mode.FAILED:
            found.mode = Mode.FAILED
            self._rules.pop(node, None)
            await found.cut_power()

    async def delete(self, node: str) -> None:
        found = self.node(node)
        await self.fail(node)
        del self.nodes[node]
        await asyncio.to_thread(found.discard)
        await self.api.request("DELETE", f"/api/v1/nodes/{node}")

    async def log(self, namespace: str, pod: str) -> str:
        """Return the part of a pod's log that the kubelet still has; "" if the pod is gone."""
        try:
            return await self.api.text("GET", f"/api/v1/namespaces/{namespace}/pods/{pod}/log")
        except ApiError as error:
            if error.code != 404:
                raise
            return ""

    async def _until_ready(self, node: RealNode) -> None:
        """Wait until the node is Ready. Raises RuntimeError if it ends first, TimeoutError after READY_SECONDS."""
        path = f"/api/v1/nodes/{node.spec.name}"
        async with asyncio.timeout(READY_SECONDS):
            while not _is_ready(await self.api.find(path) or {}):
                if node.has_ended():
                    said = children.tail(node.folder / "init.log")
                    raise RuntimeError(f"the node {node.spec.name} has ended:\n{said}")
                await asyncio.sleep(POLL_SECONDS)

    # What a cluster's network does.

    async def _follow(self, kind: str) -> None:
        known: dict[str, Json] = {}
        async for event, things in self.api.watch(f"/api/v1/{kind}"):
            if event == "LIST":
                known.clear()
            for thing in things:
                if event == "DELETED":
                    known.pop(thing["metadata"]["uid"], None)
                else:
                    known[thing["metadata"]["uid"]] = thing
            self._known[kind] = known
            self._changed.set()

    async def _keep_rules(self) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(TOGETHER_SECONDS)
            self._changed.clear()
            if len(self._known) < len(WATCHED):
                continue
            served, endpoints = ([*self._known[kind].values()] for kind in WATCHED)
            self._names.names = services.names(served, endpoints)
            rules = f"{services.rules(served, endpoints)}\n"
            for name, node in [*self.nodes.items()]:
                if node.mode is not Mode.FAILED and self._rules.get(name) != rules:
                    await self._filter(name, node, rules)

    async def _filter(self, name: str, node: RealNode, rules: str) -> None:
        try:
            await node.filter(rules)
            self._rules[name] = rules
        except RuntimeError as error:  # its power may have been cut just now
            logger.warning("rules of %s: %s", name, error)
            with contextlib.suppress(KeyError):
                del self._rules[name]
            asyncio.get_running_loop().call_later(1, self._changed.set)


def _is_ready(node: Json) -> bool:
    conditions = node.get("status", {}).get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
