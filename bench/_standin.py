"""A worker without a model, which sends a training worker's messages over a real control channel, at the same rates."""

import asyncio
import random
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp

from bamboo_core.control.codec import decode_from_coordinator, encode
from bamboo_core.control.memory import Memory
from bamboo_core.control.protocol import (
    Bye,
    Heartbeat,
    Hello,
    Message,
    PlanApplied,
    Profile,
    ProfileRequest,
    Refused,
    ReplicaSynced,
    Report,
    ReportRequest,
    SendPlan,
    StepCommitted,
    Stop,
    TakenOver,
    Welcome,
    WorkerReady,
)
from bamboo_core.names import HEARTBEAT_SECONDS
from bamboo_core.planning.plan import ROOT, Cell, Plan, WorkerId

FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS = 0.05, 2.0  # as a worker's
PINGS = 5.0  # as a worker's
MEMORY_EVERY = 5  # heartbeats between memory reports
LONG_FRAME = 500  # bytes from which a frame may hold a plan
REMEMBERED = 64  # frames of a job
MEMORY = Memory(peak=7 << 30, limit=16 << 30)


class SharedEar:
    """A decoder that decodes each long frame once for all workers of a job. Otherwise a thousand workers in this
    process would delay each other; real workers each have a machine.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str | bytes, Message] = OrderedDict()

    def heard(self, frame: str | bytes) -> Message:
        if len(frame) < LONG_FRAME:
            return decode_from_coordinator(frame)
        if frame not in self._known:
            self._known[frame] = decode_from_coordinator(frame)
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return self._known[frame]


@dataclass(eq=False, slots=True)
class Play:
    """The state of one job that its stand-in workers share."""

    name: str
    step_seconds: float
    microbatches: int
    layers: int
    workers: dict[WorkerId, "Standin"] = field(default_factory=dict)  # with a channel
    plan: Plan | None = None  # the newest that any of them received
    plan_at: float = 0.0
    step: int = 0
    # when each worker received each epoch's plan (monotonic clock)
    heard: dict[int, dict[WorkerId, float]] = field(default_factory=dict)
    cuts: int = 0  # channels that broke
    ear: SharedEar = field(default_factory=SharedEar)
    ended: list[str] = field(default_factory=list)  # reasons, other than a notice, for which workers were told to stop

    async def train(self) -> None:
        """Forever, every `step_seconds`, apply waiting plans and, if the root is connected, commit a step."""
        await asyncio.sleep(random.uniform(0, self.step_seconds))  # noqa: S311
        while True:
            await asyncio.sleep(self.step_seconds)
            if self.plan is None:
                continue
            for worker in list(self.workers.values()):
                worker.reach_boundary()
            root = self.workers.get(self.plan.at(ROOT).owner)
            if root is not None:
                root.say(self._commit(self.plan))
                self.step += 1

    def _commit(self, plan: Plan) -> StepCommitted:
        return StepCommitted(
            step=self.step,
            generation=plan.target.generation,
            loss=5 / (1 + self.step),
            gradient_norm=1.0,
            microbatches=self.microbatches,
            seconds=self.step_seconds if self.step else 0.0,
        )

    def received(self, worker: WorkerId, plan: Plan, now: float) -> None:
        self.heard.setdefault(plan.epoch, {})[worker] = now
        self.plan_at = now
        if self.plan is None or plan.epoch > self.plan.epoch:
            self.plan = plan

    def calm(self, size: int, seconds: float) -> bool:
        """Return whether the last plan came at least `seconds` ago and its `size` workers are connected and obey it."""
        if self.plan is None or time.monotonic() - self.plan_at < seconds:
            return False
        whole = self.plan.worker_ids() == self.workers.keys() and len(self.workers) == size
        return whole and all(worker.epoch == self.plan.epoch for worker in self.workers.values())


class Standin:
    """A worker without a model. run() calls `token` per connection, and returns after a Stop or a refusal."""

    def __init__(self, play: Play, name: WorkerId, node: str, address: str, url: str, tls: ssl.SSLContext) -> None:
        self.play, self.name, self.node, self.epoch = play, name, node, 0
        self._tls = tls
        self._address, self._url = address, url
        self._plan: Plan | None = None
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._over = self._heard = False

    def say(self, message: Message) -> None:
        self._outbox.put_nowait(message)

    async def run(self, session: aiohttp.ClientSession, token: Callable[[], str]) -> None:
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            self._heard = False
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                await self._connect(session, token())
            self.play.workers.pop(self.name, None)
            if self._over:
                return
            self.play.cuts += self._heard
            backoff = FIRST_BACKOFF_SECONDS if self._heard else min(2 * backoff, LAST_BACKOFF_SECONDS)
            await asyncio.sleep(backoff)

    async def _connect(self, session: aiohttp.ClientSession, token: str) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        async with session.ws_connect(self._url, headers=headers, heartbeat=PINGS, ssl=self._tls) as socket:
            hello = Hello(worker=self.name, host=self._address, port=7000, plan=self._plan)
            await socket.send_str(encode(hello).decode())
            parts = [asyncio.create_task(part) for part in (self._write(socket), self._beat(socket))]
            try:
                async for frame in socket:
                    if frame.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                        return  # a ping was not answered in time
                    now, message = time.monotonic(), self.play.ear.heard(frame.data)
                    self._obey(message, now)
                    if self._over:
                        await socket.send_str(encode(Bye()).decode())
                        return
            finally:
                for part in parts:
                    part.cancel()
                await asyncio.gather(*parts, return_exceptions=True)

    async def _write(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            await socket.send_str(encode(await self._outbox.get()).decode())

    async def _beat(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        count = 0
        await asyncio.sleep(random.uniform(0, HEARTBEAT_SECONDS))  # noqa: S311
        while True:
            memory = MEMORY if count % MEMORY_EVERY == 0 else None
            beat = Heartbeat(step=self.play.step, doing="runs its schedule", memory=memory)
            await socket.send_str(encode(beat).decode())
            count += 1
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def _obey(self, message: Message, now: float) -> None:
        self._heard = True
        match message:
            case Welcome():
                self.play.workers[self.name] = self
                self.say(WorkerReady())
                if self._plan is not None:
                    self._apply(self._plan)
            case ProfileRequest():
                self.say(Profile(costs=(1.0,) * self.play.layers))
            case ReportRequest():
                held = {c.stage: self.play.step for c in self._plan.cells()} if self._plan else {}
                self.say(Report(committed=self.play.step - 1, held=held))
            case SendPlan(plan=plan):
                self.play.received(self.name, plan, now)
                old, self._plan = self._plan, plan
                if not plan.boundary or old is None:
                    self._apply(plan, old)
            case Stop(reason=reason) | Refused(reason=reason):
                if reason != "Drained":
                    self.play.ended.append(f"{self.name}: {reason}")
                self._over = True
                self.play.workers.pop(self.name, None)

    def reach_boundary(self) -> None:
        if self._plan is not None and self.epoch < self._plan.epoch:
            self._apply(self._plan)

    def _apply(self, plan: Plan, old: Plan | None = None) -> None:
        """Apply a plan; report replicas of this worker's cells as in sync and, with `old`, new cells as taken over."""
        self.epoch = plan.epoch
        self.say(PlanApplied(epoch=plan.epoch))
        for cell in plan.owned_by(self.name):
            for replica in plan.at(cell).replicas:
                self.say(ReplicaSynced(cell=cell, replica=replica))
            if old is not None and old.at(cell).owner != self.name:
                self.say(self._taken_over(plan, cell))

    def _taken_over(self, plan: Plan, cell: Cell) -> TakenOver:
        return TakenOver(
            epoch=plan.epoch,
            cell=cell,
            step=self.play.step,
            reform_ms=1.0,
            recompute_ms=1.0,
            forwards=0,
            backwards=0,
        )
