"""The process behind a test cluster: `python -m cluster.host FOLDER` owns every other process, and ends them all.

FOLDER/config.json says what to start. One line on standard output tells how it went: {"ready": seconds} or
{"error": "..."}. Then commands come as lines of JSON through the socket FOLDER/control.
"""

import asyncio
import json
import logging
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from cluster import children, storage
from cluster.api import MERGE, Api, ApiError, Json
from cluster.control_plane import ControlPlane, free_ports
from cluster.kubelet import Kubelet
from cluster.logs import LogServer
from cluster.node import Node
from cluster.nodes import Image, NodeSpec

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2


class Host:
    def __init__(self, folder: Path, config: Json, plane: ControlPlane) -> None:
        self.folder, self.config, self.plane = folder, config, plane
        self.usual = {spec["name"]: NodeSpec.of(spec) for spec in config["nodes"]}
        self.subnet, self._claim = own_subnet()
        self.log_port = free_ports(1)[0]
        self.api: Api
        self.kubelet: Kubelet
        self.version: str
        self.logs: LogServer
        self._indexes = iter(range(1, 250))
        self._tasks: list[asyncio.Task[None]] = []
        self.commands: dict[str, Callable[..., Awaitable[Any]]] = {
            "add": self.add,
            "fail": self.fail,
            "partition": self.partition,
            "freeze": self.freeze,
            "recover": self.recover,
            "delete": self.delete,
            "restore": self.restore,
            "signal": self.signal,
            "log": self.log,
            "status": self.status,
            "take_down": self.take_down,
            "bring_up": self.bring_up,
        }

    async def open(self, stack: AsyncExitStack) -> None:
        self.api = await stack.enter_async_context(Api(self.plane.kubeconfig("kubelet")))
        images = {name: image and Image(**image) for name, image in self.config["images"].items()}
        address, port = self.plane.address
        env = {"KUBERNETES_SERVICE_HOST": address, "KUBERNETES_SERVICE_PORT": str(port)}
        self.kubelet = Kubelet(self.api, self.folder, images, {**env, "KUBERNETES_SERVICE_PORT_HTTPS": str(port)})
        stack.push_async_callback(self.kubelet.close)
        self.logs = LogServer(self.kubelet.log, self.kubelet.address, self.plane.pki.server, self.log_port)
        await self.logs.open()
        stack.push_async_callback(self.logs.close)
        self.version = (await self.api.get("/version"))["gitVersion"]
        await storage.create_class(self.api)
        for spec in self.config["nodes"]:
            await self.add(spec)
        volumes = self.folder / "persistent-volumes"
        for work in (self.kubelet.run(), storage.provision(self.api, volumes), storage.reclaim(self.api, volumes)):
            self._tasks.append(asyncio.create_task(work))
        stack.callback(lambda: [task.cancel() for task in self._tasks])
        stack.enter_context(self._claim)

    async def complain(self) -> None:
        """Logs trouble as soon as there is any."""
        while not self.trouble():
            await asyncio.sleep(POLL_SECONDS)
        logger.error("%s\n%s", self.trouble(), self.plane.tails())

    def trouble(self) -> str | None:
        """What has ended that should never end."""
        if name := self.plane.fallen():
            return f"{name} has ended"
        return next((repr(task) for task in self._tasks if task.done()), None)

    async def add(self, spec: Json) -> None:
        node = Node(self.api, NodeSpec.of(spec), next(self._indexes), self.subnet, self.log_port, self.version)
        await self.logs.listen(node.address)
        await self.kubelet.add(node)

    async def fail(self, node: str) -> None:
        self.kubelet.fail(node)

    async def partition(self, node: str) -> None:
        self.kubelet.partition(node)

    async def freeze(self, node: str) -> None:
        self.kubelet.freeze(node)

    async def recover(self, node: str) -> None:
        await self.kubelet.recover(node)

    async def delete(self, node: str) -> None:
        await self.kubelet.delete(node)

    async def signal(self, namespace: str, pod: str, number: int, reason: str | None, container: str | None) -> None:
        self.kubelet.signal(namespace, pod, number, reason, container)

    async def take_down(self, component: str) -> None:
        await self.plane.take_down(component)

    async def bring_up(self, component: str) -> None:
        await self.plane.bring_up(component)

    async def log(self, namespace: str, pod: str, container: str | None) -> str:
        path = self.kubelet.log(namespace, pod, container)
        return path.read_text(errors="replace") if path else ""

    async def restore(self) -> None:
        """The usual nodes, all up and with their own taints only; no others."""
        for name in set(self.kubelet.nodes) - set(self.usual):
            await self.kubelet.delete(name)
        for name, spec in self.usual.items():
            if name not in self.kubelet.nodes:
                await self.add(spec.to_json())
            elif self.kubelet.nodes[name].mode != "Up":
                await self.kubelet.recover(name)
            taints = [dict(taint) for taint in spec.taints]
            body = {"spec": {"taints": taints, "unschedulable": None}}
            await self.api.request("PATCH", f"/api/v1/nodes/{name}", body, content=MERGE)

    async def status(self) -> Json:
        pids = {name: child.pid for name, child in self.plane.children.items()}
        nodes = {name: str(node.mode) for name, node in self.kubelet.nodes.items()}
        return {"processes": {"host": os.getpid(), **pids}, "nodes": nodes, "trouble": self.trouble()}

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One command per connection."""
        try:
            call = json.loads(await reader.readline())
            answer = {"result": await self.commands[call.pop("call")](**call)}
        except (ApiError, ValueError) as error:
            answer = {"error": str(error)}
        except Exception as error:
            logger.exception("command failed")
            answer = {"error": repr(error)}
        writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()


def own_subnet() -> tuple[int, socket.socket]:
    """A number from 1 to 249 that no other test cluster on this machine has while the socket is open."""
    for number in random.sample(range(1, 250), 249):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0bamboo-cluster-{number}")
        except OSError:
            claim.close()
            continue
        return number, claim
    raise RuntimeError("this machine has 249 test clusters, and no addresses for another one")


async def serve(folder: Path) -> None:
    """Serves until SIGTERM or SIGINT, or the end of the owner if there is one."""
    config: Json = json.loads((folder / "config.json").read_text())
    started, ended = time.monotonic(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    plane = ControlPlane(folder, Path(config["programs"]))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(plane.stop)
        watching = asyncio.create_task(_watch_owner(config["owner"], ended))
        stack.callback(watching.cancel)
        host = Host(folder, config, plane)
        if not await _unless(ended, plane.start()) or not await _unless(ended, host.open(stack)):
            return
        server = await asyncio.start_unix_server(host.answer, folder / "control")
        stack.callback(server.close)
        complaining = asyncio.create_task(host.complain())
        stack.callback(complaining.cancel)
        _tell({"ready": round(time.monotonic() - started, 2)})
        await ended.wait()


async def _unless(ended: asyncio.Event, work: Awaitable[None]) -> bool:
    """False if the end came first."""
    task, end = asyncio.ensure_future(work), asyncio.ensure_future(ended.wait())
    await asyncio.wait((task, end), return_when=asyncio.FIRST_COMPLETED)
    end.cancel()
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False
    await task
    return True


async def _watch_owner(owner: int | None, ended: asyncio.Event) -> None:
    while owner is None or os.getppid() == owner:
        await asyncio.sleep(POLL_SECONDS)
    ended.set()


def _tell(line: Json) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    folder = Path(sys.argv[1])
    logging.basicConfig(
        filename=folder / "host.log", level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    children.adopt_orphans()
    try:
        asyncio.run(serve(folder))
    except Exception as error:
        logger.exception("the test cluster ended")
        _tell({"error": str(error) or repr(error)})
    finally:
        children.kill_descendants()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
