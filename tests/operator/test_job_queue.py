"""Jobs in a queue: their one Workload, before a stand-in for Kueue's manager that follows its documentation."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from bamboo_core.job.spec import JobSpec
from bamboo_operator.queues import job_queue
from bamboo_operator.queues.decision import QueueEnding
from kueue_kit import QueuedJob, QueueWorld, run
from kueue_manager import counts, holds
from operator_kit import job


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Callable[..., QueueWorld]:
    """Makes one, whose time the operator takes for the time."""

    def made(quota: int, **more: Any) -> QueueWorld:
        found = QueueWorld(quota, **more)
        monkeypatch.setattr(job_queue, "time", SimpleNamespace(monotonic=lambda: found.seconds))
        return found

    return made


def queued(name: str = "tiny", stages: int = 2, pipelines: int = 2, least: int = 1, **more: Any) -> JobSpec:
    """A job of that grid in a queue; with as few pipelines as `least`."""
    asked = {"name": "q", **more.pop("queue", {})}
    return job(
        name,
        topology={"stages": stages, "pipelines": pipelines},
        elastic={"minPipelines": least},
        training={"steps": 10, "globalBatchSize": 8, "microBatchSize": 1},
        queue=asked,
        **more,
    )


async def test_a_job_asks_for_all_its_workers_at_once_and_waits(world: Callable[..., QueueWorld]) -> None:
    here = world(5)
    one = QueuedJob(here, queued(least=2, standby={"workers": 1}))
    await one.step()
    assert (one.standing.holds, one.standing.reason) == (True, "WaitingForQuota")
    assert counts(one.workload(1)) == {"workers": 4, "standby": 1}
    assert one.workload(1)["metadata"]["ownerReferences"][0]["uid"] == "uid-of-tiny"
    await run(here, [one], 3)
    assert (one.seats, one.pods, one.standing.reason) == (4, 5, "")
    assert holds(one.workload(1), "PodsReady")
    calls = list(here.calls)
    await run(here, [one], 100)
    assert here.calls == calls, "nothing is asked for when nothing has changed"


async def test_one_that_cannot_shrink_is_admitted_as_a_whole_or_not_at_all(world: Callable[..., QueueWorld]) -> None:
    here = world(6)
    first, second = QueuedJob(here, queued("first", least=2)), QueuedJob(here, queued("second", least=2))
    await run(here, [first, second], 60)
    assert (first.seats, second.seats, second.pods) == (4, 0, 0)
    assert "2 more needed" in second.standing.message
    first.ended = QueueEnding(reason="Succeeded", message="all steps are done")
    await run(here, [first, second], 3)
    assert holds(first.workload(1), "Finished")
    assert second.seats == 4


async def test_an_elastic_job_begins_with_what_there_is_and_grows_later(world: Callable[..., QueueWorld]) -> None:
    here = world(6)
    first, second = QueuedJob(here, queued("first", least=2)), QueuedJob(here, queued("second"))
    await run(here, [first, second], 30)
    assert (first.seats, second.seats) == (4, 2)
    assert second.standing.message.startswith("the queue has admitted 2 of 4 workers: ")
    first.ended = QueueEnding(reason="Failed", message="it failed")
    await run(here, [first, second], 30)
    assert (second.seats, second.restarts, second.standing.reason) == (4, 1, "")


async def test_without_slices_a_job_is_admitted_in_part_and_gives_up_seats(world: Callable[..., QueueWorld]) -> None:
    here = world(3, slices=False)
    one = QueuedJob(here, queued(), slices=False)
    await run(here, [one], 3)
    assert one.workload(1)["spec"]["podSets"][0]["minCount"] == 2
    assert (one.seats, here.used) == (2, 2), "a third worker is of no use"
    assert one.queue.fitted(one.spec).topology.pipelines == 1
    assert one.workload(1)["status"]["reclaimablePods"] == [{"name": "workers", "count": 2}]


async def test_a_more_important_job_takes_a_pipeline_and_it_comes_back(world: Callable[..., QueueWorld]) -> None:
    here = world(6)
    here.classes["urgent"] = 100
    first = QueuedJob(here, queued("first"))
    await run(here, [first], 3)
    second = QueuedJob(here, queued("second", least=2, queue={"priorityClass": "urgent"}))
    jobs = [first, second]
    await run(here, jobs, 10)
    assert (first.seats, second.seats, here.used) == (2, 4, 6)
    assert first.restarts == 1, "it has trained on"
    await run(here, jobs, 100)
    assert (first.seats, second.seats) == (2, 4)
    second.ended = QueueEnding(reason="Succeeded", message="done")
    await run(here, jobs, 30)
    assert (first.seats, first.restarts) == (4, 1)
    assert second.workload(1)["spec"]["priorityClassRef"]["name"] == "urgent"


async def test_a_workload_that_goes_while_a_larger_one_is_made_in_its_place_is_asked_for_anew(
    world: Callable[..., QueueWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, taken = world(2), list[str]()
    here.classes["urgent"] = 100
    find = here.find_priority_class

    async def meanwhile(group: str, version: str, kind: str, name: str) -> Any:
        for admitted in [one["metadata"]["name"] for one in here.workloads if holds(one, "Admitted")]:
            if not taken:
                taken.append(admitted)
                here.gone(admitted)
                here.cache.forget(("default", admitted))
        return await find(group, version, kind, name)

    monkeypatch.setattr(here, "find_priority_class", meanwhile)
    one = QueuedJob(here, queued(queue={"priorityClass": "urgent"}))
    await run(here, [one], 60)
    assert (len(taken), one.seats) == (1, 2)


async def test_twenty_losses_cost_no_seat(world: Callable[..., QueueWorld]) -> None:
    """A lost worker's seat stays, also while its replacement is there before it has gone."""
    here = world(4)
    one, other = QueuedJob(here, queued("one")), QueuedJob(here, queued("two"))
    await run(here, [one, other], 3)
    for number in range(20):
        one.pods = 3 if number % 2 else 5
        await run(here, [one, other], 2)
        assert (one.seats, other.seats) == (4, 0)


