"""The simulated network, with the behaviour of the TCP transport: a simplex link per sender, receiver and lane.

A link keeps order; links are independent. A new link keeps frames until it stands or fails; a broken link drops them.
Frames are copied only when they arrive, so a write to a tensor on its way changes what arrives. When a sender dies, a
random number of its frames on their way still arrive.
"""

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from bamboo_core.planning.plan import WorkerId
from bamboo_trainer.frames import Frame
from bamboo_trainer.transport.base import Arrived, Deliver, LinkDown, LinkUp
from bamboo_trainer.transport.links import LinkStates
from bamboo_trainer.transport.wire import Lane, lane_of
from memory_transport import travelled
from sim_clock import Clock

PLAN_SECONDS = 5.0  # how long an acceptor waits for the plan that names the caller
NOTICED_SECONDS = 0.03  # until a broken link is noticed, at most, with slowness 1
Key = tuple[WorkerId, WorkerId, Lane]


@dataclass(slots=True, eq=False)
class Link:
    """A simplex link for one lane, from one simulated worker to another."""

    key: Key
    latency: float
    jitter: float
    # forming (keeps frames), standing, void (broken, not noticed yet), broken (drops frames), closed
    state: str = "forming"
    queue: deque[Frame] = field(default_factory=deque)
    flying: deque[Frame] = field(default_factory=deque)
    connection: int = 0  # grows when one breaks while its sender lives: what it carried is lost
    latest: float = 0.0  # nothing arrives before that
    since: float = 0.0  # of the attempt to form it
    failures: int = 0


class End:
    """A worker's transport. on_send: called before each frame; it may raise, which kills the worker in the middle of
    its work.
    """

    def __init__(
        self, network: "Network", worker: WorkerId, deliver: Deliver, on_send: Callable[[WorkerId, Frame], None]
    ) -> None:
        self.network, self.worker, self.deliver, self.on_send = network, worker, deliver, on_send
        self.known: frozenset[WorkerId] = frozenset()
        self.inbound: dict[tuple[WorkerId, Lane], tuple[Link, int]] = {}
        self.outbound: dict[tuple[WorkerId, Lane], Link] = {}
        self.waiting: list[Link] = []
        self.standing_in, self.standing_out = LinkStates(), LinkStates()
        self.frozen = False

    def send(self, peer: WorkerId, frame: Frame) -> None:
        """Send a frame; see `Transport`."""
        self.on_send(peer, frame)
        if peer in self.known:
            self.network.send(self, peer, frame)

    def is_sending(self, peer: WorkerId, lane: Lane) -> bool:
        """Return whether frames to the worker on this lane wait or are on their way; see `Transport`."""
        link = self.outbound.get((peer, lane))
        return link is not None and bool(link.queue or link.flying)

    def peers(self, peers: Mapping[WorkerId, tuple[str, int]]) -> None:
        """Close the links to and from all workers but these; see `Transport`."""
        self.network.fence(self, frozenset(peers))

    def close(self, flush_seconds: float) -> None:
        """Leave the network; see `Transport`."""
        self.network.leave(self, flush=flush_seconds > 0)


