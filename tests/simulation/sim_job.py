"""One simulated job: the real coordinator and the real engines in virtual time, on a simulated network.

A run is a function of its scenario alone. `Simulation(scenario).run()` returns a RunResult.
"""

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from bamboo_core.control import protocol
from bamboo_core.control.protocol import Message, Received, WorkerJoined
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.coordinator import CoordinatorState
from bamboo_core.coordinator.events import (
    AddWorkers,
    Emit,
    Event,
    Finish,
    Outcome,
    PricesReported,
    RemoveWorker,
    Send,
    SpecChanged,
    Tick,
    WorkerLost,
)
from bamboo_core.coordinator.history_feed import HistoryFeed
from bamboo_core.job.spec import PipelineSchedule
from bamboo_core.names import ALONE_SECONDS
from bamboo_core.planning.plan import Cell, Plan
from bamboo_trainer.frames import Frame
from sim_arithmetic import Oracle
from sim_checks import Checks, judge, waiting
from sim_clock import Clock
from sim_control import Channel
from sim_faults import ZONES, Scenario
from sim_history import URL
from sim_holders import newest_commit
from sim_injector import FaultInjector
from sim_many import RunResult
from sim_network import Network
from sim_stage import Violation
from sim_store import SimStore
from sim_worker import Name, Node

TICK_SECONDS = 0.1
HEARTBEAT_TIMEOUT = 2.0
GRACE_SECONDS = 3.0
PATIENCE_SECONDS = 60.0  # without a commit, a fault or a new worker
LATE_SECONDS = (0.2, 8.0)  # a worker in the middle of something long does not answer before it is done
SETTLE_SECONDS = 20.0  # for broken links to come back and replicas to finish
MAX_EVENTS = 2_000_000