@pytest.mark.parametrize("least", [1, 2])
async def test_what_it_cannot_spare_suspends_it_until_it_is_admitted_again(
    world: Callable[..., QueueWorld], least: int
) -> None:
    here = world(4)
    one = QueuedJob(here, queued(least=least))
    await run(here, [one], 3)
    one.stuck = True
    here.other("urgent", 4, 100)
    await run(here, [one], 10 if least == 2 else 200)
    assert (one.standing.holds, one.standing.reason) == (True, "QuotaPreempted")
    assert not holds(here.api.all("workloads")["urgent"], "Admitted"), "its pods are still there"
    one.stuck = False
    await run(here, [one], 5)
    assert holds(here.api.all("workloads")["urgent"], "Admitted")
    assert (one.standing.holds, here.used) == (True, 4)
    here.gone("urgent")
    await run(here, [one], 40)
    assert (one.seats, one.restarts) == (4, 2)


async def test_one_that_is_not_ready_in_time_gives_its_quota_back(world: Callable[..., QueueWorld]) -> None:
    here = world(4)
    here.manager.ready_seconds = 20.0
    one = QueuedJob(here, queued())
    await run(here, [one], 60)
    assert one.seats == 4, "it trains"
    here.manager.ready_seconds = None
    one.workload(1)["status"]["conditions"].append(
        {"type": "Evicted", "status": "True", "reason": "PodsReadyTimeout", "message": "late"}
    )
    await run(here, [one], 3)
    requeued = [c for c in one.workload(1)["status"]["conditions"] if c["type"] == "Requeued"]
    assert [(c["status"], c["reason"]) for c in requeued] == [("False", "PodsReadyTimeout")]


