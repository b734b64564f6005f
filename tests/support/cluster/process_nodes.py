"""The nodes of a cluster whose pods are processes of this machine, with their logs and volumes."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from cluster import storage
from cluster.api import Api
from cluster.control_plane import ControlPlane, free_ports
from cluster.kubelet import Kubelet
from cluster.logs import LogServer
from cluster.node import Node
from cluster.nodes import NodeSpec


class ProcessNodes:
    """Nodes whose pods are processes of this machine. subnet: 1 to 249, a different one for each test cluster."""

    def __init__(self, api: Api, folder: Path, plane: ControlPlane, subnet: int) -> None:
        self.api, self.folder, self.subnet = api, folder, subnet
        self.log_port = free_ports(1)[0]
        address, port = plane.address
        env = {"KUBERNETES_SERVICE_HOST": address, "KUBERNETES_SERVICE_PORT": str(port)}
        env["BAMBOO_DEVICE"] = "cpu"  # nodes only claim to have GPUs
        self.kubelet = Kubelet(api, folder, {**env, "KUBERNETES_SERVICE_PORT_HTTPS": str(port)})
        self.logs = LogServer(self.kubelet.log, self.kubelet.address, plane.pki.server, self.log_port)
        self._version = ""
        self._indexes = iter(range(1, 250))
        self._tasks: list[asyncio.Task[None]] = []
        self.commands: dict[str, Callable[..., Awaitable[Any]]] = {
            "fail": self.fail,
            "delete": self.delete,
            "signal": self.signal,
            "log": self.log,
        }

    async def open(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self.kubelet.close)
        await self.logs.open()
        stack.push_async_callback(self.logs.close)
        self._version = (await self.api.get("/version"))["gitVersion"]
        await storage.create_class(self.api)
        volumes = self.folder / "persistent-volumes"
        stack.callback(lambda: [task.cancel() for task in self._tasks])
        for work in (self.kubelet.run(), storage.provision(self.api, volumes)):
            self._tasks.append(asyncio.create_task(work))

    def trouble(self) -> str | None:
        return next((repr(task) for task in self._tasks if task.done()), None)

    def modes(self) -> dict[str, str]:
        return {name: str(node.mode) for name, node in self.kubelet.nodes.items()}

    async def add(self, specs: Sequence[NodeSpec]) -> None:
        for spec in specs:
            node = Node(self.api, spec, next(self._indexes), self.subnet, self.log_port, self._version)
            await self.logs.listen(node.address)
            await self.kubelet.add(node)

    async def fail(self, node: str) -> None:
        self.kubelet.fail(node)

    async def delete(self, node: str) -> None:
        await self.kubelet.delete(node)

    async def signal(self, namespace: str, pod: str, number: int) -> None:
        self.kubelet.signal(namespace, pod, number)

    async def log(self, namespace: str, pod: str) -> str:
        path = self.kubelet.log(namespace, pod)
        return path.read_text(errors="replace") if path else ""
