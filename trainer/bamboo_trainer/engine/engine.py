"""The engine: obeys plans, runs what is ready, keeps replicas in step, and goes on when a neighbour is gone.

One thread owns all of it. `handle(event)` takes in what happened (a frame, a broken link), `obey` a plan, `turn()` does
at most one piece of work and says whether there was any. Nothing here blocks, reads a clock that was not injected, or
raises because of a peer: the protocol simulator drives the very same class.
"""

import logging
from collections import deque

from bamboo.control.protocol import PeerUp, Report
from bamboo.metrics.histogram import STEP_SECONDS, Histogram
from bamboo.planning.plan import Plan
from bamboo_trainer.engine.components import Components, Ports, Received
from bamboo_trainer.engine.memory_account import MemoryMeter
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.transport.base import Arrived, Event, LinkDown, LinkUp
from bamboo_trainer.transport.payloads import RefusedFrame, read

logger = logging.getLogger(__name__)


class Engine:
    """One worker's part in the job. meter: of its memory."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self.meter = MemoryMeter()
        self.components: Components | None = None  # until the first plan
        self._received: deque[Received] = deque()  # frames that are to be taken in, those of this worker to itself, too

    # what happened

    def handle(self, event: Event) -> None:
        """Take in what the transport tells."""
        match event:
            case Arrived(sender, frame):
                if self.components is None or self.components.plan.accepts(sender, frame.epoch):
                    self._received.append((sender, frame))
            case LinkDown(peer) if self.components:
                self.components.on_link_down(peer)
            case LinkUp(peer):
                self._ports.tell(PeerUp(peer=peer))
                if self.components:
                    self.components.on_link_up(peer)
        self._take_in()

    def obey(self, plan: Plan, arrived: float | None = None) -> None:
        """A plan came from the coordinator. arrived: when, if it had to wait for an instruction to end."""
        when = self._ports.clock() if arrived is None else arrived
        if self.components is None:
            self.components = Components(self._ports, plan, self.meter, self._received)
            self.components.on_plan(plan, None, when)
        elif now := self.components.plan.offer(plan):
            self.components.on_plan(now, self.components.plan.current, when)
        self._take_in()

    def turn(self) -> bool:
        """Do the most urgent piece of work; False if there is none."""
        if self.components is None:
            return False
        busy = self.components.turn()
        self._take_in()
        return busy

    def _take_in(self) -> None:
        """Frames are taken in one after the other, and nowhere else, so nothing is interrupted by one.

        A frame may arrive more than once. What is not as its kind must be is told, and dropped.
        """
        while self.components and self._received:
            sender, frame = self._received.popleft()
            try:
                self.components.on_frame(sender, read(frame))
            except RefusedFrame as error:
                logger.warning("refused a %s of %s: %s", frame.address.kind.name, sender, error)

    # what others ask

    def report(self) -> None:
        """Say everything that the coordinator has to know: it may have been restarted, or messages may be lost."""
        if self.components is None:
            self._ports.tell(Report(committed=-1, held={}))  # who asks waits for every answer
        else:
            self.components.report()

    def trained(self, index: int) -> Stage | None:
        """The stage in its final state, if it is here."""
        stage = self.components.states.here(index) if self.components else None
        return stage if stage and stage.version >= self._ports.steps else None

    @property
    def newest_plan(self) -> Plan | None:
        """The newest plan that this worker knows, in force or not."""
        return self.components.plan.newest if self.components else None

    @property
    def step(self) -> int:
        """The step in progress, for heartbeats."""
        return self.components.step if self.components else 0

    @property
    def step_seconds(self) -> Histogram:
        """Of the steps that this worker has committed as the root."""
        return self.components.committer.step_seconds if self.components else Histogram(STEP_SECONDS)

    def held(self) -> list[bool]:
        """For each stage that is held here: is it run here? Any thread may ask."""
        return [state.owned for state in tuple(self.components.states.by_stage.values())] if self.components else []

    def waits_for(self) -> str:
        """Why there is no work right now, for a person."""
        return self.components.executor.waits_for() if self.components else "a part"
