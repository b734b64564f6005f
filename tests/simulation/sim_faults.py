"""Scenarios of the protocol's simulation: the job and the faults that a seed draws, as plain data."""

import random
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec
from sim_arithmetic import Arithmetic
from sim_kinds import Kind

ZONES = 3
SPAN_SECONDS = 0.1  # about one step


class FaultKind(StrEnum):
    KILL = "kill"
    VANISH = "vanish"  # the node is gone: nobody sees a closed connection for a long time
    KILL_AT = "kill at"  # when it starts or has ended an instruction
    KILL_SENDING = "kill sending"  # before it sends a frame
    FREEZE = "freeze"
    SLOW = "slow"  # by a factor
    HANG = "hang"  # inside an instruction, while heartbeats go on
    NOTICE = "notice"
    TERM = "term"  # a notice that the worker itself gets
    CUT_LINK = "cut link"
    STALL_LINK = "stall link"
    CUT_CHANNEL = "cut channel"
    PARTITION = "partition"  # channel and all links of a worker
    CAPACITY = "capacity"  # no new workers for a while
    RESTART = "restart"  # the coordinator
    SCHEDULE = "schedule"  # an edit: another schedule
    KILL_STAGE = "kill stage"  # all workers that hold it
    KILL_ALL = "kill all"
    KILL_ZONES = "kill zones"  # in one instant: all workers in as many zones as there are replicas, two at most


