"""What an event costs the operator, in CPU time, so that other processes hardly count.

    python bench/events.py [--stages 4] [--pipelines 2] [--repeat 3000]

A job's coordinator: a tick and a heartbeat when all is well, a commit, a notice (to a plan without the worker), and
ticks and commits while that worker is still there. And a node's event on its way through kopf to the operator's cache.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import kopf
import typer
from kopf._core.actions.lifecycles import all_at_once
from kopf._core.engines.indexing import OperatorIndexers
from kopf._core.reactor.inventory import ResourceMemories
from kopf._core.reactor.processing import process_resource_event

from _common import main, show
from bamboo_core.control import protocol
from bamboo_core.control.channel_events import Received
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.events import Event, PreemptionNotice, Tick
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.kube.kubeconfig import Access, ClusterServer, User
from bamboo_operator.auth.pod_tokens import TokenReviewer
from bamboo_operator.auth.worker_gateway import WorkerGateway
from bamboo_operator.cluster.cache import ClusterCache
from bamboo_operator.jobs.controller import JobController
from bamboo_operator.jobs.shared import SharedResources
from bamboo_operator.kube.api_calls import ApiCallCounts
from bamboo_operator.kube.client import ApiClient, connect
from bamboo_operator.manifests.worker_pod import WorkerPodSettings
from bamboo_operator.watch_handlers import kopf_settings, watch_handlers

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from world import World  # type: ignore[import-not-found]

NOTICE_SECONDS = 120.0
KEPT_STEPS = 500  # whose losses are kept


def run(
    stages: Annotated[int, typer.Option(min=2)] = 4,
    pipelines: Annotated[int, typer.Option(min=1)] = 2,
    repeat: Annotated[int, typer.Option(min=1)] = 3000,
) -> None:
    """Microseconds of CPU time, on average."""
    main(_run(stages, pipelines, repeat))


async def _run(stages: int, pipelines: int, repeat: int) -> None:
    world = World(stages, pipelines, 0)
    world.settle()
    state, now, (first, victim, *_) = world.state, world.now, list(world.state.workers)
    for _ in range(KEPT_STEPS):
        state, _ = coordinator.step(state, _commit(first, state), now)
    leaving, _ = coordinator.step(state, PreemptionNotice(victim, NOTICE_SECONDS), now)
    leaving = _obeyed(leaving, now)
    beat = Received(first, protocol.Heartbeat(step=state.step, doing="runs its schedule"))
    rows: list[tuple[str, CoordinatorState, Event]] = [
        ("tick", state, Tick()),
        ("heartbeat", state, beat),
        ("commit", state, _commit(first, state)),
        ("notice, to its plan", state, PreemptionNotice(victim, NOTICE_SECONDS)),
        ("tick, while a worker leaves", leaving, Tick()),
        ("heartbeat, while a worker leaves", leaving, beat),
        ("commit, while a worker leaves", leaving, _commit(first, leaving)),
    ]
    found = [(name, _cost(partial(coordinator.step, state, event, now), repeat)) for name, state, event in rows]
    found.append(("a node's event, through kopf to the cache", await _node_event(repeat // 3)))
    title = f"a job of {stages * pipelines} workers: CPU time of the operator, µs"
    show(title, ("event", "each"), [[name, f"{1e6 * seconds:.0f}"] for name, seconds in found])


def _cost(act: Callable[[], Any], repeat: int) -> float:
    act()
    began = time.process_time()
    for _ in range(repeat):
        act()
    return (time.process_time() - began) / repeat


def _commit(worker: str, state: CoordinatorState) -> Event:
    message = protocol.StepCommitted(
        step=state.step,
        generation=state.progress.generation,
        loss=1.0,
        gradient_norm=1.0,
        microbatches=state.spec.training.microbatches,
        seconds=1.0,
    )
    return Received(worker, message)


def _obeyed(state: CoordinatorState, now: float) -> CoordinatorState:
    """Every worker has the newest plan, and replicas are in sync, until there is no newer plan."""
    epoch = 0
    while state.plan is not None and state.plan.epoch > epoch:
        plan, epoch = state.plan, state.plan.epoch
        said = [Received(w, protocol.PlanApplied(epoch=epoch)) for w in state.workers]
        said += [
            Received(plan.at(cell).owner, protocol.ReplicaSynced(cell=cell, replica=replica))
            for cell in plan.cells()
            for replica in plan.at(cell).replicas
        ]
        for event in said:
            state, _ = coordinator.step(state, event, now)
    return state


async def _node_event(repeat: int) -> float:
    """The seconds of an event of a node, with what a node's object has on a cloud, managedFields above all."""
    nowhere = Access(context="none", server=ClusterServer(url="http://127.0.0.1:1"), user=User())
    api = ApiClient(connect(nowhere, ApiCallCounts(), 1))  # is asked for nothing
    shared = SharedResources(
        cluster=ClusterCache(),
        gateway=WorkerGateway(),
        api=api,
        reviews=TokenReviewer(api),
        key=b"k" * 16,
        url="",
        settings=WorkerPodSettings(coordinator_url="", image=""),
    )
    handlers, indexers = watch_handlers(JobController(shared), shared), OperatorIndexers()
    indexers.ensure(handlers._indexing.get_all_handlers())
    settings, memories, nodes = kopf_settings(), ResourceMemories(), kopf.Resource("", "v1", "nodes")

    async def told(number: int) -> None:
        await process_resource_event(
            lifecycle=all_at_once,
            indexers=indexers,
            registry=handlers,
            settings=settings,
            memories=memories,
            memobase=cast(Any, kopf.Memo()),
            resource=nodes,
            event_queue=asyncio.Queue(),
            raw_event={"type": "MODIFIED", "object": cast(Any, _node(number))},
        )

    await told(0)
    assert shared.cluster.nodes
    began = time.process_time()
    for number in range(repeat):
        await told(number)
    return (time.process_time() - began) / repeat


def _node(number: int) -> dict[str, Any]:
    """One of 50; its taint comes and goes."""
    labels = {f"example.com/label-{index}": "value" for index in range(15)}
    condition = {"status": "False", "reason": "AllIsWell", "message": "there is no such problem on this node"}
    kinds = [f"Problem{index}" for index in range(8)]
    owned: dict[str, Any] = {
        "f:status": {"f:conditions": {f"k:{kind}": {f"f:{key}": {} for key in condition} for kind in kinds}}
    }
    managers = ("kubelet", "kube-controller-manager", "cloud-node-manager")
    return {
        "metadata": {
            "name": f"node-{number % 50}",
            "uid": f"uid-{number % 50}",
            "labels": labels,
            "annotations": labels,
            "managedFields": [{"manager": name, "operation": "Update", "fieldsV1": owned} for name in managers],
        },
        "spec": {"taints": [{"key": "example.com/going", "effect": "NoSchedule"}] * (number % 2)},
        "status": {
            "conditions": [{"type": kind, **condition} for kind in kinds],
            "images": [{"names": [f"registry.example/image-{index}:1"], "sizeBytes": 1} for index in range(30)],
        },
    }


if __name__ == "__main__":
    typer.run(run)
