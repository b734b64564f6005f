"""Replacement of workers one after the other, when the job's `worker` section or the operator's release changes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bamboo_core.control import protocol
from bamboo_core.control.platform import Platform
from bamboo_core.control.protocol import Received, WorkerJoined
from bamboo_core.job.spec import JobSpec
from bamboo_core.names import LABEL_NODE_POOL, LABEL_WORKER_REVISION
from bamboo_operator.pods.disruption_budget import REPAIR_SECONDS
from bamboo_operator.pods.rolling_change import WorkerTemplates
from bamboo_operator.pods.rollout import RolloutState
from operator_kit import JOB_UID, SETTINGS
from operator_kit import job as spec_of
from pod_controller_kit import Job, Place

pytest_plugins = ["pod_controller_kit"]
LONG = {"steps": 100_000, "globalBatchSize": 8, "microBatchSize": 2}
FIRST, SECOND = {"image": "trainer:1"}, {"image": "trainer:2"}


def job(**spec: Any) -> JobSpec:
    return spec_of(**{"training": LONG, **spec})


def images(place: Place) -> dict[str, str]:
    """Return the image of each living pod, by name."""
    return {n: p["spec"]["containers"][0]["image"] for n, p in place.pods.items() if "terminated" not in str(p)}


def state_of(running: Job) -> RolloutState:
    assert running.controller.rolling.record is not None
    return running.controller.rolling.record.state


def obey(running: Job) -> None:
    """Synchronize replicas, commit steps, and end the released workers. Return early if the job does not run."""
    for _ in range(12):
        if running.runner.state.plan is None or running.runner.state.phase != "Running":
            return
        running.fill()
        running.commit()
    for name in images(running.place).keys() & running.runner.demand().wanted.stopped:
        if name not in running.runner.state.workers:
            running.place.end(name, 0)


def arrive(running: Job, platform: Platform | None = None) -> None:
    """Give every new pod a node, and let its worker connect."""
    for name, pod in list(running.place.pods.items()):
        if "status" not in pod:
            running.place.run(name, 0.0)
            hello = protocol.Hello(worker=name, host="h", port=1, platform=platform or Platform())
            running.runner.handle(WorkerJoined(hello))
            running.runner.handle(Received(name, protocol.WorkerReady()))


async def training(begin: Callable[..., Job], place: Place, **spec: Any) -> Job:
    running = begin(place, **{"worker": FIRST, "training": LONG, **spec})
    await running.start()
    obey(running)
    await running.reconciles()
    return running


async def turns(running: Job, count: int, *, comes: bool = True) -> list[int]:
    """Reconcile `count` times, 2 s apart; return the number of workers after each. comes: new workers connect."""
    ready = []
    for _ in range(count):
        await running.reconciles(2.0, 1)
        if comes:
            arrive(running)
        obey(running)
        ready.append(len(running.runner.state.workers))
    return ready


async def test_an_outdated_worker_that_begins_to_train_within_a_reconciliation_keeps_its_pod(
    begin: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a slow API server, a worker may begin to train in the seconds before the operator deletes its pod."""
    place = Place()
    running = begin(place, worker=FIRST, training=LONG, standby={"workers": 0})
    await running.reconciles()
    before = images(place)
    running.edit(job(worker=SECOND, standby={"workers": 0}))

    async def slow(policy: Any) -> None:
        running.train()

    monkeypatch.setattr(place, "apply_network_policy", slow)
    running.now += REPAIR_SECONDS
    await running.controller.reconcile()
    assert images(place) == before


async def test_an_edit_replaces_all_workers_one_after_the_other(begin: Callable[..., Job]) -> None:
    place = Place()
    running = await training(begin, place, topology={"stages": 3}, standby={"workers": 1})
    assert state_of(running) is RolloutState.COMPLETE
    running.edit(job(topology={"stages": 3}, standby={"workers": 1}, worker=SECOND))
    ready = await turns(running, 40)
    assert state_of(running) is RolloutState.COMPLETE
    assert set(images(place).values()) == {"trainer:2"}
    assert len(images(place)) == 4
    assert set(ready) <= {4, 5}, "nobody leaves before the last one was replaced"
    state = running.runner.state
    assert (state.membership.preemptions, state.worker_ends.restarts) == (0, 0)
    told = running.told()
    assert (told.count("RolloutStarted"), told.count("RolloutComplete"), told.count("GivingBack")) == (1, 1, 4)
    assert "Takeover" not in told
    assert "PlannedTakeover" in told


