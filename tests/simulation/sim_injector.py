"""The injection of a scenario's faults into a simulated job."""

from functools import partial
from typing import TYPE_CHECKING

from bamboo_core.coordinator.events import PreemptionNotice
from bamboo_core.planning.plan import ROOT, Cell
from bamboo_core.planning.splits.device_stages import expanded
from bamboo_trainer.transport.wire import Lane
from sim_faults import KILLS, ZONES, Fault, FaultKind
from sim_holders import usable, would_orphan

if TYPE_CHECKING:
    from sim_job import Simulation
    from sim_worker import Node

RETRY_SECONDS = 0.1
RETRIES = 100
HARMLESS = (FaultKind.STALL_LINK, FaultKind.CAPACITY, FaultKind.RESTART, FaultKind.SLOW, FaultKind.SCHEDULE)
DEADLY = (*KILLS, FaultKind.FREEZE, FaultKind.HANG, FaultKind.PARTITION)
SHAKY_SECONDS = 3.0  # how long after a fault its victim may still be declared lost
LANES = ((Lane.BOUNDARY,), (Lane.BULK,), (Lane.STATE,), (Lane.BOUNDARY, Lane.BULK), tuple(Lane))


class FaultInjector:
    """The injector of a run's faults. struck: the faults that happened, each with the name of the worker."""

    def __init__(self, job: "Simulation") -> None:
        self.job = job
        self.left = list(job.scenario.faults)
        self.struck: list[tuple[Fault, str]] = []
        self.restarted = False
        self._over = False
        self._traps: list[tuple[Fault, int]] = []  # faults that wait for an instruction or a frame
        self._last: tuple[Cell, ...] = ()  # what the last victim owned
        self._shaky: dict[str, float] = {}  # workers that may still be declared lost, and until when

    def over(self) -> None:
        """Drop all faults that have not happened yet."""
        self.left.clear()
        self._traps.clear()
        self._over = True

    def look(self) -> None:
        """Arm the faults whose step has come, up to the next chained one. Drop a chained one if no fault has struck."""
        while self.left and (self.left[0].step <= self.job.commit + 1 or self.left[0].step < 0):
            if self.left[0].chained and not self.struck:
                self.left.pop(0)  # what it was chained to has been left out
                continue
            self._arm(self.left.pop(0))
            break_after = bool(self.left) and self.left[0].chained
            if break_after:
                return

    def _arm(self, fault: Fault) -> None:
        self.job.clock.after(fault.delay, partial(self._due, fault, 0))

    def _due(self, fault: Fault, tries: int) -> None:
        if self._over:
            return
        if fault.what in (FaultKind.KILL_AT, FaultKind.KILL_SENDING):
            self._traps.append((fault, fault.count))
            return
        node = self._victim(fault)
        harmful = fault.what not in HARMLESS
        spared = node is not None and harmful and not self._may(self._all(fault, node), fault.what in DEADLY)
        if node is None or spared:
            if tries < RETRIES:
                self.job.clock.after(RETRY_SECONDS, partial(self._due, fault, tries + 1))
            return
        self._strike(fault, node)

    def instruction(self, node: "Node", what: str, step: int) -> bool:
        """Return whether a fault now kills the worker. what: the instruction, such as "before Forward"."""
        return self._sprung(node, FaultKind.KILL_AT, what, step)

    def frame(self, node: "Node", kind: str) -> bool:
        return self._sprung(node, FaultKind.KILL_SENDING, kind, self.job.scenario.arithmetic.steps)

    def _sprung(self, node: "Node", what: FaultKind, name: str, step: int) -> bool:
        for i, (fault, left) in enumerate(self._traps):
            if fault.what is not what or fault.name not in (name, "any") or step < fault.step:
                continue
            if left > 0 or not self._may(self._all(fault, node)):
                self._traps[i] = (fault, max(0, left - 1))
                continue
            del self._traps[i]
            self._strike(fault, node)
            return True
        return False

    # whom

    def _may(self, victims: list["Node"], deadly: bool = True) -> bool:
        """Return whether a fault may strike these workers now, by the scenario's `care`."""
        job, care = self.job, self.job.scenario.care
        if care == 0 or (care == 1 and not deadly):
            return True
        plan, state = job.state.plan, job.state
        shaky = {name for name, until in self._shaky.items() if until > job.clock.now}
        down = {n.name for n in job.nodes.values() if not n.alive or n.frozen} | shaky
        if not job.coordinating or would_orphan(state, down | {v.name for v in victims}):
            return False
        if plan is None:
            return care == 1 or not down & state.workers.keys()
        troubled = bool(down & plan.worker_ids())
        if care == 1:
            return not troubled or plan.worker_ids() - down <= state.plans.applied
        return not troubled and plan.worker_ids() <= state.plans.applied and self._at_rest()

    def _at_rest(self) -> bool:
        """Return whether the job can go on from every owner's state of every cell; see `usable`."""
        job = self.job
        assert job.state.plan is not None
        plan = expanded(job.state.plan)
        return all(usable(job.nodes[plan.at(c).owner], c.stage, job.commit) for c in plan.cells())

    def _victim(self, fault: Fault) -> "Node | None":
        job, plan = self.job, self.job.state.plan
        living = [n for n in job.nodes.values() if n.alive and n.engine]
        if plan is None or not living:
            return living[fault.stage % len(living)] if living else None
        cell = Cell(fault.pipeline % len(plan.pipelines), fault.stage % len(plan.stages))
        names: tuple[str, ...] = ()
        match fault.role:
            case "owner":
                names = (plan.at(cell).owner,)
            case "replica":
                names = plan.at(cell).replicas
            case "root":
                names = (plan.at(ROOT).owner,)
            case "newest":
                names = (living[-1].name,)
            case "heir":
                names = tuple(plan.at(c).owner for c in self._last if c in plan.cells())
        found = [job.nodes[name] for name in names if job.nodes[name].alive]
        return found[0] if found else living[fault.stage % len(living)]

    # what

    def _strike(self, fault: Fault, node: "Node") -> None:
        job = self.job
        job.log(f"FAULT {fault}: {node.name}")
        if fault.what not in (FaultKind.SLOW, FaultKind.SCHEDULE):
            job.active_at = max(job.active_at, job.clock.now + fault.seconds)
        self.struck.append((fault, node.name))
        if fault.what not in HARMLESS:
            lasting = fault.what in (FaultKind.NOTICE, FaultKind.TERM)
            for one in self._all(fault, node) if fault.with_node else [node]:
                self._shake(one, 1e9 if lasting else fault.seconds)
        plan = job.state.plan
        self._last = tuple(plan.owned_by(node.name)) if plan else ()
        for victim in self._all(fault, node) if fault.neighbours or (fault.with_node and fault.what in KILLS) else []:
            if victim is not node:
                vanishes = fault.what is FaultKind.VANISH and fault.with_node
                victim.end(None, silent=fault.seconds) if vanishes else victim.end(-9)
        self._act(fault, node)
        if self.left and self.left[0].chained:
            self._arm(self.left.pop(0))
        self.look()

    def _shake(self, node: "Node", seconds: float) -> None:
        self._shaky[node.name] = self.job.clock.now + seconds + SHAKY_SECONDS

    def _act(self, fault: Fault, node: "Node") -> None:
        job = self.job
        match fault.what:
            case FaultKind.KILL:
                node.end(-9)
            case FaultKind.KILL_STAGE | FaultKind.KILL_ALL | FaultKind.KILL_ZONES:
                for victim in self._all(fault, node):
                    victim.end(-9)
            case FaultKind.VANISH:
                node.end(None, silent=fault.seconds)
            case FaultKind.KILL_AT | FaultKind.KILL_SENDING:
                pass  # the node raises
            case FaultKind.FREEZE:
                self._freeze(node, fault.seconds)
            case FaultKind.HANG:
                node.hangs = fault.seconds
            case FaultKind.SLOW:
                node.slow = fault.factor
                job.clock.after(fault.seconds, lambda: setattr(node, "slow", 1.0))
            case FaultKind.NOTICE:
                for one in self._all(fault, node):
                    job.coordinate(PreemptionNotice(one.name, fault.seconds))
                    self._doom(one, fault.seconds)
            case FaultKind.TERM:
                node.term()
                self._doom(node, 30.0)
            case FaultKind.CUT_LINK | FaultKind.STALL_LINK:
                self._links(fault, node)
            case FaultKind.CUT_CHANNEL:
                node.channel.cut(fault.seconds, job.rng.random() * fault.seconds)
            case FaultKind.PARTITION:
                node.channel.cut(fault.seconds, job.rng.random())
                for other in job.nodes.values():
                    if other is not node:
                        job.network.cut(node.name, other.name, LANES[-1], fault.seconds)
                        job.network.cut(other.name, node.name, LANES[-1], fault.seconds)
            case FaultKind.CAPACITY:
                before, job.capacity = job.capacity, 0
                job.clock.after(fault.seconds, lambda: setattr(job, "capacity", max(before, job.capacity)))
            case FaultKind.RESTART:
                self.restarted = True
                job.restart_coordinator(fault.seconds)
            case FaultKind.SCHEDULE:
                job.edit_schedule()

    def _all(self, fault: Fault, node: "Node") -> list["Node"]:
        """Return the workers that the fault strikes in the same instant if it befalls this one."""
        job, plan = self.job, self.job.state.plan
        living = [n for n in job.nodes.values() if n.alive]
        match fault.what:
            case FaultKind.KILL_ALL:
                return living
            case FaultKind.KILL_STAGE if plan:
                cells = [c for c in plan.cells() if c.stage == fault.stage % len(plan.stages)]
                holders = {w for c in cells for w in plan.at(c).holders}
                return [n for n in living if n.name in holders]
            case FaultKind.KILL_ZONES:
                count, per_node = min(job.scenario.replicas, ZONES - 1), job.scenario.per_node
                zones = {(node.name.number // per_node + more) % ZONES for more in range(count)}
                return [n for n in living if n.name.number // per_node % ZONES in zones]
            case _ if fault.with_node:
                per_node = job.scenario.per_node
                return [n for n in living if n.name.number // per_node == node.name.number // per_node]
            case _ if plan and fault.neighbours and (owned := plan.owned_by(node.name)):
                (d, s), depth = owned[0], len(plan.stages)
                before = (plan.at(Cell(d, (s - back) % depth)).owner for back in range(depth))
                names = list(dict.fromkeys([node.name, *before]))[: 1 + fault.neighbours]
                return [n for n in living if n.name in names]
            case _:
                return [node]

    def _doom(self, node: "Node", seconds: float) -> None:
        """Kill the worker after `seconds`, even if it is still training."""
        self.job.clock.after(seconds, partial(node.end, -9))

    def _freeze(self, node: "Node", seconds: float) -> None:
        job = self.job
        node.freeze(True)
        pong = job.rng.uniform(2.5, 7.5)
        if seconds > pong:
            job.clock.after(pong, lambda: node.channel.cut(0.0, 0.0))
        job.clock.after(seconds, partial(node.freeze, False))

    def _links(self, fault: Fault, node: "Node") -> None:
        job = self.job
        others = [n for n in job.nodes.values() if n.alive and n is not node]
        if not others:
            return
        other = others[fault.count % len(others)]
        if fault.what is FaultKind.STALL_LINK:
            job.network.stall(node.name, other.name, fault.seconds)
            return
        self._shake(other, fault.seconds)
        lanes = job.rng.choice(LANES)
        both = job.rng.random() < 0.5
        job.network.cut(node.name, other.name, lanes, fault.seconds)
        if both:
            job.network.cut(other.name, node.name, lanes, fault.seconds)