class Simulation:
    """A run of a scenario. say: called with each line of the log."""

    def __init__(self, scenario: Scenario, say: Callable[[str], None] | None = None) -> None:
        self.scenario, self.spec = scenario, scenario.spec()
        self._say = say
        self.clock, self.work = Clock(), scenario.work
        self.copy_seconds, self.devices = scenario.copy_seconds, scenario.per_worker
        self.rng = random.Random(f"{scenario.seed} network")
        self.network = Network(self.clock, self.rng, scenario.slowness)
        self.oracle = Oracle(scenario.arithmetic)
        chance = random.Random(f"{scenario.seed} store")
        self.store = SimStore(self.clock, self.oracle, chance, scenario.trouble, scenario.store_seconds)
        self.history: dict[str, bytes] | None = {} if scenario.tells else None  # its files
        self.feed, self.feeds = HistoryFeed("shell-0", lambda: self.clock.now), 1
        self.nodes: dict[str, Node] = {}
        self.wanted, self.capacity = 0, scenario.capacity
        self.finish: Finish | None = None
        self.failure: str | None = None
        self.coordinating = True
        self.missed: list[Event] = []  # of workers that ended while there was no coordinator
        self.active_at = 0.0
        self.emitted: list[Emit] = []
        self.checks = Checks(self.oracle)
        self.state = self._initial()
        self.injector = FaultInjector(self)

    def _initial(self, resumed: bool = False) -> CoordinatorState:
        return coordinator.initial(
            self.spec,
            self.scenario.manifest(),
            secret="s",
            now=self.clock.now,
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
            last_state="memory" if self.scenario.saving and not self.scenario.checkpoints else "",
            history=URL if self.scenario.tells else "",
            resumed=resumed,
        )

    @property
    def logging(self) -> bool:
        return self._say is not None

    def log(self, text: str) -> None:
        if self._say:
            self._say(f"{self.clock.now:10.5f}  {text}")

    def run(self) -> RunResult:
        watched = logging.getLogger("bamboo_trainer")
        handler = _Alarm(self)
        watched.addHandler(handler)
        before, watched.propagate = watched.propagate, False
        try:
            self._run()
        finally:
            watched.removeHandler(handler)
            watched.propagate = before
        return judge(self)

    def _run(self) -> None:
        self.clock.after(0.0, self._tick)
        events = 0
        while self.finish is None and self.failure is None:
            self.clock.advance()
            events += 1
            if self._nothing_happens() or events > MAX_EVENTS:
                self.failure = f"nothing happens any more: {waiting(self)}"
        if self.finish and self.finish.outcome is Outcome.COMPLETE:
            self._settle()

    def _nothing_happens(self) -> bool:
        """Return whether the job hangs. It may be quiet longer while all workers known to the coordinator are dead."""
        quiet = self.clock.now - self.active_at
        if quiet <= PATIENCE_SECONDS:
            return False
        alone = not any(self.nodes[w].alive for w in self.state.workers if w in self.nodes)
        return quiet > PATIENCE_SECONDS + (ALONE_SECONDS if alone else 0.0)

    def _settle(self) -> None:
        """Run on without faults after the end of the job, so that all replicas finish, and check their states."""
        self.injector.over()
        until = self.clock.now + SETTLE_SECONDS
        while self.failure is None and self.clock.now < until and self.clock.advance():
            pass
        self.checked(self.checks.settled, list(self.nodes.values()), self.scenario.arithmetic.steps)

    def active(self) -> None:
        """Record that something happened, which gives the job more time to react."""
        self.active_at = max(self.active_at, self.clock.now)

    def fail(self, text: str) -> None:
        self.failure = self.failure or text

    # the coordinator's shell

    def _tick(self) -> None:
        if self.finish:
            return
        self.injector.look()
        if self.injector.restarted:
            living = [n for n in self.nodes.values() if n.alive and n.name in self.state.workers]
            self.checked(self.checks.one_plan, living)
        self.coordinate(Tick())
        if self.scenario.chooses == "Value":
            self.coordinate(PricesReported({name: 1.0 + name.number % 3 / 2 for name in self.nodes}, ((1.0, 1),)))
        self._staff()
        self.clock.after(TICK_SECONDS, self._tick)

    def coordinate(self, event: Event) -> None:
        if self.finish or self.failure:
            return
        if not self.coordinating:
            if isinstance(event, WorkerLost):
                self.missed.append(event)
            return
        self._hear(event)
        known = len(self.state.moves.takeovers)
        try:
            self.state, commands = coordinator.step(self.state, event, self.clock.now)
        except Exception as error:
            self.broken(None, error)
            return
        told = [command for command in commands if isinstance(command, Emit)]
        owed = self.feed.follow(event, told, self.state.plan) if self.scenario.tells else None
        if owed and owed[0] in self.nodes:
            self.nodes[owed[0]].channel.send(owed[1])
        for taken in self.state.moves.takeovers[known:]:
            self.checked(self.checks.taken_over, taken)
        if self.state.plans.steady and self.state.moves.recoveries:
            self.fail(f"the job is calm, and waits for reports of {self.state.moves.recoveries}")
        for command in commands:
            self._execute(command)

    def _hear(self, event: Event) -> None:
        match event:
            case Received(_, protocol.Heartbeat()):
                return
            case Received(worker, protocol.StepCommitted() as said):
                self.active()
                self.checked(self.checks.committed, worker, said)
                self.injector.look()
            case Received(_, protocol.Evaluated() as found):
                self.active()
                self.checked(self.checks.evaluated, found)
            case WorkerJoined() | Received(_, protocol.RestoreFailed() | protocol.CheckpointFound()):
                self.active()
        if self.logging and not isinstance(event, Tick):
            self.log(f"coordinator hears {_short(event)}")

    def _execute(self, command: Any) -> None:
        match command:
            case Send(_, protocol.Stop()) | RemoveWorker() if self.state.phase == "Over":
                pass  # see _settle
            case Send(worker, message):
                if isinstance(message, protocol.SendPlan):
                    self.checked(self.checks.planned, message.plan)
                if worker in self.nodes:
                    self.nodes[worker].channel.send(message)
            case AddWorkers(count):
                self.wanted += count
                self._staff()
            case RemoveWorker(worker) if worker in self.nodes:
                self._remove(self.nodes[worker])
            case Emit(reason, message):
                self.emitted.append(command)
                self.log(f"coordinator: {reason}: {message}")
            case Finish():
                self.finish = command

    def checked(self, check: Callable[..., None], *arguments: Any) -> None:
        try:
            check(*arguments)
        except Violation as violation:
            self.fail(str(violation))

    def _remove(self, node: Node) -> None:
        if not self.scenario.removing:
            return
        self.clock.after(self.rng.random() * 0.02, node.term)
        self.clock.after(GRACE_SECONDS, partial(node.end, -9))

    def restart_coordinator(self, seconds: float) -> None:
        """End the coordinator's process. After `seconds` start another one, which knows only what workers report."""
        if not self.coordinating:
            return
        self.coordinating = False
        self.log("the coordinator's process ends")
        for node in self.nodes.values():
            node.channel.restarted(seconds)
        self.clock.after(seconds, self._restarted)

    def edit_schedule(self) -> None:
        """Switch the job's schedule between 1F1B and ZBH1."""
        late = self.spec.topology.schedule is PipelineSchedule.ZB_H1
        other = PipelineSchedule.ONE_F_ONE_B if late else PipelineSchedule.ZB_H1
        self.spec = replace(self.spec, topology=replace(self.spec.topology, schedule=other))
        self.coordinate(SpecChanged(self.spec))

    def _restarted(self) -> None:
        self.log("another coordinator starts")
        self.checks.forget_plans()
        self.feed, self.feeds = HistoryFeed(f"shell-{self.feeds}", lambda: self.clock.now), self.feeds + 1
        self.state, self.coordinating, self.wanted = self._initial(self.state.plan is not None), True, 0
        self.missed.clear()
        self.active()

    # workers

    def _staff(self) -> None:
        if not self.coordinating:
            return
        while self.wanted and sum(n.alive for n in self.nodes.values()) < self.capacity:
            self.wanted -= 1
            self.active()
            self._start(Name(len(self.nodes)))

    def _start(self, name: Name) -> None:
        def channel(node: Node) -> Channel:
            return Channel(
                self.clock,
                self.rng,
                name,
                to_coordinator=self.coordinate,
                to_worker=partial(self._tell, node),
                lossy=self.scenario.lossy,
                hello=lambda: protocol.Hello(
                    worker=name,
                    host="memory",
                    port=1,
                    zone=f"z{name.number // self.scenario.per_node % ZONES}",
                    node=f"n{name.number // self.scenario.per_node}" if self.scenario.per_node > 1 else "",
                    plan=node.engine.reported_plan if node.engine else None,
                ),
                heartbeat=node.heartbeat,
            )

        costs = (1.0,) * self.scenario.arithmetic.layers
        chance = random.Random(f"{self.scenario.seed} answers of {name}")
        late = chance.uniform(*LATE_SECONDS) if chance.random() < 0.2 else 0.0
        node = self.nodes[name] = Node(self, name, channel, costs, late)
        self.log(f"{name} starts")
        self.clock.after(10 ** self.rng.uniform(-3, -0.5), node.channel.connect)

    def _tell(self, node: Node, message: Message) -> None:
        if self.logging and not isinstance(message, protocol.SendPlan):
            self.log(f"{node.name} is told {type(message).__name__}")
        elif self.logging and isinstance(message, protocol.SendPlan):
            self.log(f"{node.name} gets {describe(message.plan)}")
        node.put(message)

    def struck(self, node: Node, what: str, cell: Cell, step: int, microbatch: int) -> bool:
        if self.logging and what.startswith("after"):
            self.log(f"{node.name} {what[6:]} {tuple(cell)} step {step} microbatch {microbatch}")
        if what.startswith("before"):  # and so after the one before it
            self.checked(self.checks.bounded, node)
            self.checked(self.checks.followed, node)
        return self.injector.instruction(node, what, step)

    def turned(self, node: Node) -> None:
        """Check, after a worker's turn, its reports of takeovers and its commits. A dead worker passes."""
        if node.alive:
            self.checked(self.checks.told, node)
        self.checked(self.checks.agreed, node, lambda w: self.nodes[w].alive and w not in self.state.membership.gone)

    def sending(self, node: Node, peer: str, frame: Frame) -> bool:
        if self.logging:
            kind, *place = frame.address
            size = sum(t.numel() for t in frame.tensors)
            self.log(f"{node.name} sends {peer} {kind.name} {place} of epoch {frame.epoch}, {size} numbers")
        return self.injector.frame(node, frame.address.kind.name)

    def ended(self, node: Node, code: int | None) -> None:
        self.log(f"{node.name} has ended with {code}")
        self.active()
        delay = 10 ** self.rng.uniform(-3, 0.5)
        known = self.rng.random() < 0.7 or code in (0, 1) or node.name not in self.state.workers
        if known:
            self.clock.after(delay, partial(self._watched, node, code))

    def _watched(self, node: Node, code: int | None) -> None:
        if self.coordinating and node.name not in self.state.workers and node.name not in self.state.membership.gone:
            self.wanted += 1  # known limit: told of it, the coordinator would end the job
            return
        self.coordinate(WorkerLost(node.name, f"exit code {code}", code))

    def broken(self, node: Node | None, error: Exception) -> None:
        """Fail the run because a worker, or the coordinator if `node` is None, raised an exception."""
        import traceback

        frames = traceback.extract_tb(error.__traceback__)
        where = " < ".join(f"{f.name}:{f.lineno}" for f in reversed(frames[-4:]))
        self.log("".join(traceback.format_exception(error)) if self.logging else "")
        self.fail(f"{node.name if node else 'the coordinator'} raised {type(error).__name__}: {error} ({where})")

    @property
    def commit(self) -> int:
        return newest_commit(self.nodes.values())


class _Alarm(logging.Handler):
    """A log handler that fails the run when the trainer logs a warning or an error, except the warning of a checkpoint
    that cannot be read when the scenario lets reads fail.
    """

    def __init__(self, job: Simulation) -> None:
        super().__init__(logging.WARNING)
        self.job = job

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        if not (self.job.store.trouble and said.startswith("the checkpoint of step") and " is not read: " in said):
            self.job.fail(f"the product says: {said}")


def _short(event: Event) -> str:
    match event:
        case Received(worker, message):
            facts = {f: getattr(message, f) for f in message.__struct_fields__}
            return f"{worker}: {type(message).__name__} " + ", ".join(f"{k} {v}" for k, v in facts.items())
        case WorkerJoined(hello):
            return f"{hello.worker} joins with epoch {hello.plan.epoch if hello.plan else 0}"
        case _:
            return str(event)


def describe(plan: Plan) -> str:
    rows = " | ".join(" ".join("+".join(a.holders) for a in row) for row in plan.pipelines)
    kind = "boundary plan" if plan.boundary else "plan"
    layouts = ",".join(str(x.generation) for x in plan.layouts)
    return f"{kind} {plan.epoch} ({plan.reason}; layouts {layouts}): {rows}"