async def test_a_suspended_job_gives_its_quota_back_when_its_pods_are_gone(world: Callable[..., QueueWorld]) -> None:
    here = world(4)
    one = QueuedJob(here, queued())
    await run(here, [one], 3)
    one.stopped = one.stuck = True
    await run(here, [one], 3)
    assert here.used == 4
    one.stuck = False
    await run(here, [one], 3)
    assert here.workloads == []
    one.stopped = False
    await run(here, [one], 3)
    assert one.seats == 4


async def test_a_job_that_is_scaled_down_and_up_keeps_its_place(world: Callable[..., QueueWorld]) -> None:
    here = world(6)
    one = QueuedJob(here, queued(pipelines=3))
    await run(here, [one], 3)
    one.spec = queued(pipelines=1)
    await run(here, [one], 3)
    assert (one.seats, here.used) == (2, 2)
    one.spec = queued(pipelines=3)
    await run(here, [one], 5)
    assert (one.seats, here.used, one.restarts) == (6, 6, 1)
    assert len(here.workloads) == 1, "what was replaced is deleted"


@pytest.mark.parametrize("slices", [True, False])
async def test_workers_that_are_to_ask_for_more_memory_get_another_workload(
    world: Callable[..., QueueWorld], slices: bool
) -> None:
    """It takes the place of the one that there is, of which both hold quota for a moment where there are no slices."""
    here = world(4, slices=slices)
    one = QueuedJob(here, queued(worker={"resources": {"requests": {"memory": "1Gi"}}}), slices=slices)
    await run(here, [one], 3)
    one.spec = queued(worker={"resources": {"requests": {"memory": "2Gi"}}})
    await one.step()
    assert (one.standing.outgrown, one.standing.holds, one.seats) == (True, False, 4)
    assert one.standing.message == "what the workers ask for now is not admitted yet"
    await run(here, [one], 60)
    if not slices:
        assert (one.standing.outgrown, one.seats, here.used) == (True, 4, 4), "it trains on"
        assert "4 more needed" in one.standing.message
        here.manager.quota = 8
        await run(here, [one], 3)
    assert (one.standing.outgrown, one.standing.reason, one.seats, one.restarts) == (False, "", 4, 1)
    (left,) = here.workloads
    (container,) = left["spec"]["podSets"][0]["template"]["spec"]["containers"]
    assert container["resources"]["requests"]["memory"] == "2Gi"
    calls = list(here.calls)
    await run(here, [one], 30)
    assert here.calls == calls


@pytest.mark.parametrize(
    "edit",
    [
        {"standby": {"workers": 1}},
        {"worker": {"resources": {"limits": {"nvidia.com/gpu": 1}}}},
        {"nodePools": [{"name": "spot", "preset": "GKE"}]},
    ],
)
async def test_what_may_need_other_flavors_is_no_slice(world: Callable[..., QueueWorld], edit: Any) -> None:
    """Kueue leaves slices in the flavors of the first, and subtracts them pod set by pod set."""
    here = world(6)
    one = QueuedJob(here, queued())
    await run(here, [one], 3)
    one.spec = queued(**edit)
    await run(here, [one], 30)
    assert (one.seats, one.standing.outgrown, here.used) == (4, True, 4), "there is no quota for both"
    here.manager.quota = 9
    await run(here, [one], 3)
    (left,) = here.workloads
    assert sum(counts(left).values()) == here.used == 4 + ("standby" in edit)
    assert (one.seats, one.restarts, one.standing.outgrown) == (4, 1, False)


async def test_a_spare_worker_comes_when_the_queue_has_admitted_it(world: Callable[..., QueueWorld]) -> None:
    here = world(6)
    one = QueuedJob(here, queued())
    await run(here, [one], 3)
    one.spec = queued(standby={"workers": 2})
    await run(here, [one], 3)
    assert (one.queue.fitted(one.spec).standby.workers, one.queue.has_seat(4)) == (0, False)
    here.manager.quota = 10
    await run(here, [one], 3)
    assert (one.queue.fitted(one.spec).standby.workers, one.queue.has_seat(5), one.queue.has_seat(6)) == (
        2,
        True,
        False,
    )


