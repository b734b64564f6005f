"""Workers in pods: the real engines of the protocol's simulation, connected to the operator's gateway."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from bamboo_core.control import protocol
from bamboo_core.control.protocol import ChannelClosed, Message, Received, WorkerJoined
from bamboo_core.control.server import Authenticate, Unauthorized, Unavailable
from bamboo_core.coordinator.events import Event
from bamboo_core.names import ENV_WORKER, EXIT_FENCED, TRAINER_CONTAINER
from bamboo_core.planning.plan import Cell, WorkerId
from bamboo_operator.auth.worker_gateway import WorkerGateway
from bamboo_operator.kube.objects import JobKey, job_of
from bamboo_trainer.frames import Frame
from opsim_loop import LoopClock, VirtualLoop
from opsim_server import Object, token_of
from sim_arithmetic import Oracle
from sim_checks import Checks
from sim_control import Channel
from sim_network import Network
from sim_store import SimStore
from sim_worker import Node


def request_of(pod: Object) -> Any:
    """Return a stand-in for the HTTP request with which a pod's worker connects."""
    namespace, name = job_of(pod) or ("", "")
    headers = {"Authorization": f"Bearer {token_of(pod)}"}
    return SimpleNamespace(headers=headers, match_info={"namespace": namespace, "name": name})


class SimChannels:
    """A stand-in for bamboo_core.control.server.Channels without sockets."""

    def __init__(self, on_event: Callable[[Any], None], authenticate: Authenticate) -> None:
        self._on_event, self._authenticate = on_event, authenticate
        self._channels: dict[WorkerId, Channel] = {}
        self.closed = False

    async def admit(self, pod: Object) -> None:
        """Authenticate a pod's worker. Raises Unauthorized if it may not connect, Unavailable if it may try again."""
        assert await self._authenticate(request_of(pod)) == pod["metadata"]["name"]

    def hear(self, channel: Channel, event: Event) -> None:
        if self.closed:
            return
        if isinstance(event, WorkerJoined):
            self._channels[channel.worker] = channel
        if isinstance(event, ChannelClosed):
            self._channels.pop(channel.worker, None)
        self._on_event(event)

    def send(self, worker: WorkerId, message: Message) -> None:
        if channel := self._channels.get(worker):
            channel.send(message)

    @property
    def connected(self) -> frozenset[WorkerId]:
        return frozenset(self._channels)

    async def close(self) -> None:
        self.closed = True
        for channel in self._channels.values():
            channel.restarted(0.05)
        self._channels.clear()


class DoorChannel(Channel):
    """A channel that authenticates before it connects. knock: returns whether the worker may connect now."""

    def __init__(self, knock: Callable[[], Awaitable[bool]], **others: Any) -> None:
        self._knock, self._knocking = knock, None
        super().__init__(**others)

    _knocking: "asyncio.Task[None] | None"

    def connect(self) -> None:
        if self.up or self.ended or (self._knocking and not self._knocking.done()):
            return
        if self.frozen or self.clock.now < self.reachable_at:
            super().connect()  # which comes again
            return
        self._knocking = asyncio.get_running_loop().create_task(self._try())

    async def _try(self) -> None:
        if await self._knock():
            super().connect()
        elif not self.ended:
            self.clock.after(self.rng.uniform(0.05, 2.0), self.connect)


class Workers:
    """The workers of one job.

    checks: invariants of their reports. slowdown: a factor on the time of all work but layers. work: relative work of
    each layer. broken: called with the text of an exception that the product raised.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        rng: random.Random,
        oracle: Oracle,
        job: JobKey,
        slowdown: float,
        work: tuple[float, ...],
        broken: Callable[[str], None],
    ) -> None:
        self.clock: Any = LoopClock(loop)
        self.rng, self.oracle, self.slowdown = rng, oracle, slowdown
        self.network = Network(self.clock, rng, 1.0)
        self.store, self.work = SimStore(self.clock, oracle, rng), work
        self.copy_seconds, self.devices = 0.0, 1
        self.history: dict[str, bytes] | None = None  # there is no history
        self.checks = Checks(oracle)
        self.gateway: WorkerGateway | None = None  # of the operator, while there is one
        self.nodes: dict[str, Node] = {}  # by pod uid
        self.reachable_at = 0.0  # the operator, from the workers
        self.lossy = rng.random() < 0.5
        self._job, self._broken = job, broken
        self._ended: dict[Node, Callable[[int | None], None]] = {}

    def start(self, pod: Object, ended: Callable[[int | None], None]) -> Node:
        """Start the worker of a pod. ended: called with its exit code; None: it is lost with its node."""
        name = pod["metadata"]["name"]
        container = next(c for c in pod["spec"]["containers"] if c["name"] == TRAINER_CONTAINER)
        env = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert ENV_WORKER in env
        costs = (1.0,) * self.oracle.arithmetic.layers
        node = Node(self, name, partial(self._channel, pod), costs, 0.0)
        node.speed *= self.slowdown
        self.nodes[pod["metadata"]["uid"]] = node
        self._ended[node] = ended
        self.clock.after(self.rng.uniform(0.5, 4.0), node.channel.connect)  # it imports torch
        return node

    def _channel(self, pod: Object, node: Node) -> Channel:
        entered: list[SimChannels] = []  # the last one is the one that it is in

        async def knock() -> bool:
            channels: Any = self.gateway.channels_for(self._job, request_of(pod)) if self.gateway else None
            if channels is None or self.clock.now < self.reachable_at:
                return False
            try:
                await channels.admit(pod)
            except Unavailable:
                return False
            except Unauthorized:
                node.end(EXIT_FENCED)
                return False
            entered.append(channels)
            return not channels.closed

        def to_coordinator(event: Event) -> None:
            if isinstance(event, Received) and isinstance(event.message, protocol.StepCommitted):
                self.checks.committed(event.worker, event.message)
            entered[-1].hear(node.channel, event)

        return DoorChannel(
            knock,
            clock=self.clock,
            rng=self.rng,
            worker=node.name,
            to_coordinator=to_coordinator,
            to_worker=node.put,
            lossy=self.lossy,
            heartbeat=node.heartbeat,
            hello=lambda: protocol.Hello(
                worker=node.name, host="memory", port=1, plan=node.engine.reported_plan if node.engine else None
            ),
        )

    # what a Node asks of its surroundings

    def struck(self, node: Node, what: str, cell: Cell, step: int, microbatch: int) -> bool:
        return False

    def sending(self, node: Node, peer: str, frame: Frame) -> bool:
        return False

    def turned(self, node: Node) -> None:
        """Do nothing: only the protocol's simulation checks each turn."""

    def ended(self, node: Node, code: int | None) -> None:
        self._ended[node](code)

    def broken(self, node: Node, error: Exception) -> None:
        self._broken(f"{node.name} raised {type(error).__name__}: {error}")