KILLS = (
    FaultKind.KILL,
    FaultKind.VANISH,
    FaultKind.KILL_AT,
    FaultKind.KILL_SENDING,
    FaultKind.KILL_STAGE,
    FaultKind.KILL_ALL,
    FaultKind.KILL_ZONES,
)
SINGLE_KILLS = (FaultKind.KILL, FaultKind.VANISH, FaultKind.KILL_AT, FaultKind.KILL_SENDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of a scenario, which strikes at most once: what happens to which worker, and when."""

    what: FaultKind
    step: int  # armed when that many steps are committed (-1: at once)
    delay: float  # seconds from then
    chained: bool  # armed when the fault before it strikes, or at its step if any has struck
    # role, pipeline, stage: whom it befalls
    role: str
    pipeline: int
    stage: int
    seconds: float  # how long it lasts; of a notice: how long until the worker is taken away
    # name, count: the count-th such instruction or frame
    name: str = ""
    count: int = 0
    neighbours: int = 0  # the number of workers before it in the ring that are killed in the same instant
    with_node: bool = False  # all workers on its node are killed, or get the notice, as well
    factor: float = 1.0  # by which it is slower

    def __str__(self) -> str:
        when = "after the one before" if self.chained else f"at {self.step} steps"
        who = f"{self.role} of ({self.pipeline}, {self.stage})" if self.role in ("owner", "replica") else self.role
        who += f" and {self.neighbours} before it" if self.neighbours else ""
        who += " with its node" if self.with_node else ""
        text = f"{self.what} {who}, {when} + {self.delay * 1e3:.1f} ms"
        if self.what in (FaultKind.KILL_AT, FaultKind.KILL_SENDING):
            return f"{text}, {self.name} number {self.count}"
        return text if self.what in KILLS else f"{text}, {self.seconds:.3f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A job and its faults.

    care: which faults wait. 0: none. 1: deadly faults wait while no coordinator runs, while a stage would lose its last
    known copy, or until all workers apply the plan after a loss. 2: all but harmless ones, until the job has recovered.
    """

    seed: int
    arithmetic: Arithmetic
    standby: int
    mode: str  # of redundancy
    elastic: tuple[int, int, int] | None  # fewest and most pipelines, and stabilization seconds
    care: int
    lossy: bool
    saving: bool
    removing: bool  # workers that the coordinator removes get SIGTERM, and SIGKILL later; else they live on
    slowness: float
    capacity: int
    faults: tuple[Fault, ...]
    replicas: int = 1
    checkpoints: int = 0  # steps from one checkpoint to the next; 0: none
    trouble: float = 0.0  # of the store
    store_seconds: float = 0.02  # the store's usual delay
    resplit: float | None = None  # stabilization seconds if the number of stages follows the workers; None: it does not
    chooses: str = ""  # the objective by which the coordinator chooses the grid; empty: it does not
    work: tuple[float, ...] = ()  # of each layer; empty: what workers measure says nothing
    schedule: str = "1F1B"
    per_node: int = 1  # workers
    per_worker: int = 1  # devices; each runs a part of its stage
    tells: bool = False  # a history is written, and a callback follows it
    copy_seconds: float = 0.0  # that a boundary tensor takes from a device to host memory; 0: there is no device

    def manifest(self) -> dict[str, Any]:
        a = self.arithmetic
        spec: dict[str, Any] = {
            "task": {"entrypoint": "stand.in:build"},
            "training": a.training(),
            "topology": {**self._fixed, "schedule": self.schedule},
            "redundancy": {"mode": self.mode, "replicas": self.replicas},
            "standby": {"workers": self.standby},
        }
        if self.checkpoints:
            spec["checkpoint"] = {"storage": "memory://sim", "everySteps": self.checkpoints}
        if set(self._fixed) != {"stages", "pipelines"}:
            least, most, seconds = self.elastic or (1, a.pipelines, self.resplit)
            bounds = {"minWorkers": least * (1 if self.follows_stages else a.stages), "maxWorkers": a.stages * most}
            spec["elastic"] = {**bounds, "stabilizationSeconds": seconds}
        if self.chooses:
            spec["elastic"]["objective"] = self.chooses
        return {"apiVersion": "bamboo.dev/v1alpha1", "kind": "BambooJob", "metadata": {"name": "sim"}, "spec": spec}

    @property
    def follows_stages(self) -> bool:
        """Whether the coordinator chooses the number of stages, which the manifest then does not fix."""
        return self.resplit is not None or bool(self.chooses)

    @property
    def _fixed(self) -> dict[str, int]:
        """The numbers of stages and pipelines that the manifest fixes."""
        a, fixed = self.arithmetic, dict[str, int]()
        if not self.follows_stages:
            fixed["stages"] = a.stages
        if not (self.elastic or self.chooses):
            fixed["pipelines"] = a.pipelines
        return fixed

    def spec(self) -> JobSpec:
        spec = parse_manifest(self.manifest())
        return replace(spec, worker=replace(spec.worker, devices=self.per_worker))

    def __str__(self) -> str:
        a = self.arithmetic
        return (
            f"seed {self.seed}: {a.stages} stages x {a.pipelines} pipelines, {a.microbatches} microbatches, "
            f"groups {a.bounds}, {a.steps} steps, skipped {sorted(a.skipped)}, evaluated {a.evaluated}, "
            f" {self.schedule}, standby {self.standby}, "
            f"ties {a.ties}, {self.mode}, replicas {self.replicas}, "
            f"elastic {self.elastic}, care {self.care}, lossy {self.lossy}, saving {self.saving}, "
            f"checkpoints {self.checkpoints}, trouble {self.trouble}, "
            f"store {self.store_seconds:.3f} s, layers {a.layers}, resplit {self.resplit}, chooses {self.chooses}, "
            f"work {self.work}, per node {self.per_node}, devices {self.per_worker}, "
            f"removing {self.removing}, "
            f"slowness {self.slowness:.2f}, capacity {self.capacity}"
        )


MODES = {"None": 1, "Replicas": 11}


def scenario(seed: int, *kinds: Kind) -> Scenario:
    """Return the scenario of a seed, with the features of these kinds."""
    rng = random.Random(seed)
    has, resplit = frozenset(kinds), not {Kind.RESPLIT, Kind.STRAGGLERS, Kind.GRIDS, Kind.VALUE}.isdisjoint(kinds)
    checkpoints = Kind.CHECKPOINTS in has
    grow = Kind.ELASTIC in has and rng.random() < 0.5
    a = _arithmetic(rng, seed, grow, resplit)
    most = min(3, a.groups)
    bounds = (rng.randint(1, a.pipelines), rng.randint(a.pipelines, most), rng.choice((1, 1, 3))) if grow else None
    standby = rng.choice((0, 0, 1, 1, 2, 3) if not resplit else (0, 0, 0, 0, 1))
    wanted = a.stages * (bounds[1] if bounds else a.pipelines) + standby
    chance, several = random.Random(f"{seed} checkpoints"), random.Random(f"{seed} replicas")
    made = Scenario(
        seed=seed,
        arithmetic=replace(a, steps=a.steps + (8 if checkpoints else 20 if resplit else 0)),
        standby=standby,
        mode=rng.choices(list(MODES), list(MODES.values()))[0],
        elastic=bounds,
        care=rng.choice((0, 1, 1, 2, 2)) * (not checkpoints),
        lossy=rng.random() < 0.5,
        saving=rng.random() < 0.5,
        removing=rng.random() < 0.7,
        slowness=10 ** rng.uniform(-1, 0.7),
        capacity=wanted if rng.random() < 0.6 else rng.randint(a.stages * a.pipelines, wanted + 2),
        faults=_faults(rng, a, Kind.RESTARTS in has, checkpoints, resplit),
        checkpoints=chance.choice((1, 1, 2, 3, 5)) if checkpoints else 0,
        trouble=chance.choice((0.0, 0.0, 0.1, 0.3)),
        store_seconds=10 ** chance.uniform(-3, -0.5),
        resplit=chance.choice((0, 0, 1)) if resplit else None,
    )
    made = _with_stragglers(made, random.Random(f"{seed} stragglers")) if has & {Kind.STRAGGLERS, Kind.VALUE} else made
    if not made.work and has & {Kind.GRIDS, Kind.RESPLIT}:
        made = _with_measured_layers(made, random.Random(f"{seed} grids"))
    elif not made.work and made.elastic:
        made = _with_measured_stages(made, random.Random(f"{seed} grids"))
    made = _with_siblings(made, random.Random(f"{seed} siblings")) if Kind.SIBLINGS in has else made
    made = _with_split_backwards(made, random.Random(f"{seed} zbh1")) if Kind.ZBH1 in has else made
    made = _with_schedules(made, random.Random(f"{seed} schedules")) if Kind.SCHEDULES in has else made
    made = _with_replicas(made, several) if Kind.REPLICAS in has else made
    made = _with_nodes(made, random.Random(f"{seed} nodes")) if Kind.NODES in has else made
    made = _with_devices(made, random.Random(f"{seed} divided")) if Kind.DIVIDED in has else made
    made = replace(made, chooses="Throughput" if Kind.GRIDS in has else "")
    made = _with_value(made) if Kind.VALUE in has else made
    if Kind.DEVICES in has:
        made = replace(made, copy_seconds=10 ** random.Random(f"{seed} devices").uniform(-4, -2))
    made = _with_callbacks(made, random.Random(f"{seed} callbacks")) if Kind.CALLBACKS in has else made
    return _with_early_stop(made, random.Random(f"{seed} stops")) if Kind.STOPS in has else made


def _with_callbacks(job: Scenario, rng: random.Random) -> Scenario:
    """Make the job write a history that a callback follows. Let half of the kills of single workers strike before or
    after a write of the history or of the callback's state.
    """
    faults = []
    for fault in job.faults:
        if fault.what in SINGLE_KILLS and rng.random() < 0.5:
            name = rng.choice(("before WriteHistory", "after WriteHistory"))
            fault = replace(fault, what=FaultKind.KILL_AT, name=name, count=rng.randint(0, 3))
        faults.append(fault)
    return replace(job, tells=True, faults=tuple(faults))


def _with_value(job: Scenario) -> Scenario:
    """Let the coordinator choose the grid by value (objective Value), in a job long enough for that to take effect."""
    longer = replace(job.arithmetic, steps=job.arithmetic.steps + 24)
    return replace(job, chooses="Value", arithmetic=longer)


def _with_early_stop(job: Scenario, rng: random.Random) -> Scenario:
    """End the job early. Half of the faults strike the step that the early stop gives up, or the step before.

    An evaluation ends two of three jobs, a decision the others. Half of the jobs with a decision evaluate nothing.
    """
    a = job.arithmetic
    every = rng.choice([n for n in range(1, a.steps + 1) if a.steps % n == 0])
    faults = [replace(f, step=a.steps - rng.randint(0, 1)) if rng.random() < 0.5 else f for f in job.faults]
    a = replace(a, evaluated=(every, rng.randint(1, 3)), left_out=rng.randint(1, 5))
    if rng.random() < 1 / 3:
        a = replace(a, by_decision=True, evaluated=rng.choice(((0, 0), a.evaluated)))
    return replace(job, arithmetic=a, faults=tuple(faults))


def _with_stragglers(job: Scenario, rng: random.Random) -> Scenario:
    """Return a long job in which every second fault slows a worker down, the first one early."""
    a, stages = job.arithmetic, min(job.arithmetic.stages, 4)
    pipelines = a.pipelines if stages * a.pipelines <= 6 and not job.elastic else 1
    microbatches, layers = max(pipelines, min(a.microbatches, 4)), stages * rng.choice((2, 3))
    a = replace(
        a,
        stages=stages,
        pipelines=pipelines,
        microbatches=microbatches,
        groups=rng.randint(pipelines, microbatches),
        steps=rng.randint(36, 48),
        sizes=tuple(rng.choice((1, 2)) for _ in range(layers)),
    )
    faults = [_slow(rng, fault, early=i == 0) if i % 2 == 0 else fault for i, fault in enumerate(job.faults[1:])]
    made = replace(
        job,
        arithmetic=a,
        faults=tuple(faults),
        standby=rng.choice((0, 0, 1, 1, 2)),
        elastic=None,
        slowness=min(job.slowness, 0.5),
        work=tuple(rng.choice((1.0, 1.0, 1.0, 3.0)) for _ in range(layers)),
        capacity=job.capacity + rng.choice((0, 2)),
    )
    return _with_one_layer_each(made) if rng.random() < 0.25 else made


def _with_measured_layers(job: Scenario, rng: random.Random) -> Scenario:
    """Make a job so long that the coordinator compares grids by layer times, and spread half of its faults over it."""
    a, steps = job.arithmetic, rng.randint(30, 45)
    stages = min(a.stages, 4)
    pipelines = a.pipelines if stages * a.pipelines <= 6 else 1
    microbatches, layers = max(pipelines, min(a.microbatches, 6)), stages * rng.choice((1, 2, 3))
    a = replace(
        a,
        stages=stages,
        pipelines=pipelines,
        microbatches=microbatches,
        groups=rng.randint(pipelines, microbatches),
        steps=steps,
        sizes=tuple(rng.choice((1, 2)) for _ in range(layers)),
    )
    faults = [replace(f, step=rng.randint(0, steps)) if rng.random() < 0.5 else f for f in job.faults]
    work = tuple(rng.choice((1.0, 1.0, 1.0, 3.0)) for _ in range(layers))
    return replace(
        job,
        arithmetic=a,
        faults=tuple(faults),
        slowness=min(job.slowness, 0.5),
        work=work,
        capacity=job.capacity + rng.choice((0, 1, 2)),
    )


def _with_measured_stages(job: Scenario, rng: random.Random) -> Scenario:
    """Make a job so long that the coordinator compares numbers of pipelines, and spread half of its faults over it."""
    steps = job.arithmetic.steps + 20
    faults = [replace(f, step=rng.randint(0, steps)) if rng.random() < 0.5 else f for f in job.faults]
    work = tuple(rng.choice((1.0, 1.0, 3.0)) for _ in range(job.arithmetic.layers))
    arithmetic = replace(job.arithmetic, steps=steps)
    return replace(job, arithmetic=arithmetic, faults=tuple(faults), slowness=min(job.slowness, 0.5), work=work)


def _with_one_layer_each(job: Scenario) -> Scenario:
    """Leave one layer to each stage, so that no other split helps, and leave no worker on standby."""
    stages = job.arithmetic.stages
    a = replace(job.arithmetic, sizes=job.arithmetic.sizes[:stages], ties=())
    return replace(job, arithmetic=a, work=job.work[:stages], standby=0, capacity=job.capacity + 2)


def _slow(rng: random.Random, fault: Fault, early: bool) -> Fault:
    seconds = rng.choice((2.0, 1e9, 1e9))
    fault = replace(fault, what=FaultKind.SLOW, factor=rng.choice((1.5, 2.0, 3.0, 5.0)), seconds=seconds, name="")
    return replace(fault, step=rng.randint(0, 4), role="owner", chained=False) if early else fault


def _with_siblings(job: Scenario, rng: random.Random) -> Scenario:
    """Give the job several pipelines, of one stage in at least half of the jobs. Let half of the kills at an
    instruction or frame strike where workers share a lost cell, or at a forward or backward.
    """
    a, pipelines = job.arithmetic, rng.choice((2, 3, 3, 4, 4, 5))
    stages = min(a.stages, rng.choice((1, 1, 2, 3)))
    microbatches = rng.randint(pipelines, 20)
    a = replace(
        a,
        stages=stages,
        pipelines=pipelines,
        microbatches=microbatches,
        groups=rng.randint(pipelines, microbatches),
        steps=rng.randint(4, 8) + max(0, a.steps - 12),
        sizes=a.sizes[: max(stages, rng.choice((1, 2, 4)))],
        ties=(),
        skipped=frozenset(step for step in a.skipped if step < 4),
    )
    grows = rng.random() < 0.9
    a = a if grows else replace(a, groups=pipelines)
    faults = [
        replace(f, pipeline=rng.randrange(pipelines), stage=rng.randrange(stages), step=min(f.step, a.steps - 1))
        for f in job.faults
    ]
    faults = [_at_portion(rng, f) if f.what in (FaultKind.KILL_AT, FaultKind.KILL_SENDING) else f for f in faults]
    least, most = rng.randint(1, pipelines), min(rng.randint(pipelines, 5), a.groups)
    elastic = (least, most, rng.choice((0, 1, 3))) if grows and rng.random() < 0.4 else None
    wanted = (most if elastic else pipelines) * stages + job.standby
    return replace(
        job,
        arithmetic=a,
        faults=tuple(faults),
        elastic=elastic,
        capacity=rng.choice((wanted, wanted, pipelines * stages)),
    )


def _at_portion(rng: random.Random, fault: Fault) -> Fault:
    if rng.random() < 0.5:
        return fault
    if fault.what is FaultKind.KILL_SENDING:
        return replace(fault, name="PARTIAL_SUM", count=rng.choice((0, 0, 1, 2)))
    name = rng.choice(("SendPartialSum", "AddPartialSums", "Forward", "Backward"))
    return replace(fault, name=f"{rng.choice(('before', 'after'))} {name}")


def _with_split_backwards(job: Scenario, rng: random.Random) -> Scenario:
    """Use the schedule ZBH1, which splits backwards into two parts, and apply `_at_parts` to the faults."""
    return replace(job, schedule="ZBH1", faults=tuple(_at_parts(rng, fault) for fault in job.faults))


def _with_schedules(job: Scenario, rng: random.Random) -> Scenario:
    """Add edits of the schedule a step before some faults, after some, and at three random steps; apply `_at_parts`."""
    faults: list[Fault] = []
    for fault in job.faults:
        edit = replace(fault, what=FaultKind.SCHEDULE, step=max(0, fault.step - 1), neighbours=0, with_node=False)
        faults += [replace(edit, chained=False)] if rng.random() < 0.6 else []
        faults.append(_at_parts(rng, fault))
        faults += [replace(edit, chained=True, delay=10 ** rng.uniform(-4, -1))] if rng.random() < 0.4 else []
    last = job.arithmetic.steps
    more = [replace(job.faults[0], what=FaultKind.SCHEDULE, step=rng.randint(0, last), chained=False) for _ in range(3)]
    return replace(job, faults=(*more[:1], *faults, *more[1:]))


def _at_parts(rng: random.Random, fault: Fault) -> Fault:
    """Return the fault; a kill at a forward or backward becomes a kill at a whole backward or at a part of one."""
    when, _, name = fault.name.partition(" ")
    parts = ("Backward", "BackwardRest", "BackwardInput", "BackwardInput", "BackwardWeight", "BackwardWeight")
    return replace(fault, name=f"{when} {rng.choice(parts)}") if name in ("Forward", "Backward") else fault


def _with_devices(job: Scenario, rng: random.Random) -> Scenario:
    """Give each worker two or three devices. A stage has at least one layer for each device, and exactly one if layers
    are tied.
    """
    a, devices = job.arithmetic, rng.choice((2, 2, 3))
    layers = a.stages * devices
    more = layers if a.ties else max(len(a.sizes), layers + rng.choice((0, 0, 1, 3)))
    sizes = (*a.sizes, *(rng.choice((1, 2)) for _ in range(more)))[:more]
    ties = tuple(tuple(sorted(rng.sample(range(layers), len(tie)))) for tie in a.ties)
    work = tuple(job.work[i % len(job.work)] for i in range(more)) if job.work else ()
    return replace(job, arithmetic=replace(a, sizes=sizes, ties=ties), per_worker=devices, work=work)


def _with_replicas(job: Scenario, rng: random.Random) -> Scenario:
    """Give each state several replicas, and let kills strike neighbours or zones in the same instant."""
    replicas, careful = rng.choice((2, 2, 3)), rng.random() < 0.5
    faults = []
    for fault in job.faults:
        if careful and fault.what in (FaultKind.KILL_STAGE, FaultKind.KILL_ALL):
            fault = replace(fault, what=FaultKind.KILL)
        if fault.what in KILLS and rng.random() < 0.8:
            fault = replace(fault, neighbours=rng.randint(1, replicas - 1))
        if rng.random() < 0.1:
            fault = replace(fault, what=FaultKind.KILL_ZONES, neighbours=0)
        faults.append(fault)
    return replace(job, replicas=replicas, mode="Replicas", faults=tuple(faults), care=2 if careful else job.care)


def _with_nodes(job: Scenario, rng: random.Random) -> Scenario:
    """Put several workers on each node; most kills and notices strike all workers of a node in the same instant."""
    careful = rng.random() < 0.5
    faults = []
    for fault in job.faults:
        if careful and fault.what in (FaultKind.KILL_STAGE, FaultKind.KILL_ALL):
            fault = replace(fault, what=FaultKind.KILL)
        if fault.what in (*SINGLE_KILLS, FaultKind.NOTICE) and rng.random() < 0.7:
            fault = replace(fault, with_node=True, neighbours=0)
        faults.append(fault)
    per_node = rng.choice((2, 2, 3, 4))
    return replace(job, mode="Replicas", per_node=per_node, faults=tuple(faults), care=2 if careful else job.care)


def _arithmetic(rng: random.Random, seed: int, grow: bool, resplit: bool) -> Arithmetic:
    stages = rng.choice((1, 2, 2, 3, 3, 4, 4, 5, 6) if not resplit else (2, 3, 3, 4, 5, 6))
    pipelines = rng.choice((1, 1, 2, 2, 3) if not resplit else (1, 1, 1, 2)) if stages < 6 else rng.choice((1, 2))
    microbatches = rng.randint(pipelines, min(24, 4 * stages if stages > 1 else 6, 60 // stages) + pipelines)
    ties = []
    if stages > 1 and rng.random() < 0.3:
        ties.append(tuple(sorted(rng.sample(range(stages), rng.randint(2, min(3, stages))))))
    microbatches = min(24, microbatches)
    sizes = [rng.choice((1, 2, 3, 5)) for _ in range(stages)]
    chance = random.Random(f"{seed} layers")
    if resplit or not ties:  # tied layers are stages of their own
        sizes += [chance.choice((1, 2)) for _ in range(stages * chance.choice((0, 1, 2)) + chance.choice((0, 1)))]
    steps = rng.randint(3, max(4, min(12, 500 // (stages * microbatches))))
    groups = rng.randint(pipelines, microbatches)
    if not grow and rng.random() >= 0.8 and not resplit:
        groups = pipelines
    return Arithmetic(
        seed=seed,
        stages=stages,
        pipelines=pipelines,
        microbatches=microbatches,
        steps=steps,
        sizes=tuple(sizes),
        ties=() if resplit else tuple(ties),
        groups=groups,
        skipped=_skipped(random.Random(f"{seed} skipped"), steps),
        evaluated=_evaluated(random.Random(f"{seed} evaluated")),
    )


def _skipped(chance: random.Random, steps: int) -> frozenset[int]:
    """Draw the skipped steps: none in seven of ten jobs, else one to three in a row and one at a random place."""
    if chance.random() > 0.3:
        return frozenset()
    first = chance.randrange(steps)
    return frozenset({*range(first, first + chance.randint(1, 3)), chance.randrange(steps)})


def _evaluated(chance: random.Random) -> tuple[int, int]:
    """Draw the steps between two evaluations, and an evaluation's batches; (0, 0) for none, in three of five jobs."""
    return (chance.choice((1, 2, 3, 50)), chance.randint(1, 5)) if chance.random() < 0.4 else (0, 0)


WEIGHTS = {
    FaultKind.KILL: 6,
    FaultKind.VANISH: 1,
    FaultKind.KILL_AT: 5,
    FaultKind.KILL_SENDING: 4,
    FaultKind.FREEZE: 2,
    FaultKind.NOTICE: 4,
    FaultKind.TERM: 1,
    FaultKind.CUT_LINK: 3,
    FaultKind.STALL_LINK: 2,
    FaultKind.CUT_CHANNEL: 3,
    FaultKind.PARTITION: 1,
    FaultKind.CAPACITY: 1,
}
ROLES = {"owner": 6, "replica": 3, "any": 3, "root": 3, "newest": 2, "heir": 3}
NAMES = (
    "Evaluate",
    "Forward",
    "Backward",
    "ScatterGradients",
    "ReduceGradients",
    "GatherGradients",
    "ExchangeTied",
    "SumTied",
    "SyncReplicas",
    "ReportReady",
    "OptimizerStep",
    "ReplicaUpdate",
    "Rehearsal",
)


FRAMES = (
    "ACTIVATION",
    "GRADIENT",
    "CONTRIBUTION",
    "RESULT",
    "TIED",
    "READY",
    "COMMIT",
    "SYNC",
    "LAYER",
    "ANNOUNCE",
    "HEARD",
    "ASK",
    "LOGGED",
)


def _faults(rng: random.Random, a: Arithmetic, restarts: bool, checkpoints: bool, resplit: bool) -> tuple[Fault, ...]:
    weights = {**WEIGHTS, FaultKind.RESTART: 4} if restarts else dict(WEIGHTS)
    if checkpoints:
        weights |= {FaultKind.KILL_STAGE: 5, FaultKind.KILL_ALL: 3}
    count = rng.choice((1, 1, 2, 2, 3, 3, 4, 5, 6, 8))
    if checkpoints:
        chance = random.Random(f"{a.seed} layers travel")
        return tuple(_while_layers_travel(chance, _fault(rng, a, weights, first=i == 0)) for i in range(count))
    if not resplit:
        return tuple(_fault(rng, a, weights, first=i == 0) for i in range(count))
    long = replace(a, steps=a.steps + 15)
    none = replace(_fault(rng, replace(a, steps=1), {FaultKind.CAPACITY: 1}, first=True), seconds=rng.choice((1, 3, 9)))
    lost = _fault(rng, replace(a, steps=3), {FaultKind.KILL: 3, FaultKind.VANISH: 1, FaultKind.TERM: 1}, first=True)
    more = [_while_layers_travel(rng, _fault(rng, long, weights, first=i == 0)) for i in range(count)]
    return (none, lost, *more)


def _while_layers_travel(rng: random.Random, fault: Fault) -> Fault:
    """Return the fault; half of the kills at an instruction or frame move to frames that bring or request layers."""
    if fault.what in (FaultKind.KILL_AT, FaultKind.KILL_SENDING) and rng.random() < 0.5:
        name = rng.choice(("LAYER", "LAYER", "LAYERS_WANTED"))
        return replace(fault, what=FaultKind.KILL_SENDING, name=name, step=0, chained=False)
    return fault


def _fault(rng: random.Random, a: Arithmetic, weights: dict[FaultKind, int], first: bool) -> Fault:
    what = rng.choices(list(weights), list(weights.values()))[0]
    chained = not first and rng.random() < 0.6
    name = ""
    if what is FaultKind.KILL_AT:
        name = f"{rng.choice(('before', 'after'))} {rng.choice(NAMES)}"
    elif what is FaultKind.KILL_SENDING:
        name = rng.choice(FRAMES) if rng.random() < 0.8 else "any"
    return Fault(
        what=what,
        step=rng.randint(-1 if rng.random() < 0.1 else 0, a.steps),
        delay=10 ** rng.uniform(-4, 0) if chained else SPAN_SECONDS * rng.random() * rng.choice((0.3, 1.0, 3.0)),
        chained=chained,
        role=rng.choices(list(ROLES), list(ROLES.values()))[0],
        pipeline=rng.randrange(a.pipelines),
        stage=rng.randrange(a.stages),
        seconds=_seconds(rng, what),
        name=name,
        count=rng.choice((0, 0, 0, 1, 2, 3, 5, 8)),
    )


def _seconds(rng: random.Random, what: FaultKind) -> float:
    match what:
        case FaultKind.NOTICE | FaultKind.TERM:
            return rng.choice((0.02, 0.2, 1.0, 5.0, 30.0))
        case FaultKind.CAPACITY:
            return rng.choice((1.0, 5.0, 20.0))
        case FaultKind.VANISH:
            return rng.choice((0.5, 3.0, 15.0))
        case _:
            return float(10 ** rng.uniform(-2.5, 0.9))
