"""Simulation of a job in virtual time, with nodes that come and go by a trace and durations from a model's profile.

Like the operator and the local runner, it passes events to `coordinator.step` and executes the returned commands.
"""

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from typing import Any, Final

import msgspec

from bamboo.simulation.figures import SimulationError
from bamboo.simulation.job.job_record import JobRecord, JobResult
from bamboo.simulation.job.job_training import SimulatedTraining
from bamboo.simulation.job.node_supply import NodeSupply, SimulatedNode
from bamboo.simulation.job.virtual_clock import Timer, VirtualClock
from bamboo.simulation.job.zone_traffic import ZONE_TRAFFIC_PRICE
from bamboo.traces.trace import Change, NodeChange, Trace
from bamboo_core.control import protocol
from bamboo_core.control.protocol import Received, WorkerJoined
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.checkpointing.saving import AHEAD_STEPS, next_one
from bamboo_core.coordinator.events import (
    AddWorkers,
    Command,
    Emit,
    Event,
    Finish,
    Interrupted,
    PreemptionNotice,
    PricesReported,
    RemoveWorker,
    RequestsWithdrawn,
    Send,
    Tick,
    WorkerLost,
)
from bamboo_core.coordinator.workers.membership import surplus_requests
from bamboo_core.job.budget_reach import HOUR, spent
from bamboo_core.job.spec import JobSpec, gives_back, whole_workers
from bamboo_core.job.training_spec import UNKNOWN_STEPS
from bamboo_core.names import worker_name
from bamboo_core.planning.grid import initial_plan, layer_ranges
from bamboo_core.planning.plan import Peer, Plan, WorkerId
from bamboo_core.planning.profile import LayerBytes, ModelProfile, for_microbatch
from bamboo_core.planning.splits.device_stages import device_layers
from bamboo_core.planning.steps.grid_rates import GridRates
from bamboo_core.planning.steps.step_times import StepModel

ASKING_TICK, SHORTEST_TICK, LONGEST_TICK = 0.05, 0.5, 5.0  # seconds; ticks become rarer the longer nothing happens
GRACE_SECONDS: Final = 1.0  # after which a worker that was told to stop has ended
MOST_EVENTS: Final = 50_000_000
FOREVER: Final = 1e12
CUT: Final = ("cut", "the time was up")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """The input of one simulated run."""

    spec: JobSpec
    manifest: dict[str, Any]
    profile: ModelProfile
    trace: Trace
    seconds: float | None = None  # when the run is cut; None: the trace's duration
    price: float | None = None  # USD per hour of a spot node, instead of the trace's, job's and profile's
    zone_price: float = ZONE_TRAFFIC_PRICE  # USD per GB that crosses zones, in each direction
    heeds_money: bool = False  # the run ends when its budget's money is spent on nodes


def simulate_job(run: JobRun, say: Callable[[str], None] | None = None, model: StepModel | None = None) -> JobResult:
    """Simulate a run and return its result. Raises SimulationError if the job cannot be simulated.

    say: called with a line for each event. model: a result of `model_of` for the same job and profile, to reuse.
    """
    return _Simulation(_simplified(run), model or model_of(run), say).run()


def model_of(run: JobRun) -> StepModel:
    """Return the step model of a run, which computes and caches the times of its steps."""
    simple = _simplified(run)
    return StepModel(simple.profile.figures, simple.spec)


def _simplified(run: JobRun) -> JobRun:
    """Drop settings that a simulation ignores, such as evaluation, and scale the profile to the microbatch size."""
    training = replace(run.spec.training, evaluation=None, epochs=None, tokens=None, deterministic=False)
    checkpoint = run.spec.checkpoint and replace(run.spec.checkpoint, keep_best=False)
    spec = replace(run.spec, training=training, checkpoint=checkpoint)
    return replace(run, spec=spec, profile=for_microbatch(run.profile, training.micro_batch_size))


@dataclass(slots=True)
class _SimulatedWorker:
    node: SimulatedNode
    joined: bool = False
    noticed: bool = False
    alive: bool = True


