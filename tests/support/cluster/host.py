"""The process behind a test cluster: `python -m cluster.host FOLDER` owns every other process, and ends them all.

FOLDER/config.json is its configuration. One line on standard output reports the start: {"ready": seconds} or {"error":
"..."}. Then the process accepts commands at the socket FOLDER/control, one line of JSON for each connection.
"""

import asyncio
import json
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

from cluster import addresses, build, children
from cluster.api import MERGE, Api, ApiError, Json
from cluster.control_plane import ControlPlane
from cluster.node import Mode
from cluster.nodes import NodeSpec
from cluster.process_nodes import ProcessNodes
from cluster.real_node import Programs
from cluster.real_nodes import RealNodes
from cluster.switch import Switch

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2


class Nodes(Protocol):
    """The nodes of a cluster: `ProcessNodes` or `RealNodes`. commands: the operations on a node or pod, by name."""

    commands: dict[str, Callable[..., Awaitable[Any]]]

    async def open(self, stack: AsyncExitStack) -> None: ...

    async def add(self, specs: Sequence[NodeSpec]) -> None: ...

    def modes(self) -> dict[str, str]:
        """Return the `Mode` of each node, by name."""
        ...

    def trouble(self) -> str | None:
        """Return a text about a node or task that has ended though it never should; None if none has."""
        ...