async def test_resources_that_are_edited_back_leave_the_workload_that_there_is(
    world: Callable[..., QueueWorld],
) -> None:
    here = world(4, slices=False)
    one = QueuedJob(here, queued(), slices=False)
    await run(here, [one], 3)
    one.spec = queued(worker={"resources": {"requests": {"memory": "2Gi"}}})
    await run(here, [one], 3)
    assert len(here.workloads) == 2
    one.spec = queued()
    await run(here, [one], 3)
    assert [w["metadata"]["name"] for w in here.workloads] == [one.workload(1)["metadata"]["name"]]
    assert one.seats == 4


async def test_without_slices_it_is_told_when_a_job_gets_back_what_a_bound_took(
    world: Callable[..., QueueWorld],
) -> None:
    here = world(4, slices=False)
    one = QueuedJob(here, queued(), slices=False)
    await run(here, [one], 3)
    one.spec = queued(pipelines=1)
    await run(here, [one], 3)
    one.spec = queued()
    await run(here, [one], 60)
    assert (one.seats, here.used) == (2, 2)
    assert one.standing.message == (
        "the queue has admitted 2 of 4 workers, and admits more, without workload slices, after a suspension"
    )
    one.stopped = True
    await run(here, [one], 3)
    one.stopped = False
    await run(here, [one], 3)
    assert (one.seats, one.standing.reason) == (4, "")


async def test_where_kueue_has_no_slices_after_all_an_eviction_suspends(world: Callable[..., QueueWorld]) -> None:
    here = world(4, slices=False)
    one = QueuedJob(here, queued(pipelines=2))
    await run(here, [one], 3)
    here.other("urgent", 2, 100)
    await run(here, [one], 10)
    assert holds(here.api.all("workloads")["urgent"], "Admitted")


@pytest.mark.parametrize("cause", ["", "DueToRequeuingLimitExceeded"])
async def test_a_workload_that_somebody_deleted_or_stopped_ends_the_training(
    world: Callable[..., QueueWorld], cause: str
) -> None:
    here = world(4)
    here.manager.cause = cause
    one = QueuedJob(here, queued())
    await run(here, [one], 3)
    one.workload(1)["spec"]["active"], one.stuck = False, True
    await run(here, [one], 5)
    assert (one.standing.holds, one.standing.reason, here.used) == (True, "QueueDeactivated", 4)
    one.stuck = False
    await run(here, [one], 5)
    assert (one.standing.holds, one.standing.reason, here.used) == (True, "QueueDeactivated", 0)
    one.workload(1)["spec"]["active"] = True
    await run(here, [one], 3)
    assert one.seats == 4


async def test_a_class_that_is_missing_is_named(world: Callable[..., QueueWorld]) -> None:
    here = world(4)
    one = QueuedJob(here, queued(queue={"priorityClass": "urgent"}))
    await run(here, [one], 3)
    assert one.standing.message == (
        "spec.queue.priorityClass: expected the name of a WorkloadPriorityClass, and there is no urgent"
    )
    here.classes["urgent"] = 7
    await run(here, [one], 3)
    assert one.workload(1)["spec"]["priority"] == 7


async def test_a_cluster_without_workloads_lets_the_job_run_and_says_so(world: Callable[..., QueueWorld]) -> None:
    here = world(0)
    here.cache.version = None
    one = QueuedJob(here, queued())
    await one.step()
    assert (one.standing.holds, one.standing.seats) == (False, None)
    assert one.queue.warning.startswith("spec.queue: not followed, ")
    assert here.calls == []