class _Simulation:
    """A simulation of one run, which passes events to the coordinator and executes its commands in virtual time."""

    def __init__(self, run: JobRun, model: StepModel, say: Callable[[str], None] | None) -> None:
        self._run, self._spec, self._model, self._say = run, run.spec, model, say
        self._clock = VirtualClock()
        self._record = JobRecord(
            samples=run.spec.training.global_batch_size, usual=self._usual_step(), zone_price=run.zone_price
        )
        self._supply = NodeSupply(run.trace, run.spec, run.profile.prices, run.price)
        self._training = SimulatedTraining(
            self._clock, self._model, run.profile, run.spec, self._record, tell=self._tell, most=self._most_steps
        )
        self._workers: dict[WorkerId, _SimulatedWorker] = {}
        self._by_node: defaultdict[str, list[WorkerId]] = defaultdict(list)
        self._waiting: list[float] = []  # when each missing worker was requested
        self._sent: tuple[Plan, float, list[WorkerId]] | None = None  # the newest plan, when it was sent, to whom
        self._prices: PricesReported | None = None  # as last sent to the coordinator
        self._ticking, self._tick_seconds = False, SHORTEST_TICK
        self._finish: Finish | None = None
        self._over = self._is_spent = False
        self._spending = Timer(lambda: None)  # fires when the budget is spent
        self._paid = (0, self._supply.usd_per_hour(0.0))
        self._state = coordinator.initial(
            run.spec, run.manifest, secret="simulation", now=0.0, heartbeat_timeout=FOREVER
        )

    def _usual_step(self) -> float:
        """Return the seconds of an undisturbed step on the fixed grid, or on the fastest grid of an elastic job.
        Raises SimulationError if no elastic grid fits in memory, or the layers cannot be split for the fixed grid.
        """
        spec, profile = self._spec, self._run.profile
        if spec.elastic:
            best = GridRates(profile.figures, spec, profile.machine.memory).best(whole_workers(spec))
            if best is None:
                memory = f"{profile.machine.memory / 1e9:.1f} GB"
                raise SimulationError(f"no grid that the job may have fits devices of {memory}")
            return best.seconds
        pipelines = spec.topology.pipelines
        try:
            ranges = layer_ranges(self._run.profile.costs, spec.topology, devices=spec.worker.devices)
        except ValueError as error:
            raise SimulationError(f"{error} (of the profile {self._run.profile.name})") from None
        peers = [Peer(worker=f"w{i}", host="", port=0) for i in range(pipelines * len(ranges))]
        schedule = spec.topology.first_schedule
        plan = initial_plan(peers, ranges, pipelines, spec.training, spec.redundancy, schedule=schedule)
        layers = device_layers(spec, ranges, self._run.profile.costs)
        plan = msgspec.structs.replace(plan, device_layers=layers)
        return self._model.seconds(plan, plan.target)

    def run(self) -> JobResult:
        trace = self._run.trace
        seconds = self._run.seconds if self._run.seconds is not None else trace.duration
        self._clock.at(seconds, self._cut)
        for change in trace.changes:
            if change.change is Change.REMOVE and change.notice:
                self._clock.at(change.at - change.notice, partial(self._notice, change))
            self._clock.at(change.at, partial(self._changed, change))
        for moment in sorted({price.at for price in trace.prices}):
            self._clock.at(moment, self._pay)
        self._tell_prices()
        self._coordinate(Tick())
        events = 0
        while self._finish is None and not self._over and self._clock.advance():
            events += 1
            if events > MOST_EVENTS:
                raise SimulationError(f"more than {MOST_EVENTS} things happened in {self._clock.now / 3600:.1f} h")
        self._pay()
        if self._finish is None:
            self._training.end()
        end = self._clock.now
        self._record.repeated = self._state.checkpoints.counts.repeated
        outcome, message = CUT if self._finish is None else (self._finish.outcome.value, self._finish.message)
        return JobResult(
            figures=self._record.figures(end),
            series=self._record.series(end),
            outcome=outcome,
            message=message,
            steps=tuple(self._record.steps),
        )

    def _cut(self) -> None:
        self._over = True

    # the coordinator's shell

    def _coordinate(self, event: Event) -> None:
        if self._finish is not None or self._over:
            return
        before = self._state
        self._state, commands = coordinator.step(self._state, event, self._clock.now)
        for command in commands:
            self._execute(command)
        if self._state.inquiry.began_at is not None:
            self._tick_seconds = ASKING_TICK
        elif isinstance(event, Tick) and self._state is before:
            self._tick_seconds = min(LONGEST_TICK, 2 * self._tick_seconds)
        elif not (isinstance(event, Received) and isinstance(event.message, protocol.StepCommitted)):
            self._tick_seconds = SHORTEST_TICK
        if gives_back(self._spec):
            self._withdraw()
        if not self._ticking and not self._state.plans.steady:
            self._ticking = True
            self._clock.after(self._tick_seconds, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self._coordinate(Tick())

    def _most_steps(self) -> int:
        """Return how many steps may run before one must be reported to the coordinator, at least 1.

        The report must come in time to request the next checkpoint. UNKNOWN_STEPS if no checkpoint will follow.
        """
        at = next_one(self._state)
        return UNKNOWN_STEPS if at is None else max(1, at - AHEAD_STEPS - self._training.step)

    def _tell(self, worker: WorkerId, message: protocol.Message) -> None:
        self._coordinate(Received(worker, message))

    def _execute(self, command: Command) -> None:
        match command:
            case Send(worker, message):
                if worker not in self._workers or not self._workers[worker].alive:
                    pass
                elif isinstance(message, protocol.SendPlan):
                    self._send_plan(worker, message.plan)
                else:
                    self._clock.after(self._run.profile.network.latency, partial(self._hears, worker, message))
            case AddWorkers(count):
                self._waiting += [self._clock.now] * count
                self._clock.after(0.0, self._staff)
                for pool in self._supply.fallbacks:
                    self._clock.after(pool.after_seconds, self._staff)
            case RemoveWorker(worker):
                self._clock.after(GRACE_SECONDS, partial(self._leaves, worker))
            case Emit(reason, text):
                self._noted(reason, text)
            case Finish():
                self._finish = command

    def _send_plan(self, worker: WorkerId, plan: Plan) -> None:
        """Send a plan to a worker. Workers that are sent the plan at the same moment get it in one event."""
        now = self._clock.now
        if self._sent is None or self._sent[0] is not plan or self._sent[1] != now:
            self._sent = plan, now, []
            self._clock.after(self._run.profile.network.latency, partial(self._hear_plan, plan, self._sent[2]))
        self._sent[2].append(worker)

    def _hear_plan(self, plan: Plan, workers: Collection[WorkerId]) -> None:
        if any(self._workers[worker].alive for worker in workers):
            self._training.plan_arrived(plan)

    def _noted(self, reason: str, text: str) -> None:
        if self._say is not None:
            self._say(f"{self._clock.now:12.2f} s  {reason}: {text}")
        if reason == "TakenOver":
            self._record.note("takeovers", self._clock.now)
        elif reason == "Restored":
            self._record.note("restores", self._clock.now)
        elif reason in ("Restoring", "StageLost"):
            self._record.fatal += 1

    def _hears(self, worker: WorkerId, message: protocol.Message) -> None:
        if not self._workers[worker].alive:
            return
        match message:
            case protocol.ProfileRequest():
                self._tell(worker, self._profile())
            case protocol.TakeCheckpoint():
                self._training.wished(worker, message)
            case protocol.HoldState(checkpoint=checkpoint):
                self._training.hold(checkpoint)
            case protocol.CommitCheckpoint(checkpoint=checkpoint):
                self._training.commit_checkpoint(worker, checkpoint)
            case protocol.FindCheckpoint():
                self._training.find_checkpoint(worker, message)
            case protocol.ReportRequest():
                self._training.report(worker)

    def _profile(self) -> protocol.Profile:
        profile = self._run.profile
        names = LayerBytes.__struct_fields__
        layers = tuple(LayerBytes(**{name: getattr(layer, name) for name in names}) for layer in profile.layers)
        return protocol.Profile(costs=profile.costs, layers=layers, memory=profile.machine.memory)

    # nodes and workers

    def _pay(self) -> None:
        """Record the cost since the last call, fetch and report the current prices, and reschedule the budget's end."""
        self._record.paid(self._clock.now, *self._paid)
        self._paid = self._supply.used, self._supply.usd_per_hour(self._clock.now)
        self._clock.after(0.0, self._tell_prices)
        self._end_when_spent()

    def _end_when_spent(self) -> None:
        """Cancel the budget's end; reschedule it if a money limit applies and the cost is known and above 0."""
        budget, per_hour = self._spec.budget, self._paid[1]
        self._spending.cancel()
        if not self._run.heeds_money or budget is None or budget.money is None or not per_hour:
            return
        left = max(0.0, float(budget.money) - self._record.paid_usd) / per_hour * HOUR
        self._spending = self._clock.after(left, partial(self._spend, budget.money))

    def _spend(self, money: Decimal) -> None:
        if not self._is_spent:
            self._is_spent = True
            self._pay()
            message = spent(money, keeps=self._spec.checkpoint is not None)
            self._coordinate(Interrupted("BudgetSpent", message))

    def _tell_prices(self) -> None:
        if not gives_back(self._spec):
            return
        prices = self._supply.worker_prices(self._clock.now)
        known = {w: prices[r.node.name] for w, r in self._workers.items() if r.alive and r.node.name in prices}
        prices_now = PricesReported(known, self._supply.next_prices(self._clock.now))
        if prices_now != self._prices:
            self._prices = prices_now
            self._coordinate(prices_now)

    def _withdraw(self) -> None:
        """Withdraw requests for surplus workers that have no node yet."""
        if self._waiting and (surplus := min(len(self._waiting), surplus_requests(self._state))):
            del self._waiting[-surplus:]
            self._coordinate(RequestsWithdrawn(surplus))

    def _changed(self, change: NodeChange) -> None:
        if change.change is Change.ADD:
            self._supply.came(change.node, change.zone)
            self._clock.after(0.0, self._staff)  # after all nodes of this moment have come
            return
        used = self._supply.went(change.node)
        self._pay()
        workers = [w for w in self._by_node.pop(change.node, []) if used and self._workers[w].alive]
        for worker in workers:
            self._workers[worker].alive = False
            if not self._workers[worker].noticed:
                self._record.note("preemptions", self._clock.now)
            self._training.lost(worker)
        detection = self._run.profile.times.detection
        for worker in workers:
            self._clock.after(detection, partial(self._coordinate, WorkerLost(worker, "its node was taken away")))

    def _notice(self, change: NodeChange) -> None:
        self._supply.noticed(change.node)
        for worker in list(self._by_node.get(change.node, ())):
            if self._workers[worker].joined and change.notice is not None:
                self._workers[worker].noticed = True
                self._record.note("preemptions", self._clock.now)
                self._coordinate(PreemptionNotice(worker, change.at - self._clock.now))

    def _staff(self) -> None:
        """Start requested workers on available nodes."""
        while self._waiting:
            node = self._supply.take() or self._supply.take_on_demand(self._clock.now - self._waiting[0])
            if node is None:
                break
            self._waiting.pop(0)
            worker = worker_name(self._spec.name, len(self._workers))
            self._workers[worker] = _SimulatedWorker(node)
            self._by_node[node.name].append(worker)
            self._clock.after(self._run.profile.times.start, partial(self._starts, worker))
        self._pay()

    def _starts(self, worker: WorkerId) -> None:
        record = self._workers[worker]
        if record.alive:
            record.joined = True
            node = record.node.name if self._spec.spread.workers_per_node > 1 else ""
            hello = protocol.Hello(worker=worker, host="simulated", port=1, zone=record.node.zone, node=node)
            self._coordinate(WorkerJoined(hello))
            self._tell(worker, protocol.WorkerReady())

    def _leaves(self, worker: WorkerId) -> None:
        """End a worker that the coordinator has removed: free its place on the node, and report that it has left."""
        record = self._workers.get(worker)
        if record is None or not record.alive:
            return
        record.alive = False
        self._training.lost(worker)
        self._by_node[record.node.name].remove(worker)
        self._supply.release(record.node.name)
        self._staff()
        self._coordinate(WorkerLost(worker, "it has left", 0, True))
