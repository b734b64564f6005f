"""Worker processes of a local run: starting, removing and killing them, and reporting their end."""

import asyncio
import signal
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from bamboo.local.fork_server import ForkServer, exit_detail
from bamboo_core.control.protocol import WorkerJoined
from bamboo_core.coordinator.events import Event, WorkerLost
from bamboo_core.names import EXIT_FENCED, EXIT_OK
from bamboo_core.planning.plan import WorkerId

ZONES = ("zone-a", "zone-b", "zone-c")
GRACE_SECONDS = 5.0  # from SIGTERM to SIGKILL


class LocalWorkers:
    """The worker processes of a local run.

    Each worker has a made-up node in a made-up zone, as on a cluster. A lost worker's place on a node stays empty.
    pool: the fork server, which the caller opens and closes. per_node: workers of a node, which are lost together.
    crashes: workers that crashed, and how.
    """

    def __init__(self, pool: ForkServer, per_node: int) -> None:
        self._pool, self._per_node = pool, per_node
        self._nodes: dict[WorkerId, int] = {}
        self._removed: set[WorkerId] = set()
        self._sent: defaultdict[WorkerId, set[int]] = defaultdict(set)  # signals
        self._kills: list[tuple[WorkerId, asyncio.TimerHandle]] = []
        self.crashes: list[str] = []

    @property
    def alive(self) -> Sequence[WorkerId]:
        return self._pool.alive

    def start(self, gate: Sequence[int], url: str, token: str, traces: Path | None) -> None:
        """Start a worker. Raises ForkServerError.

        gate: as in `ForkServer.start`. traces: the folder for the worker's trace; None for no trace.
        """
        number = len(self._nodes)
        worker, node = f"w{number}", number // self._per_node
        self._nodes[worker], zone = node, ZONES[node % len(ZONES)]
        trace = str(traces / f"{worker}.json") if traces else None
        self._pool.start(worker, gate, url=url, token=token, zone=zone, trace=trace)

    def remove(self, worker: WorkerId) -> None:
        """Ask a worker to leave, and kill it if it still runs after GRACE_SECONDS."""
        if worker not in self._removed:
            self._removed.add(worker)
            self._signal(worker, signal.SIGTERM)
            self.kill_after(GRACE_SECONDS, worker)

    def kill(self, worker: WorkerId) -> None:
        self._signal(worker, signal.SIGKILL)

    def kill_after(self, seconds: float, worker: WorkerId) -> None:
        """Kill the worker after `seconds` seconds, if it still runs."""
        self._kills.append((worker, asyncio.get_running_loop().call_later(seconds, self.kill, worker)))

    def spare(self, worker: WorkerId) -> None:
        """Cancel the pending kills of a worker."""
        for one, timer in self._kills:
            if one == worker:
                timer.cancel()

    def forget_kills(self) -> None:
        """Cancel all pending kills."""
        for _, timer in self._kills:
            timer.cancel()

    def ended(self, worker: WorkerId, code: int | None, *, taken: bool, over: bool) -> WorkerLost:
        """Return the event that reports a worker's end to the coordinator, and record a crash.

        An end is no crash if the job is over, the launcher ended, or this process sent the signal: then the event has
        no exit code, and is `removed` if `remove` was called. Other ends are crashes, except with EXIT_OK or
        EXIT_FENCED. code: exit code, negative for a signal; None if the launcher ended. over: the job ended before the
        worker. taken: the worker was preempted on purpose; then the event is not `removed`, since the coordinator may
        have removed the worker only because its link closed.
        """
        detail = exit_detail(code)
        if code is None or over or (code < 0 and -code in self._sent[worker]):
            return WorkerLost(worker, detail, removed=worker in self._removed and not taken)
        if code not in (EXIT_OK, EXIT_FENCED):
            self.crashes.append(f"{worker} {detail}")
        return WorkerLost(worker, detail, 128 - code if code < 0 else code)

    def lost_with(self, worker: WorkerId) -> Iterator[WorkerId]:
        """Return the other living workers on the worker's node."""
        mine = self._nodes.get(worker)
        return (one for one in self.alive if one != worker and self._nodes.get(one) == mine)

    def located(self, event: Event) -> Event:
        """Return a WorkerJoined event with the worker's node added ("" if nodes have one worker), others unchanged."""
        if not isinstance(event, WorkerJoined) or event.hello.worker not in self._nodes:
            return event
        node = f"node-{self._nodes[event.hello.worker]}" if self._per_node > 1 else ""
        return WorkerJoined(msgspec.structs.replace(event.hello, node=node))

    def _signal(self, worker: WorkerId, number: int) -> None:
        self._sent[worker].add(number)
        self._pool.signal(worker, number)
