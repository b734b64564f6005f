"""The world in which journeys are recorded: the real operator before an API server in its process, and real workers.

Workers are processes of their own, which come in by the operator's port and send each other tensors over TCP; what the
API server, the scheduler and the kubelets do is played by the parts of the operator's simulation, in real time.
"""

import asyncio
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it

from bamboo_core.kube.api import KubeApi
from bamboo_core.names import ENV_COORDINATOR, TRAINER_CONTAINER
from bamboo_operator.auth.pod_tokens import TokenReviewer
from bamboo_operator.auth.worker_gateway import WorkerGateway
from bamboo_operator.cluster.indices import ClusterIndices
from bamboo_operator.jobs.controller import JobController
from bamboo_operator.jobs.shared import SharedResources
from bamboo_operator.manifests.worker_pod import WorkerPodSettings
from bamboo_operator.watch_handlers import watch_handlers
from bamboo_trainer.worker.process import main as run_worker
from opsim_kopf import KopfEvents
from opsim_nodes import Nodes
from opsim_server import Object, Server, Watch, token_of
from recorder import Recorder, Seen, Wanted

OPERATOR = "operator"
SECONDS = 150.0  # for the whole course, and for what is waited for after it


class Prompt(random.Random):
    """Chance that lets everything happen as soon as it may."""

    def uniform(self, a: float, b: float) -> float:
        return min(a, b) + 0.01


class RealLoop(asyncio.SelectorEventLoop):
    """A loop that can also say which date it is, as those of the simulation can."""

    def date(self) -> datetime:
        return datetime.now(UTC)


def work(channel: Connection, wanted: Wanted) -> None:
    """A worker's process, from when it is told who it is; in the end it sends what it has seen."""
    torch.set_num_threads(1)
    name, url, token, os.environ["BAMBOO_DEVICE"] = channel.recv()
    with Recorder(name, wanted) as recorder:
        code = run_worker(name, url, token)
    channel.send((code, recorder.seen))
    sys.stdout.flush()
    os._exit(0)


class WorkerProcess:
    """A worker's process, as kubelets see it."""

    alive = True

    def __init__(self, channel: Connection, process: Any) -> None:
        self.channel, self.process = channel, process

    def term(self) -> None:
        os.kill(self.process.pid, signal.SIGTERM)

    def end(self, code: int | None, silent: float = 0.0) -> None:
        os.kill(self.process.pid, signal.SIGKILL)

    def freeze(self, frozen: bool) -> None:
        raise NotImplementedError("nothing freezes workers here")


class World:
    """A cluster with an operator. wanted: what is recorded in it. workers: how many there may be in all; they are
    forked from this process before it has any thread.
    """

    def __init__(self, wanted: Wanted, workers: int) -> None:
        context = multiprocessing.get_context("fork")
        self._spare: list[WorkerProcess] = []
        for _ in range(workers):
            mine, others = context.Pipe()
            process = context.Process(target=work, args=(others, wanted), daemon=True)
            process.start()
            others.close()
            self._spare.append(WorkerProcess(mine, process))
        self._all = list(self._spare)
        self.loop: Any = RealLoop()
        rng = Prompt(0)
        self.watches = {
            kind: Watch(self.loop, rng, partial(self._show, kind)) for kind in ("pods", "nodes", "bamboojobs")
        }
        self.server = Server(self.loop, rng, self.watches, self._changed)
        self.kubelets = Nodes(self.loop, rng, self.server, self.watches["nodes"], self._start)
        self.device = "cpu"  # of workers that begin from now on, as BAMBOO_DEVICE has it
        self.seen: list[Seen] = []
        self._recorder = Recorder(OPERATOR, wanted)
        self._ending: list[threading.Thread] = []

    def run(self, course: Callable[["World"], Any]) -> list[Seen]:
        """Everything that was seen while that happened, in order."""
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(self._run(course))
            for one in self._ending:
                one.join(SECONDS)
        finally:
            for one in self._all:
                one.process.kill()
                one.process.join()
        return sorted([*self.seen, *self._recorder.seen], key=lambda seen: seen.at)

    async def _run(self, course: Callable[["World"], Any]) -> None:
        gateway, api = WorkerGateway(), KubeApi(self.server)
        port = await gateway.start("127.0.0.1", 0)
        shared = SharedResources(
            cluster=ClusterIndices(),
            gateway=gateway,
            api=api,
            reviews=TokenReviewer(api),
            key=b"k" * 16,
            url=f"ws://127.0.0.1:{port}",
            settings=WorkerPodSettings(coordinator_url="", image="trainer"),
        )
        self.controller = JobController(shared)
        self._events = KopfEvents(watch_handlers(self.controller, shared), shared.cluster)
        for watch in self.watches.values():
            watch.listening = True
        with self._recorder:
            try:
                await asyncio.wait_for(course(self), SECONDS)
            finally:
                await self.controller.stop()
                await gateway.stop()

    def _show(self, kind: str, change: str | None, thing: Object) -> None:
        self._events.show(kind, change, thing)

    def _changed(self, what: str, thing: Object) -> None:
        match what:
            case "pods ADDED":
                self.kubelets.created(thing)
            case "pods MODIFIED":
                self.kubelets.modified(thing)
            case "pods DELETED":
                self.kubelets.deleted(thing)
            case "bamboojobs DELETED":
                for pod in list(self.watches["pods"].objects.values()):
                    ended = pod["status"]["phase"] in ("Succeeded", "Failed")
                    (self.server.remove if ended else self.server.delete)("pods", pod)

    def _start(self, pod: Object) -> WorkerProcess:
        process = self._spare.pop(0)
        container = next(c for c in pod["spec"]["containers"] if c["name"] == TRAINER_CONTAINER)
        env = {variable["name"]: variable.get("value") for variable in container["env"]}
        process.channel.send((pod["metadata"]["name"], env[ENV_COORDINATOR], token_of(pod), self.device))
        waiting = threading.Thread(target=self._await_end, args=(pod, process), daemon=True)
        self._ending.append(waiting)
        waiting.start()
        return process

    def _await_end(self, pod: Object, process: WorkerProcess) -> None:
        try:
            code, seen = process.channel.recv()
        except EOFError:
            return
        self.seen += seen
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.kubelets.ended, pod, code)

    # what happens

    def create(self, document: Mapping[str, Any]) -> Object:
        return self.server.create("bamboojobs", {**document, "status": {}})

    def edit(self, job: Object, change: Callable[[Object], None]) -> None:
        change(job["spec"])
        job["metadata"]["generation"] += 1
        self.server.modified("bamboojobs", job)

    def taint(self, worker: str) -> None:
        """The cloud says that the worker's node will be taken away."""
        self.kubelets.take(self.watches["pods"].objects[("default", worker)], SECONDS, True)

    async def delete(self, job: Object) -> None:
        """Until all of its pods are gone."""
        self.server.remove("bamboojobs", job)
        await self.until(lambda: not self.watches["pods"].objects)

    def runner(self, name: str) -> Any:
        return next((job.runner for job in self.controller.running() if job.key == ("default", name)), None)

    async def until(self, what: Callable[[], object]) -> None:
        while not what():
            await asyncio.sleep(0.02)
