"""What a seed stands for: a job, and what befalls it, its pods, its cluster and its operator. Pure."""

import random
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from sim_stage import Arithmetic


class What(StrEnum):
    SUSPEND = "suspend"  # and resume it later
    SCALE = "scale"
    BREAK = "break the spec"  # and mend it later
    RECREATE = "delete the job and make it anew"
    DELETE_POD = "delete a pod"
    REMOVE_POD = "remove a pod by force"
    CRASH = "crash"
    KILL = "kill"
    VANISH = "take a node away"
    HANG = "a node hangs"  # its pods are deleted later, and never go
    TAKE = "mark a node and take it away later"
    MARK = "mark a node and take the mark away later"
    DROUGHT = "no nodes in the first pool"
    QUOTA = "no more pods"
    API = "the API server fails"
    WATCH = "watches are interrupted"
    OPERATOR = "the operator restarts"
    CHANNEL = "cut a channel"
    FREEZE = "freeze a worker"
    CUT_OFF = "no worker reaches the operator"
    ISOLATE = "the operator restarts, and no worker reaches it"


WEIGHTS = {
    What.SUSPEND: 4, What.SCALE: 3, What.BREAK: 1, What.RECREATE: 1, What.DELETE_POD: 3, What.REMOVE_POD: 2,
    What.CRASH: 3, What.KILL: 3, What.VANISH: 3, What.TAKE: 4, What.MARK: 1, What.DROUGHT: 2, What.QUOTA: 1,
    What.API: 3, What.WATCH: 4, What.OPERATOR: 3, What.CHANNEL: 2, What.HANG: 2, What.ISOLATE: 1,
    What.FREEZE: 2, What.CUT_OFF: 1,
}  # fmt: skip
TOGETHER = (  # what is worse in company
    (What.CUT_OFF, What.SUSPEND),
    (What.SUSPEND, What.WATCH),
    (What.WATCH, What.SUSPEND),
    (What.API, What.SCALE, What.SCALE, What.SCALE),
    (What.API, What.SUSPEND, What.OPERATOR),
    (What.API, What.KILL, What.REMOVE_POD, What.REMOVE_POD),
    (What.KILL, What.HANG),
    (What.HANG, What.OPERATOR),
    (What.FREEZE, What.OPERATOR),
    (What.DROUGHT, What.KILL, What.OPERATOR),
)
JOB = ("default", "sim")
SPAN_SECONDS = 240.0
LONG_SECONDS = 900.0  # that nobody reaches the operator; longer than silent workers are waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """at, seconds: when, and how long it lasts. number: picks whom, or how many."""

    what: What
    at: float
    seconds: float
    number: int

    def __str__(self) -> str:
        return f"at {self.at:7.2f}: {self.what}, number {self.number}, {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """careful: workers are taken only while every layer has two holders, so that the job can always go on.

    grid: of time, in seconds (see opsim_loop).
    """

    seed: int
    arithmetic: Arithmetic
    most: int  # pipelines
    standby: int
    policy: str  # for pods when the job is over
    mode: str
    pools: tuple[dict[str, Any], ...]
    careful: bool
    slowdown: float
    grid: float
    acts: tuple[Act, ...]

    def manifest(self) -> dict[str, Any]:
        a = self.arithmetic
        spec: dict[str, Any] = {
            "task": {"entrypoint": "stand.in:build"},
            "training": a.training(),
            "topology": {"stages": a.stages, "pipelines": a.pipelines},
            "elastic": {"minPipelines": 1, "maxPipelines": self.most, "stabilizationSeconds": 5},
            "redundancy": {"mode": self.mode},
            "standby": {"workers": self.standby},
            "cleanPodPolicy": self.policy,
            "failurePolicy": {"backoffLimit": 50},
        }
        if self.pools:
            spec["nodePools"] = [dict(pool) for pool in self.pools]
        metadata = {"name": JOB[1], "namespace": JOB[0]}
        return {"apiVersion": "bamboo.dev/v1alpha1", "kind": "BambooJob", "metadata": metadata, "spec": spec}

    def __str__(self) -> str:
        a = self.arithmetic
        return (
            f"seed {self.seed}: {a.stages} stages x {a.pipelines} to {self.most} pipelines, {a.microbatches} "
            f"microbatches, {a.steps} steps, standby {self.standby}, pods {self.policy}, {self.mode}, "
            f"pools {len(self.pools)}, careful {self.careful}, slowdown {self.slowdown:.0f}, grid {self.grid}"
        )


POOLS = ({"name": "spot"}, {"name": "dear", "capacity": "OnDemand", "afterSeconds": 20, "revert": True})


def story(seed: int) -> Story:
    rng = random.Random(f"operator {seed}")
    stages, pipelines = rng.choice((2, 2, 3)), rng.choice((1, 1, 2))
    return Story(
        seed=seed,
        arithmetic=Arithmetic(
            seed=seed, stages=stages, pipelines=pipelines, microbatches=rng.randint(pipelines + 1, 4),
            steps=rng.randint(40, 120), sizes=(1,) * stages, groups=pipelines + 1,
        ),
        most=rng.randint(pipelines, 2),
        standby=rng.choice((0, 0, 1)),
        policy=rng.choice(("Running", "None")),
        mode=rng.choice(("LazyForward", "EagerForward")),
        pools=rng.choice(((), POOLS, ({"name": "spot", "maxWorkers": 2 * stages + 2},))),
        careful=rng.random() < 0.7,
        slowdown=10 ** rng.uniform(1.5, 2.5),
        grid=rng.choice((0.0, 0.01, 0.1)),
        acts=_acts(rng),
    )  # fmt: skip


def _acts(rng: random.Random) -> tuple[Act, ...]:
    """Many come close after the one before."""
    acts: list[Act] = []
    at = rng.uniform(0.0, 30.0)
    for _ in range(rng.choice((1, 2, 3, 4, 5, 6, 8))):
        alone = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
        for what in rng.choice(TOGETHER) if rng.random() < 0.3 else alone:
            acts.append(Act(what=what, at=at, seconds=10 ** rng.uniform(-1.5, 2.0), number=rng.randrange(1000)))
            at += 10 ** rng.uniform(-2, 1.0)
        at += 0.0 if rng.random() < 0.6 else rng.uniform(0.0, 60.0)
    return tuple(act for act in acts if act.at < SPAN_SECONDS)


def _at(when: float, what: What, seconds: float = 0.0, number: int = 0) -> Act:
    return Act(what=what, at=when, seconds=seconds, number=number)


NAMED = {  # that went wrong once
    "nobody reaches the operator for a while": (_at(60, What.CUT_OFF, 8.0),),
    "nobody reaches the operator for a minute, and then one after the other": (_at(60, What.CUT_OFF, 60.0),),
    "nobody reaches the operator after its restart": (_at(60, What.ISOLATE, 1.0, 8),),
    "a node hangs before its worker has joined": (_at(1.9, What.HANG, 0.1),),
    "suspended while nobody hears it, and resumed": (_at(60, What.CUT_OFF, 25.0), _at(61, What.SUSPEND, 19.0)),
    "all pods go while nobody watches": (_at(60, What.WATCH, 30.0), _at(60.5, What.SUSPEND, 1.0)),
    "a lost worker lives, and the operator restarts": (_at(60, What.FREEZE, 9.0), _at(67, What.OPERATOR, 0.5)),
    "scaled while answers are lost": (
        _at(60, What.API, 30.0, 1), *(_at(61 + 2 * n, What.SCALE, 0.0, 2 * n + n % 2) for n in range(12)),
    ),
    "the operator restarts while the manifest is not valid, and a worker is killed": (
        _at(60, What.BREAK, 100.0, 1), _at(62, What.OPERATOR, 1.0), _at(80, What.KILL),
    ),
    "the operator restarts while the task is another one, and a worker is killed": (
        _at(60, What.BREAK, 100.0, 0), _at(62, What.OPERATOR, 1.0), _at(80, What.KILL),
    ),
    "scaled, and then the operator restarts while the manifest is not valid": (
        _at(50, What.SCALE, 0.0, 3), _at(60, What.BREAK, 100.0, 1), _at(62, What.OPERATOR, 1.0),
        _at(70, What.SUSPEND, 20.0),
    ),
    "suspended while answers are lost, and the operator restarts": (
        _at(60, What.API, 20.0, 1), _at(62, What.SUSPEND, 5.0), _at(66, What.OPERATOR, 0.5),
        _at(70, What.OPERATOR, 0.5),
    ),
}  # fmt: skip


def named(name: str, seed: int) -> Story:
    """A job of that seed, which that befalls."""
    return replace(story(seed), acts=NAMED[name], careful=True)
