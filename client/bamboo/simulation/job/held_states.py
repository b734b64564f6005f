"""The stages whose state each simulated worker holds, and the time to copy or load states. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from bamboo.simulation.job.zone_traffic import TrafficKind, Transfer
from bamboo_core.names import STATE_RATE
from bamboo_core.planning.plan import Plan, WorkerId
from bamboo_core.planning.profile import ModelProfile


class StateOnItsWay(NamedTuple):
    """The state of a stage while it is being copied to a worker."""

    at: float  # when the worker has the stage's state
    worker: WorkerId
    stage: int
    transfer: Transfer


class HeldStates:
    """The stages whose newest state each worker holds, and the states that are being copied to workers."""

    def __init__(self, profile: ModelProfile) -> None:
        self._profile = profile
        self._held: dict[WorkerId, set[int]] = {}
        self._coming: dict[tuple[WorkerId, int], float] = {}  # when the copy is complete

    def begin(self, plan: Plan) -> None:
        """Record that every worker holds the stages that the plan gives it, and forget copies in progress."""
        self._coming.clear()
        self._held = {w: set() for w in plan.worker_ids()}
        for cell in plan.cells():
            for worker in plan.at(cell).holders:
                self._held[worker].add(cell.stage)

    def follow(self, plan: Plan, now: float) -> list[StateOnItsWay]:
        """Drop states that the plan no longer assigns; return the copies that begin now.

        A new owner has its state at once. An owner sends these copies one after the other.
        """
        wanted: dict[WorkerId, set[int]] = {}
        busy: defaultdict[WorkerId, float] = defaultdict(float)
        begun: list[StateOnItsWay] = []
        for cell in plan.cells():
            assignment = plan.at(cell)
            for worker in assignment.holders:
                wanted.setdefault(worker, set()).add(cell.stage)
        self._held = {w: self._held.get(w, set()) & stages for w, stages in wanted.items()}
        self._coming = {
            (w, s): at for (w, s), at in self._coming.items() if s in wanted.get(w, set()) and w in plan.worker_ids()
        }
        for cell in plan.cells():
            assignment, number = plan.at(cell), cell.stage
            self._held[assignment.owner].add(number)
            for worker in assignment.replicas:
                if number in self._held[worker] or (worker, number) in self._coming:
                    continue
                size = self.bytes_of(range(*plan.stages[number]))
                busy[assignment.owner] += size / min(self._profile.network.link(size), STATE_RATE)
                at = now + busy[assignment.owner] + self._profile.network.latency
                self._coming[worker, number] = at
                transfer = Transfer(TrafficKind.STATES, assignment.owner, worker, size)
                begun.append(StateOnItsWay(at, worker, number, transfer))
        return begun

    def arrived(self, worker: WorkerId, stage: int, at: float) -> bool:
        """Record that a copy is complete; return False if it was dropped or replaced. at: when it was due."""
        if self._coming.get((worker, stage)) != at:
            return False
        del self._coming[worker, stage]
        self._held.setdefault(worker, set()).add(stage)
        return True

    def lose(self, worker: WorkerId) -> None:
        self._held.pop(worker, None)
        self._coming = {key: at for key, at in self._coming.items() if key[0] != worker}

    def has(self, worker: WorkerId, stage: int) -> bool:
        return stage in self._held.get(worker, set())

    def of(self, worker: WorkerId) -> set[int]:
        return self._held.get(worker, set())

    def bytes_of(self, layers: Iterable[int]) -> int:
        """Return the bytes of the layers' parameters and optimizer state."""
        return sum(self._profile.layers[i].parameters + self._profile.layers[i].optimizer for i in layers)

    def beginning(
        self, plan: Plan, copies: Mapping[WorkerId, Set[int]] | None = None
    ) -> tuple[dict[WorkerId, float], list[Transfer]]:
        """Return the seconds until each worker has loaded its state for a plan with a new origin, and the transfers.

        Loading takes no time without `plan.restore`. A layer that a worker lacks in memory comes from another worker,
        else from the store. copies: the layers in each worker's memory, in addition to `plan.sources`.
        """
        workers = sorted(plan.worker_ids())
        if plan.restore is None:
            return dict.fromkeys(workers, 0.0), []
        transfers: list[Transfer] = []
        network, storage = self._profile.network, self._profile.storage
        receives: defaultdict[WorkerId, float] = defaultdict(float)  # seconds
        sent: Counter[WorkerId] = Counter()
        read: Counter[WorkerId] = Counter()
        for worker in workers:
            mine = {cell.stage for cell in plan.cells() if worker in plan.at(cell).holders}
            for layer in (i for number in sorted(mine) for i in range(*plan.stages[number])):
                size, holders = self.bytes_of([layer]), plan.sources[layer] if plan.sources else ()
                if worker in holders or (copies and layer in copies.get(worker, ())):
                    continue
                if holders:
                    source = min(holders, key=lambda holder: (sent[holder], holder))
                    sent[source] += size
                    receives[worker] += size / network.link(size)
                    transfers.append(Transfer(TrafficKind.STATES, source, worker, size))
                else:
                    read[worker] += size
        slowest = max(sent.values(), default=0) / network.machine
        times = {
            worker: max(receives[worker], slowest if receives[worker] else 0.0)
            + (read[worker] / storage.read + 2 * storage.latency if read[worker] else 0.0)
            for worker in workers
        }
        return times, transfers