async def test_seats_are_on_the_nodes_of_their_flavor(world: Callable[..., QueueWorld]) -> None:
    here = world(4)
    taint = {"key": "spot", "operator": "Exists"}
    here.flavors["default"] = {"spec": {"nodeLabels": {"karpenter.sh/capacity-type": "spot"}, "tolerations": [taint]}}
    pools = [
        {"name": "dear", "preset": "Karpenter", "capacity": "OnDemand"},
        {"name": "spot", "preset": "Karpenter", "afterSeconds": 60},
    ]
    one = QueuedJob(here, queued(nodePools=pools))
    await run(here, [one], 3)
    assert [(p.name, p.after_seconds) for p in one.queue.pools(one.spec, {})] == [("spot", 0)]
    pod = one.queue.placed({"metadata": {"labels": {}}, "spec": {"tolerations": []}}, {})
    assert pod["spec"] == {"nodeSelector": {"karpenter.sh/capacity-type": "spot"}, "tolerations": [taint]}
    assert pod["metadata"]["labels"] == {"bamboo.dev/pod-set": "workers"}


LEVEL = "example.com/rack"
SPREADS: list[tuple[str, Any, list[str]]] = [
    ("ZonePerPipeline", {"podSetSliceRequiredTopology": LEVEL, "podSetSliceSize": 2}, ["b", "b", "c", "c"]),
    ("SingleZone", {"required": LEVEL}, ["d", "d", "d", "d"]),
    ("Interleave", {"unconstrained": True}, ["a", "b", "b", "b"]),
]


@pytest.mark.parametrize(("policy", "asked", "racks"), SPREADS)
async def test_where_a_queue_chooses_racks_it_does_as_spread_says(
    world: Callable[..., QueueWorld], policy: str, asked: Any, racks: list[str]
) -> None:
    """Pods are in the racks that were assigned, and who comes for a lost worker is in the same one."""
    here = world(4)
    here.manager.racks = {"a": 1, "b": 3, "c": 2, "d": 4}
    spread = {"policy": policy, "topologyKey": LEVEL}
    one = QueuedJob(here, queued(queue={"topology": True}, spread=spread))
    await run(here, [one], 3)
    assert one.workload(1)["spec"]["podSets"][0]["topologyRequest"] == asked
    assert "kueue.x-k8s.io/elastic-job" not in one.workload(1)["metadata"]["annotations"]
    level = "rack" if policy == "Interleave" else LEVEL
    pods: dict[str, Any] = {}
    for number in range(4):
        pods[f"w{number}"] = one.queue.placed({"metadata": {}, "spec": {"nodeSelector": {"os": "linux"}}}, pods)
    assert sorted(pod["spec"]["nodeSelector"][level] for pod in pods.values()) == racks
    lost = pods.pop("w1")
    assert one.queue.placed({"metadata": {}, "spec": {"nodeSelector": {"os": "linux"}}}, pods) == lost
    assert lost["metadata"] == {
        "labels": {"bamboo.dev/pod-set": "workers", "kueue.x-k8s.io/podset": "workers"},
        "annotations": {
            "kueue.x-k8s.io/workload": one.workload(1)["metadata"]["name"],
            "kueue.x-k8s.io/podset-unconstrained-topology": "true",
        },
    }


def of_cards(name: str, cards: int, **more: Any) -> dict[str, Any]:
    container = {"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": cards}}}
    return {"name": name, "template": {"spec": {"containers": [container]}}, **more}


async def test_without_quota_for_the_pods_of_one_pool_those_of_the_next_are_asked_for(
    world: Callable[..., QueueWorld],
) -> None:
    """And these seats stay the job's, also for an operator that has just begun."""
    here = world(0)
    spec = queued(nodePools=[of_cards("spot", 1), of_cards("dear", 8, afterSeconds=60)])
    one = QueuedJob(here, spec)
    await run(here, [one], 58)
    assert cards_of(here) == {"workers": 1}
    assert one.queue.due <= 60, "nothing else wakes it"
    await run(here, [one], 5)
    here.manager.quota = 4
    again = QueuedJob(here, spec)
    for job_now in (one, again):
        await run(here, [job_now], 5)
        assert cards_of(here) == {"workers": 8}
        assert (job_now.seats, [pool.name for pool in job_now.queue.pools(spec, {})]) == (4, ["dear"])