class Host:
    """The owner of a cluster's processes. nodes: already started. usual: the nodes that `restore` brings back."""

    def __init__(self, api: Api, plane: ControlPlane, nodes: Nodes, usual: Sequence[NodeSpec]) -> None:
        self.api, self.plane, self.nodes = api, plane, nodes
        self.usual = {spec.name: spec for spec in usual}
        self.commands: dict[str, Callable[..., Awaitable[Any]]] = {
            **nodes.commands,
            "add": self.add,
            "restore": self.restore,
            "status": self.status,
            "take_down": self.plane.take_down,
            "bring_up": self.plane.bring_up,
        }

    async def complain(self) -> None:
        """Wait until there is trouble (see `trouble`), and log it with the last lines of the components' logs."""
        while not self.trouble():
            await asyncio.sleep(POLL_SECONDS)
        logger.error("%s\n%s", self.trouble(), self.plane.tails())

    def trouble(self) -> str | None:
        """Return a text about a component, node or task that has ended though it never should; None if none has."""
        if name := self.plane.fallen():
            return f"{name} has ended"
        return self.nodes.trouble()

    async def add(self, spec: Json) -> None:
        await self.nodes.add([NodeSpec.of(spec)])

    async def restore(self) -> None:
        """Restore the usual nodes, all up and with only their own taints, and delete other nodes."""
        modes = self.nodes.modes()
        for name, mode in modes.items():
            if name not in self.usual or mode != Mode.UP:
                await self.commands["delete"](name)
        await self.nodes.add([spec for name, spec in self.usual.items() if modes.get(name) != Mode.UP])
        for name, spec in self.usual.items():
            taints = [dict(taint) for taint in spec.taints]
            body = {"spec": {"taints": taints, "unschedulable": None}}
            await self.api.request("PATCH", f"/api/v1/nodes/{name}", body, content=MERGE)

    async def status(self) -> Json:
        pids = {name: child.pid for name, child in self.plane.children.items()}
        return {"processes": {"host": os.getpid(), **pids}, "nodes": self.nodes.modes(), "trouble": self.trouble()}

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read one command from a connection, run it, and write its result or error."""
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


def own_subnet(routes: Sequence[str] = ()) -> tuple[int, socket.socket]:
    """Claim a subnet, 1 to 249: no other test cluster on this machine gets it until the returned socket is closed.

    routes: destinations that 10.SUBNET.0.0/16 must not overlap. Raises RuntimeError if no subnet is free.
    """
    free = [number for number in range(1, 250) if addresses.is_free(number, routes)]
    for number in random.sample(free, len(free)):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0bamboo-cluster-{number}")
        except OSError:
            claim.close()
            continue
        return number, claim
    raise RuntimeError("this machine has 249 test clusters, and no addresses for another one")


def known_routes() -> list[str]:
    said = subprocess.run(["ip", "-json", "-4", "route"], check=True, capture_output=True, text=True).stdout
    return [route["dst"] for route in json.loads(said)]


async def serve(folder: Path, config: Json, subnet: int) -> None:
    """Run a cluster until SIGTERM or SIGINT, or the end of its owner if it has one."""
    started, ended = time.monotonic(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with AsyncExitStack() as stack:
        watching = asyncio.create_task(_watch_owner(config["owner"], ended))
        stack.callback(watching.cancel)
        starting = _start(stack, folder, config, subnet)
        if (host := await _unless(ended, starting)) is None:
            return
        server = await asyncio.start_unix_server(host.answer, folder / "control")
        stack.callback(server.close)
        complaining = asyncio.create_task(host.complain())
        stack.callback(complaining.cancel)
        _tell({"ready": round(time.monotonic() - started, 2)})
        await ended.wait()


async def _start(stack: AsyncExitStack, folder: Path, config: Json, subnet: int) -> Host:
    usual = [NodeSpec.of(spec) for spec in config["nodes"]]
    programs = Path(config["programs"])
    nodes: Nodes
    if config["real"] is None:
        plane = ControlPlane(folder, programs)
        stack.push_async_callback(plane.stop)
        await plane.start()
        api = await stack.enter_async_context(Api(plane.kubeconfig("kubelet")))
        nodes = ProcessNodes(api, folder, plane, subnet)
    else:
        switch = Switch(addresses.Addresses(subnet), folder)
        await switch.open()
        stack.push_async_callback(switch.close)
        plane = ControlPlane(folder, programs, switch.addresses.machine)
        stack.push_async_callback(plane.stop)
        await plane.start()
        api = await stack.enter_async_context(Api(plane.kubeconfig("admin")))
        kubelet, root = Path(config["real"]["kubelet"]), Path(config["real"]["root"])
        minor = await asyncio.to_thread(build.minor_version, kubelet)
        images = [Path(archive) for archive in config["real"]["archives"]]
        nodes = RealNodes(api, folder, plane, Programs(kubelet=kubelet, root=root, minor=minor), switch, images)
    await nodes.open(stack)
    await nodes.add(usual)
    return Host(api, plane, nodes, usual)


async def _unless(ended: asyncio.Event, work: Awaitable[Host]) -> Host | None:
    """Return the result of the work. If `ended` is set first, cancel the work and return None."""
    task, end = asyncio.ensure_future(work), asyncio.ensure_future(ended.wait())
    await asyncio.wait((task, end), return_when=asyncio.FIRST_COMPLETED)
    end.cancel()
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None
    return await task


async def _watch_owner(owner: int | None, ended: asyncio.Event) -> None:
    while owner is None or os.getppid() == owner:
        await asyncio.sleep(POLL_SECONDS)
    ended.set()


def _tell(line: Json) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    folder = Path(sys.argv[1])
    config: Json = json.loads((folder / "config.json").read_text())
    logging.basicConfig(
        filename=folder / "host.log", level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    children.adopt_orphans()
    real = config["real"] is not None
    subnet, claim = own_subnet(known_routes() if real else ())
    janitor = start_janitor(folder, subnet) if real else None
    try:
        asyncio.run(serve(folder, config, subnet))
    except Exception as error:
        logger.exception("the test cluster ended")
        _tell({"error": str(error) or repr(error)})
    finally:
        children.kill_descendants(spared=janitor and janitor.pid)
        if janitor:
            janitor.communicate()
        shutil.rmtree(folder, ignore_errors=True)
        claim.close()


def start_janitor(folder: Path, subnet: int) -> "subprocess.Popen[bytes]":
    """Start the process that cleans up after real nodes, even if this process is killed."""
    argv = [sys.executable, "-m", "cluster.janitor", str(folder), addresses.Addresses(subnet).groups]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


if __name__ == "__main__":
    main()
