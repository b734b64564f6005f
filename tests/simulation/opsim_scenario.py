"""Scenarios of the operator's simulation: a job drawn by its seed, with drawn disturbances or one of REGRESSIONS."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from sim_arithmetic import Arithmetic


class DisturbanceKind(StrEnum):
    """A kind of disturbance. weight: its relative frequency among disturbances drawn singly, not from TOGETHER."""

    weight: int

    def __new__(cls, name: str, weight: int) -> "DisturbanceKind":
        kind = str.__new__(cls, name)
        kind._value_, kind.weight = name, weight
        return kind

    SUSPEND = "suspend", 4  # and resume it later
    SCALE = "scale", 3
    ROLL = "give workers another image", 4  # that may be missing, or not work
    BREAK = "break the spec", 1  # and mend it later
    RECREATE = "delete the job and make it anew", 1
    DELETE_POD = "delete a pod", 3
    REMOVE_POD = "remove a pod by force", 2
    CRASH = "crash", 3
    KILL = "kill", 3
    VANISH = "take a node away", 3
    TAKE = "mark a node and take it away later", 4
    MARK = "mark a node and take the mark away later", 1
    DROUGHT = "no nodes in the first pool", 2
    QUOTA = "no more pods", 1
    API = "the API server fails", 3
    WATCH = "watches are interrupted", 4
    OPERATOR = "the operator restarts", 3
    CHANNEL = "cut a channel", 2
    HANG = "a node hangs", 2  # its pod is deleted later, and stays Terminating
    ISOLATE = "the operator restarts, and no worker reaches it", 1
    FREEZE = "freeze a worker", 2
    CUT_OFF = "no worker reaches the operator", 1
    # of jobs in queues
    PREEMPT = "more important pods want quota", 12
    STOP = "the queue is drained", 2
    UNQUEUE = "a pod's Workload is deleted", 2
    KUEUE = "Kueue does not answer", 3


OF_QUEUES = (DisturbanceKind.PREEMPT, DisturbanceKind.STOP, DisturbanceKind.UNQUEUE, DisturbanceKind.KUEUE)
TOGETHER = (  # kinds that are worse together
    (DisturbanceKind.CUT_OFF, DisturbanceKind.SUSPEND),
    (DisturbanceKind.ROLL, DisturbanceKind.KILL, DisturbanceKind.OPERATOR),
    (DisturbanceKind.ROLL, DisturbanceKind.ROLL, DisturbanceKind.TAKE),
    (DisturbanceKind.QUOTA, DisturbanceKind.ROLL),
    (DisturbanceKind.SUSPEND, DisturbanceKind.WATCH),
    (DisturbanceKind.WATCH, DisturbanceKind.SUSPEND),
    (DisturbanceKind.API, DisturbanceKind.SCALE, DisturbanceKind.SCALE, DisturbanceKind.SCALE),
    (DisturbanceKind.API, DisturbanceKind.SUSPEND, DisturbanceKind.OPERATOR),
    (DisturbanceKind.API, DisturbanceKind.KILL, DisturbanceKind.REMOVE_POD, DisturbanceKind.REMOVE_POD),
    (DisturbanceKind.KILL, DisturbanceKind.HANG),
    (DisturbanceKind.HANG, DisturbanceKind.OPERATOR),
    (DisturbanceKind.FREEZE, DisturbanceKind.OPERATOR),
    (DisturbanceKind.DROUGHT, DisturbanceKind.KILL, DisturbanceKind.OPERATOR),
)
JOB = ("default", "sim")
MISSING, CRASHING = "missing", "crashing"  # images
SPAN_SECONDS = 240.0
LONG_SECONDS = 900.0  # in which no worker reaches the operator, at most; longer than silent workers are waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """A disturbance of a simulated job. at: when it begins, in virtual seconds since the start of the run."""

    kind: DisturbanceKind
    at: float
    seconds: float  # how long it lasts; some kinds ignore, scale or bound this
    number: int  # picks whom, or how many

    def __str__(self) -> str:
        return f"at {self.at:7.2f}: {self.kind}, number {self.number}, {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterScenario:
    """A job on a simulated cluster, and its disturbances."""

    seed: int
    arithmetic: Arithmetic
    most: int  # pipelines
    standby: int
    mode: str
    pools: tuple[dict[str, Any], ...]
    careful: bool  # workers are taken only while every layer has two holders, so that the job can always go on
    slowdown: float
    grid: float  # of time, in seconds (see opsim_loop)
    disturbances: tuple[Disturbance, ...]
    # the spec's section `checkpoint`; random jobs have none, so all state that they lose needs a second holder
    checkpoint: dict[str, Any] | None = None
    # the job is in a queue with quota for all its workers, and goes on from checkpoints after losses
    queued: bool = False
    chooses: bool = False  # the coordinator chooses stages and pipelines, of all grids that the workers can run

    @property
    def work(self) -> tuple[float, ...]:
        """The work of each layer, relative to the others."""
        rng = random.Random(f"work {self.seed}")
        return tuple(rng.choice((10.0, 10.0, 30.0)) for _ in range(self.arithmetic.layers))

    def manifest(self) -> dict[str, Any]:
        a = self.arithmetic
        spec: dict[str, Any] = {
            "task": {"entrypoint": "stand.in:build"},
            "training": a.training(),
            "topology": {} if self.chooses else {"stages": a.stages},
            "elastic": {"maxWorkers": a.stages * self.most, "stabilizationSeconds": 5},
            "redundancy": {"mode": self.mode},
            "standby": {"workers": self.standby},
            "backoffLimit": 50,
        }
        if self.queued:
            spec["queue"] = {"name": "queue", "priorityClass": "needed", "growthPriorityClass": "growth"}
            spec["checkpoint"] = {"everySteps": 10, "storage": "memory://queued"}
        if self.checkpoint:
            spec["checkpoint"] = dict(self.checkpoint)
        if self.pools:
            spec["nodePools"] = [dict(pool) for pool in self.pools]
        metadata = {"name": JOB[1], "namespace": JOB[0]}
        return {"apiVersion": "bamboo.dev/v1alpha1", "kind": "BambooJob", "metadata": metadata, "spec": spec}

    def __str__(self) -> str:
        a = self.arithmetic
        return (
            f"seed {self.seed}: {a.stages} stages x {a.pipelines} to {self.most} pipelines, {a.microbatches} "
            f"microbatches, {a.steps} steps, standby {self.standby}, {self.mode}, "
            f"pools {len(self.pools)}, careful {self.careful}, slowdown {self.slowdown:.0f}, grid {self.grid}, "
            f"chooses {self.chooses}, queued {self.queued}"
        )


POOLS = ({"name": "spot"}, {"name": "dear", "capacity": "OnDemand", "afterSeconds": 20})


def scenario(seed: int, *, chooses: bool = False, queued: bool = False) -> ClusterScenario:
    """Return the scenario of a seed. chooses: the coordinator chooses the grid. queued: the job is in a queue, with
    further kinds of disturbances.
    """
    rng = random.Random(f"operator {seed}")
    stages, pipelines = rng.choice((2, 2, 3)), rng.choice((1, 1, 2))
    return ClusterScenario(
        seed=seed,
        arithmetic=Arithmetic(
            seed=seed,
            stages=stages,
            pipelines=pipelines,
            microbatches=rng.randint(pipelines + 1, 4),
            steps=rng.randint(40, 120),
            sizes=(1,) * (3 * stages),
            groups=pipelines + 1,
        ),
        most=rng.randint(pipelines, 2),
        standby=rng.choice((0, 0, 1)),
        mode=rng.choice(("Replicas", "Auto")),
        pools=rng.choice(((), POOLS, ({"name": "spot", "maxWorkers": 2 * stages + 2},))),
        careful=rng.random() < 0.7,
        slowdown=10 ** rng.uniform(1.5, 2.5),
        grid=rng.choice((0.0, 0.01, 0.1)),
        disturbances=_disturbances(rng, [kind for kind in DisturbanceKind if queued or kind not in OF_QUEUES]),
        chooses=chooses,
        queued=queued,
    )


def _disturbances(rng: random.Random, kinds: Sequence[DisturbanceKind]) -> tuple[Disturbance, ...]:
    """Draw disturbances that begin before SPAN_SECONDS, in order: some of `kinds` and some combinations of TOGETHER."""
    disturbances: list[Disturbance] = []
    at = rng.uniform(0.0, 30.0)
    for _ in range(rng.choice((1, 2, 3, 4, 5, 6, 8))):
        alone = rng.choices(kinds, [kind.weight for kind in kinds])
        for kind in rng.choice(TOGETHER) if rng.random() < 0.3 else alone:
            disturbances.append(
                Disturbance(kind=kind, at=at, seconds=10 ** rng.uniform(-1.5, 2.0), number=rng.randrange(1000))
            )
            at += 10 ** rng.uniform(-2, 1.0)
        at += 0.0 if rng.random() < 0.6 else rng.uniform(0.0, 60.0)
    return tuple(disturbance for disturbance in disturbances if disturbance.at < SPAN_SECONDS)


def _at(when: float, kind: DisturbanceKind, seconds: float = 0.0, number: int = 0) -> Disturbance:
    return Disturbance(kind=kind, at=when, seconds=seconds, number=number)


REGRESSIONS = {  # disturbances under which a run once failed
    "nobody reaches the operator for a while": (_at(60, DisturbanceKind.CUT_OFF, 8.0),),
    "nobody reaches the operator for a minute, and then one after the other": (_at(60, DisturbanceKind.CUT_OFF, 60.0),),
    "nobody reaches the operator after its restart": (_at(60, DisturbanceKind.ISOLATE, 1.0, 8),),
    "a node hangs before its worker has joined": (_at(1.9, DisturbanceKind.HANG, 0.1),),
    "suspended while nobody hears it, and resumed": (
        _at(60, DisturbanceKind.CUT_OFF, 25.0),
        _at(61, DisturbanceKind.SUSPEND, 19.0),
    ),
    "suspended while a worker does not hear it, resumed, and the operator restarts": (
        _at(60, DisturbanceKind.CHANNEL, 4.0),
        _at(60.2, DisturbanceKind.SUSPEND, 0.4),
        _at(61.5, DisturbanceKind.OPERATOR, 0.1),
    ),
    "all pods go while nobody watches": (_at(60, DisturbanceKind.WATCH, 30.0), _at(60.5, DisturbanceKind.SUSPEND, 1.0)),
    "a lost worker lives, and the operator restarts": (
        _at(60, DisturbanceKind.FREEZE, 9.0),
        _at(67, DisturbanceKind.OPERATOR, 0.5),
    ),
    "scaled while answers are lost": (
        _at(60, DisturbanceKind.API, 30.0, 1),
        *(_at(61 + 2 * n, DisturbanceKind.SCALE, 0.0, 2 * n + n % 2) for n in range(12)),
    ),
    "the operator restarts while the manifest is not valid, and a worker is killed": (
        _at(60, DisturbanceKind.BREAK, 100.0, 1),
        _at(62, DisturbanceKind.OPERATOR, 1.0),
        _at(80, DisturbanceKind.KILL),
    ),
    "the operator restarts while the task is another one, and a worker is killed": (
        _at(60, DisturbanceKind.BREAK, 100.0, 0),
        _at(62, DisturbanceKind.OPERATOR, 1.0),
        _at(80, DisturbanceKind.KILL),
    ),
    "scaled, and then the operator restarts while the manifest is not valid": (
        _at(50, DisturbanceKind.SCALE, 0.0, 3),
        _at(60, DisturbanceKind.BREAK, 100.0, 1),
        _at(62, DisturbanceKind.OPERATOR, 1.0),
        _at(70, DisturbanceKind.SUSPEND, 20.0),
    ),
    "suspended while answers are lost, and the operator restarts": (
        _at(60, DisturbanceKind.API, 20.0, 1),
        _at(62, DisturbanceKind.SUSPEND, 5.0),
        _at(66, DisturbanceKind.OPERATOR, 0.5),
        _at(70, DisturbanceKind.OPERATOR, 0.5),
    ),
}


def regression(name: str, seed: int, *, chooses: bool = False) -> ClusterScenario:
    """Return a seed's scenario, made `careful`, with REGRESSIONS[name]: disturbances under which a run once failed."""
    return replace(scenario(seed, chooses=chooses), disturbances=REGRESSIONS[name], careful=True)