async def test_another_operator_whose_pods_differ_replaces_them_too(begin: Callable[..., Job]) -> None:
    """Pods are outdated, for example, after an upgrade to a release with another default image."""
    first = Place()
    before = await training(begin, first, worker={})
    place = Place()
    for pod in first.pods.values():
        place.put(pod, pod["metadata"]["uid"])
    plan = before.runner.state.plan
    for image, rolls in (("trainer:1", False), ("trainer:9", True)):
        after = begin(place, resumed=True, worker={}, training=LONG, settings=replace(SETTINGS, image=image))
        after.runner.state = replace(after.runner.state, membership=replace(after.runner.state.membership, requested=2))
        for name in sorted(place.pods):
            after.hear(name, protocol.WorkerReady(), plan=plan)
        assert after.runner.state.phase == "Running"
        obey(after)
        await after.reconciles()
        assert (state_of(after) is RolloutState.PROGRESSING) is rolls
    await turns(after, 30)
    assert set(images(place).values()) == {"trainer:9"}


@pytest.mark.parametrize("how", ["refused", "ends", "late", "platform"])
async def test_if_new_workers_are_no_good_the_old_ones_train_on(begin: Callable[..., Job], how: str) -> None:
    place = Place()
    running = await training(begin, place)
    running.edit(job(worker=SECOND))
    place.invalid = "unknown field spec.foo" if how == "refused" else ""
    for _ in range(60):
        await running.reconciles(20.0, 1)
        obey(running)
        for name in [n for n, image in images(place).items() if image == "trainer:2"]:
            if how == "ends":
                place.end(name, 1)
            elif how == "late":
                place.stall(name, "ImagePullBackOff")
            elif how == "platform" and "status" not in place.pods[name]:
                arrive(running, Platform(torch="3"))
                place.end(name, 4)
        if state_of(running) is RolloutState.STALLED:
            break
    record = running.controller.rolling.record
    assert record is not None
    expected = {
        "refused": "the API server refuses its pod: unknown field spec.foo",
        "ends": "3 new workers have ended by themselves; tiny-w4",
        "late": "a new worker was not ready within 600 s: 1 worker(s) cannot start: ImagePullBackOff",
        "platform": "tiny-w2 has torch 3 instead of an unknown one, unlike tiny-w1",
    }[how]
    assert record.stalled.startswith(expected)
    assert running.told().count("RolloutStalled") == 1
    await turns(running, 8, comes=False)
    left = [name for name, image in images(place).items() if image == "trainer:1"]
    assert len(left) == (2 if how == "refused" else 1), "nobody else goes"
    assert running.runner.state.workers.keys() == set(left)
    assert running.runner.state.phase == "Running"
    place.invalid = ""
    running.edit(job(worker=FIRST))
    await running.reconciles(900.0)  # longer than it waits after workers that ended by themselves
    await turns(running, 20)
    assert state_of(running) is RolloutState.COMPLETE
    assert set(images(place).values()) == {"trainer:1"}
    if how != "platform":  # after a misfit the coordinator asks for a worker again by its own clock
        assert len(running.runner.state.workers) == 2


async def test_pools_that_mean_other_nodes_move_their_workers_and_others_do_not(begin: Callable[..., Job]) -> None:
    place = Place()
    spot = {"name": "spot", "preset": "GKE", "pricePerHour": "1.0"}
    running = await training(begin, place, nodePools=[spot])
    running.edit(job(worker=FIRST, nodePools=[spot | {"pricePerHour": "2.0"}, {"name": "dear", "afterSeconds": 9}]))
    await turns(running, 3)
    assert running.told().count("RolloutStarted") == 0
    running.edit(job(worker=FIRST, nodePools=[spot | {"capacity": "OnDemand"}]))
    await turns(running, 30)
    assert state_of(running) is RolloutState.COMPLETE
    labels = {pod["metadata"]["labels"]["bamboo.dev/capacity-type"] for pod in place.pods.values()}
    assert labels == {"OnDemand"}


def test_a_pod_without_a_revision_whose_pool_is_gone_is_outdated() -> None:
    assert not WorkerTemplates(JOB_UID, SETTINGS).is_newest(job(), {"metadata": {"labels": {LABEL_NODE_POOL: "x"}}})


def test_a_pod_tells_what_it_was_made_of() -> None:
    from bamboo_operator.manifests.worker_pod import worker_pod

    def revision(number: int = 0, **worker: Any) -> str:
        pod = worker_pod(job(worker=worker), JOB_UID, number, None, SETTINGS)
        return str(pod["metadata"]["labels"][LABEL_WORKER_REVISION])

    assert revision() == revision(7)
    changed = [
        revision(image="other:1"),
        revision(resources={"limits": {"memory": "2Gi"}}),
        revision(template={"spec": {"containers": [{"name": "trainer", "env": [{"name": "A", "value": "1"}]}]}}),
        revision(template={"metadata": {"annotations": {"a": "b"}}}),
    ]
    assert len({revision(), *changed}) == 5
