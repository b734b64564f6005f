"""The plan that this worker obeys, the plan that waits for its step boundary, and broken links to peers."""

from collections.abc import Iterable

from bamboo_core.planning.heirs import heirs_may_differ
from bamboo_core.planning.plan import Cell, Plan, WorkerId
from bamboo_core.planning.ring import share_nodes
from bamboo_core.planning.splits.devices import cell_of, cell_parts


class PlanState:
    """The plans that a worker knows. current: the plan in force. pending: a boundary plan that waits until the root has
    committed under it.

    devices: the number of parts in which the worker runs each stage. heirs_may_differ: of adjacent stages lost
    together, under the plan in force. nodes_are_shared: some workers are lost together.
    """

    def __init__(self, worker: WorkerId, first: Plan, devices: int = 1) -> None:
        self.worker, self.devices = worker, devices
        self.current = first
        self.heirs_may_differ, self.nodes_are_shared = heirs_may_differ(first), share_nodes(first.workers)
        self._workers = first.worker_ids()  # of the plan in force
        self.pending: Plan | None = None
        self.links_down: set[WorkerId] = set()
        self._required_epoch = 0

    def offer(self, plan: Plan) -> Plan | None:
        """Take in a plan from the coordinator; return it if it must be activated now."""
        if plan.epoch <= self.current.epoch:
            return None
        if plan.boundary and self._required_epoch < plan.epoch:
            self.pending = plan
            return None
        return plan

    def require(self, epoch: int) -> Plan | None:
        """Note that the root has committed under the plan of that epoch; return that plan if it waits here."""
        self._required_epoch = max(self._required_epoch, epoch)
        return self.pending if self.pending and self.pending.epoch <= self._required_epoch else None

    def activate(self, plan: Plan) -> None:
        """Put a plan in force."""
        self.current = plan
        self.heirs_may_differ, self.nodes_are_shared = heirs_may_differ(plan), share_nodes(plan.workers)
        self._workers = plan.worker_ids()
        if self.pending and self.pending.epoch <= plan.epoch:
            self.pending = None
        self.links_down &= plan.worker_ids()

    @property
    def newest(self) -> Plan:
        """Return the newest plan known here, in force or not."""
        return self.pending or self.current

    @property
    def stages(self) -> int:
        return len(self.current.stages)

    @property
    def is_outdated(self) -> bool:
        """Return whether the root has switched to a plan that has not arrived here."""
        return self._required_epoch > self.current.epoch

    def owner(self, cell: Cell) -> WorkerId:
        return self.current.at(cell).owner

    def parts(self, cell: Cell) -> list[Cell]:
        """Return the device stages of the stage that a cell belongs to: the cell itself, if workers have one device."""
        return cell_parts(cell_of(cell, self.devices), self.devices)

    def are_parts(self, cells: Iterable[Cell]) -> bool:
        """Return whether these cells are device stages of at most one stage."""
        return len({cell_of(cell, self.devices) for cell in cells}) <= 1

    def others(self) -> set[WorkerId]:
        return set(self._workers) - {self.worker}

    def accepts(self, sender: WorkerId, epoch: int) -> bool:
        """Return False for frames from a worker declared lost that arrive late."""
        return epoch > self.current.epoch or sender in self._workers

    def link_broke(self, peer: WorkerId) -> bool:
        """Note a broken link. Return whether the peer belongs to the plan."""
        if peer not in self._workers:
            return False
        self.links_down.add(peer)
        return True

    def link_stands(self, peer: WorkerId) -> bool:
        """Note a working link. Return whether the peer belongs to the plan."""
        self.links_down.discard(peer)
        return peer in self._workers