class Network:
    """All links between workers. slowness: a factor on latencies, and on the time until a broken link is noticed."""

    def __init__(self, clock: Clock, rng: random.Random, slowness: float) -> None:
        self.clock, self.rng, self.slowness = clock, rng, slowness
        self.ends: dict[WorkerId, End] = {}
        self.cuts: dict[Key, float] = {}  # until when

    def attach(self, worker: WorkerId, deliver: Deliver, on_send: Callable[[WorkerId, Frame], None]) -> End:
        end = self.ends[worker] = End(self, worker, deliver, on_send)
        return end

    # sending

    def send(self, end: End, peer: WorkerId, frame: Frame) -> None:
        lane = lane_of(frame.address)
        link = end.outbound.get((peer, lane))
        if link is None:
            latency = self.slowness * 10 ** self.rng.uniform(-4, -2)
            link = Link((end.worker, peer, lane), latency, latency * self.rng.choice((0.0, 1.0, 10.0)))
            end.outbound[(peer, lane)] = link
            link.since = self.clock.now
            self.clock.after(latency, partial(self._attempt, link))
        if link.state == "forming":
            link.queue.append(frame)
        elif link.state == "standing":
            self._transmit(link, frame)

    def _transmit(self, link: Link, frame: Frame) -> None:
        delay = link.latency + self.rng.random() * link.jitter
        link.latest = max(link.latest, self.clock.now + delay)
        link.flying.append(frame)
        self.clock.at(link.latest, partial(self._arrive, link, link.connection))

    def _arrive(self, link: Link, connection: int) -> None:
        if connection != link.connection or not link.flying:
            return
        frame = link.flying.popleft()
        sender, receiver, lane = link.key
        end = self.ends.get(receiver)
        if end and end.inbound.get((sender, lane)) == (link, connection):
            end.deliver(Arrived(sender, travelled(frame)))

    # forming

    def _attempt(self, link: Link) -> None:
        if link.state not in ("forming", "broken"):
            return
        sender, receiver, _ = link.key
        end, now = self.ends.get(receiver), self.clock.now
        if end is None or self.cuts.get(link.key, 0.0) > now or now - link.since > PLAN_SECONDS:
            self._failed(link)
        elif end.frozen or sender not in end.known:
            if link not in end.waiting:
                end.waiting.append(link)
                self.clock.at(link.since + PLAN_SECONDS + 1e-6, partial(self._give_up, link, link.since))
        else:
            self._form(link, end)

    def _give_up(self, link: Link, since: float) -> None:
        end = self.ends.get(link.key[1])
        if link.since == since and (end is None or link in end.waiting):
            if end:
                end.waiting.remove(link)
            self._attempt(link)

    def _failed(self, link: Link) -> None:
        link.state, link.failures = "broken", link.failures + 1
        link.queue.clear()
        self._report_out(link, broke=True)
        self._later(link, min(1.0, 0.05 * 2**link.failures))

    def _later(self, link: Link, seconds: float) -> None:
        def again() -> None:
            link.since = self.clock.now
            self._attempt(link)

        self.clock.after(seconds, again)

    def _form(self, link: Link, end: End) -> None:
        sender, _, lane = link.key
        link.failures = 0
        if (sender, lane) in end.inbound:  # only the sender has noticed that the older one is broken
            end.standing_in.broke(sender, lane)
        end.inbound[(sender, lane)] = (link, link.connection)
        if end.standing_in.stands(sender, lane):
            end.deliver(LinkUp(sender))
        state, link.state = link.state, "standing"
        if state == "broken":
            self._report_out(link, broke=False)
        while link.queue:
            self._transmit(link, link.queue.popleft())

    def _report_out(self, link: Link, *, broke: bool) -> None:
        sender, receiver, lane = link.key
        end = self.ends.get(sender)
        if end is None or end.outbound.get((receiver, lane)) is not link:
            return
        due = (end.standing_out.broke if broke else end.standing_out.stands)(receiver, lane)
        if due:
            end.deliver(LinkDown(receiver) if broke else LinkUp(receiver))

    # breaking

    def _break(self, link: Link, seen: tuple[float, float], kept: int | None = None) -> None:
        """Break a standing link. seen: seconds until sender and receiver notice. kept: if the sender has closed the
        link, the number of frames on their way that still arrive; None: the link broke, and all of them are lost.
        """
        if link.state != "standing":
            return
        connection, link.state = link.connection, "void"
        if kept is None:
            link.connection += 1
            link.flying.clear()
            self.clock.after(seen[0], partial(self._sender_notices, link))
        else:
            while len(link.flying) > kept:
                link.flying.pop()
        latest = max(self.clock.now, link.latest) if link.flying else self.clock.now
        self.clock.at(latest + seen[1], partial(self._receiver_notices, link, connection))

    def _sender_notices(self, link: Link) -> None:
        if link.state == "void":
            self._failed(link)

    def _receiver_notices(self, link: Link, connection: int) -> None:
        sender, receiver, lane = link.key
        end = self.ends.get(receiver)
        if end and end.inbound.get((sender, lane)) == (link, connection):
            del end.inbound[(sender, lane)]
            if end.standing_in.broke(sender, lane):
                end.deliver(LinkDown(sender))

    def _soon(self) -> float:
        return self.rng.random() * NOTICED_SECONDS * self.slowness

    def fence(self, end: End, peers: frozenset[WorkerId]) -> None:
        gone, end.known = end.known - peers, peers
        for key in [key for key in end.outbound if key[0] in gone]:
            link = end.outbound.pop(key)
            self._break(link, (0.0, self._soon()), kept=0)
            link.state = "closed"
        for key in [key for key in end.inbound if key[0] in gone]:
            link, connection = end.inbound.pop(key)
            if link.connection == connection:
                self._break(link, (self._soon(), 0.0))
        for peer in gone:
            end.standing_in.forget(peer)
            end.standing_out.forget(peer)
        self._admit(end)

    def _admit(self, end: End) -> None:
        waiting, end.waiting = end.waiting, []
        for link in waiting:
            self._attempt(link)

    # faults

    def leave(self, end: End, *, flush: bool, silent: float = 0.0) -> None:
        """Remove a worker. flush: all its frames on their way still arrive; otherwise a random number of them. silent:
        seconds until other workers see broken links.
        """
        if self.ends.pop(end.worker, None) is None:
            return
        for link in end.outbound.values():
            kept = len(link.flying) if flush else self.rng.randint(0, len(link.flying))
            self._break(link, (0.0, silent + self._soon()), kept)
            link.state = "closed"
        for link, connection in end.inbound.values():
            if link.connection == connection:
                self._break(link, (silent + self._soon(), 0.0))
        for link in end.waiting:
            self._attempt(link)

    def cut(self, sender: WorkerId, receiver: WorkerId, lanes: tuple[Lane, ...], seconds: float) -> None:
        """Break these lanes' links from sender to receiver, with all frames lost. Allow no new links for `seconds`."""
        for lane in lanes:
            self.cuts[(sender, receiver, lane)] = self.clock.now + seconds
            end = self.ends.get(sender)
            link = end.outbound.get((receiver, lane)) if end else None
            if link:
                self._break(link, (self._soon(), self._soon()))

    def stall(self, sender: WorkerId, receiver: WorkerId, seconds: float) -> None:
        """Hold back further frames on the existing links from sender to receiver for `seconds`; none is lost."""
        for (peer, _), link in self.ends[sender].outbound.items() if sender in self.ends else []:
            if peer == receiver:
                link.latest = max(link.latest, self.clock.now + seconds)

    def freeze(self, worker: WorkerId, frozen: bool) -> None:
        end = self.ends.get(worker)
        if end:
            end.frozen = frozen
            if not frozen:
                self._admit(end)