async def test_who_has_seats_of_a_later_pool_asks_for_more_memory_there(world: Callable[..., QueueWorld]) -> None:
    """And a worker that is missing meanwhile comes there; also where another operator has begun since then."""

    def with_memory(memory: str) -> JobSpec:
        pools = [of_cards("spot", 1), of_cards("dear", 8, afterSeconds=60)]
        for pool in pools:
            pool["template"]["spec"]["containers"][0]["resources"]["requests"] = {"memory": memory}
        return queued(nodePools=pools)

    here = world(0, slices=False)
    one = QueuedJob(here, with_memory("1Gi"), slices=False)
    await run(here, [one], 61)
    here.manager.quota = 4
    await run(here, [one], 5)
    again = QueuedJob(here, with_memory("2Gi"), slices=False)
    for job_now in (one, again):
        job_now.spec, job_now.begun, job_now.pods = again.spec, True, 4
        await run(here, [job_now], 3)
        assert (job_now.seats, job_now.standing.outgrown) == (4, True)
        newest = max(here.workloads, key=lambda one: str(one["metadata"]["name"]))
        (container,) = newest["spec"]["podSets"][0]["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        assert container["resources"]["requests"]["memory"] == "2Gi"
        assert [pool.name for pool in job_now.queue.pools(job_now.spec, {})] == ["dear"]


async def test_a_job_that_waits_for_a_later_pool_does_so_when_another_operator_begins(
    world: Callable[..., QueueWorld],
) -> None:
    here = world(0)
    spec = queued(nodePools=[of_cards("spot", 1), of_cards("dear", 8, afterSeconds=60)])
    one = QueuedJob(here, spec)
    await run(here, [one], 65)
    (waiting,) = here.workloads
    again = QueuedJob(here, spec)
    await run(here, [again], 5)
    (left,) = here.workloads
    assert left["metadata"]["creationTimestamp"] == waiting["metadata"]["creationTimestamp"], "it keeps its place"


@pytest.mark.parametrize("slices", [True, False])
async def test_pods_beyond_what_a_pool_has_room_for_are_in_the_pod_set_of_the_next(
    world: Callable[..., QueueWorld], slices: bool
) -> None:
    here = world(5, slices=slices)
    pools = [of_cards("few", 1, maxWorkers=3), of_cards("many", 8)]
    one = QueuedJob(here, queued(nodePools=pools, standby={"workers": 1}), slices=slices)
    await run(here, [one], 3)
    assert counts(one.workload(1)) == {"workers": 2, "workers-2": 2, "standby": 1}
    living: dict[str, Any] = {}
    for number in range(5):
        (pool,) = one.queue.pools(one.spec, living)
        pod = one.queue.placed({"metadata": {}, "spec": {}}, living)
        living[f"w{number}"] = pod | {"pool": pool.name}
    seats = [(pod["metadata"]["labels"]["bamboo.dev/pod-set"], pod["pool"]) for pod in living.values()]
    few, many, spare = ("workers", "few"), ("workers-2", "many"), ("standby", "few")
    assert seats == [few, few, many, many, spare]
    one.spec = queued(nodePools=pools, standby={"workers": 1}, pipelines=1)
    await run(here, [one], 3)
    assert (one.seats, here.used) == (2, 3)
    if slices:
        assert counts(one.workload(1)) == {"workers": 2, "workers-2": 0, "standby": 1}
    else:
        assert one.workload(1)["status"]["reclaimablePods"] == [{"name": "workers-2", "count": 2}]


def cards_of(world: QueueWorld) -> dict[str, int]:
    """The GPUs of a pod in each set of the one Workload that there is."""
    (one,) = world.workloads
    sets = {pods["name"]: pods["template"]["spec"]["containers"][0] for pods in one["spec"]["podSets"]}
    return {name: container["resources"]["limits"]["nvidia.com/gpu"] for name, container in sets.items()}
