"""The control channel of one simulated worker, with the behaviour of `bamboo_core.control.client` and `.server`.

Messages keep their order. While the channel is cut, the worker keeps its messages, and the coordinator drops its own as
soon as it has noticed the cut. Messages on their way by then are lost if the channel is `lossy`; otherwise they arrive.
"""

import random
from collections import deque
from collections.abc import Callable
from functools import partial

from bamboo_core.control.protocol import ChannelClosed, Heartbeat, Hello, Message, Received, WorkerJoined
from bamboo_core.coordinator.events import Event
from bamboo_core.names import HEARTBEAT_SECONDS
from bamboo_core.planning.plan import WorkerId
from sim_clock import Clock

BACKOFF_SECONDS = (0.05, 2.0)


class Channel:
    """Both ends of the channel between a worker and the coordinator. hello, heartbeat: return the worker's messages.
    up: whether the worker's end is connected. open: whether the coordinator's end is connected.
    """

    def __init__(
        self,
        clock: Clock,
        rng: random.Random,
        worker: WorkerId,
        *,
        to_coordinator: Callable[[Event], None],
        to_worker: Callable[[Message], None],
        hello: Callable[[], Hello],
        heartbeat: Callable[[], Heartbeat],
        lossy: bool,
    ) -> None:
        self.clock, self.rng, self.worker, self.lossy = clock, rng, worker, lossy
        self.to_coordinator, self.to_worker, self.hello, self.heartbeat = to_coordinator, to_worker, hello, heartbeat
        self.delay = 10 ** rng.uniform(-4, -1.5)
        self.outbox: deque[Message] = deque()
        self.up = self.open = self.ended = self.frozen = False
        self.connection = self.opened = 0  # the worker's, and the one that the coordinator serves
        self.lost = 0  # connections up to this one carry nothing any more
        self.reachable_at = 0.0
        self.latest_out = self.latest_in = 0.0
        self._beat()

    # the worker's end

    def tell(self, message: Message) -> None:
        self.outbox.append(message)
        self._write()

    def connect(self) -> None:
        if self.up or self.ended:
            return
        if self.frozen or self.clock.now < self.reachable_at:
            wait = max(self.reachable_at - self.clock.now, 0.01)
            self.clock.after(wait + self.rng.uniform(0.0, BACKOFF_SECONDS[1]) * 0.2, self.connect)
            return
        self.up = True
        self.connection += 1
        self._transmit(WorkerJoined(self.hello()), self.connection)
        self._write()

    def _write(self) -> None:
        while self.up and not self.frozen and self.outbox:
            self._transmit(Received(self.worker, self.outbox.popleft()), self.connection)

    def _beat(self) -> None:
        if self.ended:
            return
        if self.up and not self.frozen:
            self._transmit(Received(self.worker, self.heartbeat()), self.connection)
        self.clock.after(HEARTBEAT_SECONDS, self._beat)

    # on the way

    def _transmit(self, event: Event, connection: int) -> None:
        delay = self.delay * self.rng.uniform(1.0, 3.0)
        self.latest_out = max(self.latest_out, self.clock.now + delay)
        self.clock.at(self.latest_out, partial(self._arrive, event, connection))

    def _arrive(self, event: Event, connection: int) -> None:
        if connection <= self.lost:
            return
        if isinstance(event, WorkerJoined):
            self.open, self.opened = True, connection
        elif connection != self.opened or not self.open:
            return
        self.to_coordinator(event)

    def _deliver(self, message: Message, connection: int) -> None:
        if self.ended or connection <= self.lost:
            return
        self.to_worker(message)

    # the coordinator's end

    def send(self, message: Message) -> None:
        """Send a message to the worker, or drop it if the coordinator's end is not connected."""
        if self.open:
            delay = self.delay * self.rng.uniform(1.0, 3.0)
            self.latest_in = max(self.latest_in, self.clock.now + delay)
            self.clock.at(self.latest_in, partial(self._deliver, message, self.opened))

    def _noticed(self, connection: int) -> None:
        if self.open and self.opened == connection:
            self.open = False
            self.to_coordinator(ChannelClosed(self.worker))

    # faults

    def cut(self, seconds: float, noticed: float) -> None:
        """Cut the channel for `seconds`. noticed: seconds until the coordinator notices, unless the worker reconnects
        earlier.
        """
        self.reachable_at = max(self.reachable_at, self.clock.now + seconds)
        if not self.up:
            return
        self.up = False
        connection = self.connection
        if self.lossy:
            self.lost = connection  # messages on their way are lost
        self.clock.at(max(self.latest_out, self.clock.now) + noticed, partial(self._noticed, connection))
        self.clock.after(self.rng.uniform(*BACKOFF_SECONDS) * 0.2, self.connect)

    def die(self, noticed: float, flush: bool) -> None:
        """End the channel, as its worker ends. flush: a connected worker's messages arrive; else they may be lost."""
        if self.ended:
            return
        if flush:
            self._write()
        connection = self.connection if self.up else self.opened
        self.ended, self.up = True, False
        if not flush and self.rng.random() < 0.5:
            self.lost = connection  # messages on their way are lost
        self.clock.at(max(self.latest_out, self.clock.now) + noticed, partial(self._noticed, connection))

    def freeze(self, frozen: bool) -> None:
        self.frozen = frozen
        self._write()

    def restarted(self, seconds: float) -> None:
        """Drop the connection, as the coordinator's process has ended. The worker can reconnect after `seconds`."""
        self.open = False
        self.lost = self.connection
        self.cut(seconds, 0.0)
