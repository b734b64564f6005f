"""A job's pods follow its share of the nodes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bamboo_core.job.spec import fewest_workers, wanted_workers, within
from bamboo_operator.jobs.job_demand import job_demand, nodes_asked_for
from bamboo_operator.manifests.worker_pod import worker_pool
from bamboo_operator.tenants.demand import Grant, HeldBack
from bamboo_operator.tenants.share import JobShare
from operator_kit import job
from pod_controller_kit import Job, Place

pytest_plugins = ["pod_controller_fixtures"]
POOLS = [{"name": "spot", "pricePerHour": "0.5"}, {"name": "dear", "afterSeconds": 300}]
BOUND = HeldBack("TenantBound", "it may not have more")


def no_node(place: Place, name: str) -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node"}
    place.pods[name]["status"] = {"phase": "Pending", "conditions": [condition]}
    place.cluster.pod_event("MODIFIED", place.pods[name])


async def test_no_more_pods_are_made_than_the_job_may_have(begin: Callable[..., Job]) -> None:
    place = Place()
    held = begin(place)
    held.share.grant = None
    await held.reconciles()
    assert place.pods == {}, "nobody has decided yet"
    held.share.grant = Grant(bound=2, pods=0, held_back=BOUND)
    await held.reconciles()
    assert (place.pods, held.controller.settled) == ({}, True)
    held.share.grant = Grant(bound=2, pods=1)
    await held.reconciles()
    assert list(place.pods) == ["tiny-w0"]
    held.share.grant = Grant(bound=2, pods=2)
    await held.reconciles()
    assert list(place.pods) == ["tiny-w0", "tiny-w1"]


async def test_pods_of_a_job_without_a_grid_are_withdrawn_those_without_a_node_first(begin: Callable[..., Job]) -> None:
    place = Place()
    held = begin(place)
    await held.reconciles()
    place.run("tiny-w1", 1.0)
    held.hear("tiny-w1")
    held.share.grant = Grant(bound=2, pods=1, in_line=True)
    await held.reconciles()
    assert (place.deleted, "GivingBack" in held.told()) == (["tiny-w0"], False)
    held.share.grant = Grant(bound=2, pods=0, in_line=True)
    await held.reconciles()
    assert place.deleted == ["tiny-w0", "tiny-w1"]
    assert "GivingBack" in held.told(), "it has joined"
    held.share.grant = Grant(bound=2, pods=2)
    await held.reconciles()
    assert len(place.pods) == 2


async def test_workers_of_a_grid_that_runs_are_never_withdrawn(begin: Callable[..., Job]) -> None:
    place = Place()
    held = begin(place, standby={"workers": 1})
    await held.reconciles()
    for name in ("tiny-w0", "tiny-w1"):
        place.run(name, 1.0)
        held.hear(name)
    held.share.grant = Grant(bound=0, pods=0)
    place.run("tiny-w2", 1.0)
    held.share.grant = None
    held.train()
    held.share.grant = Grant(bound=0, pods=0)
    await held.reconciles()
    assert place.deleted == []


async def test_a_bound_is_no_want_of_nodes_so_that_no_later_pool_is_taken_for_it(begin: Callable[..., Job]) -> None:
    place = Place()
    held = begin(place, nodePools=POOLS)
    held.share.grant = Grant(bound=0, pods=0, held_back=BOUND)
    await held.reconciles()
    await held.reconciles(5000)
    held.share.grant = Grant(bound=2, pods=2)
    await held.reconciles()
    assert set(place.pools().values()) == {"spot"}


async def test_who_waits_in_line_takes_a_later_pool_when_its_time_has_come(begin: Callable[..., Job]) -> None:
    place = Place()
    held = begin(place, nodePools=POOLS)
    held.share.grant = Grant(bound=2, pods=0, in_line=True)
    await held.reconciles()
    spot = held.controller.counts()
    await held.reconciles(301)
    dear = held.controller.counts()
    assert [spot.pool and spot.pool.name, dear.pool and dear.pool.name] == ["spot", "dear"]


async def test_a_job_says_what_it_wants_and_has(begin: Callable[..., Job]) -> None:
    place, spec = Place(), job(nodePools=POOLS)
    held = begin(place, nodePools=POOLS)
    await held.reconciles()
    place.run("tiny-w0", 1.0)
    no_node(place, "tiny-w1")

    def demand():  # type: ignore[no-untyped-def]
        return job_demand(
            "default/tiny",
            5.0,
            spec,
            held.runner.wanted,
            held.runner.status(),
            held.controller.counts(),
            spec.node_pools,
            fewest=fewest_workers(spec),
            resumed=False,
            queued=False,
        )

    found = demand()
    assert (found.fewest, found.step, found.most, found.pods, found.placed, found.wanting) == (2, 2, 2, 2, 1, 1)
    assert (found.begun, found.runs, found.lacks_nodes, found.broken) == (False, False, True, 0)
    assert f"{found.price:.2f}" == "0.50"
    place.run("tiny-w1", 1.0)
    held.train()
    assert (demand().begun, demand().runs, demand().wanting, demand().lacks_nodes) == (True, True, 0, False)
    place.take("tiny-w1")
    await held.ticks(0.0)
    broken = demand()
    assert (broken.pods, broken.broken, broken.wanting) == (1, 1, 1)
    assert broken.harm == "stage 0 of pipeline 0 has no second copy"
    assert {worker_pool(pod) for pod in place.pods.values()} == {"spot"}


def test_jobs_compete_for_nodes_that_they_describe_alike() -> None:
    gpus = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    zone = {"template": {"spec": {"nodeSelector": {"zone": "a"}}}}
    described = [nodes_asked_for(job(worker=worker), None) for worker in ({}, gpus, zone)]
    assert len(set(described)) == 3
    pool = job(nodePools=[{"name": "mine", "preset": "GKE"}]).node_pools[0]
    other = job(nodePools=[{"name": "other", "preset": "GKE"}]).node_pools[0]
    assert nodes_asked_for(job("x"), pool) == nodes_asked_for(job("y"), other)
    selecting = job(nodePools=[{"name": "mine", "preset": "GKE", **zone}]).node_pools[0]
    assert nodes_asked_for(job("x"), selecting) != nodes_asked_for(job("y"), other)


@pytest.mark.parametrize("template", [{"spec": {"nodeSelector": "zone"}}, {"spec": "pod"}])
def test_a_template_that_is_malformed_does_not_keep_other_jobs_from_their_nodes(template: dict[str, Any]) -> None:
    assert nodes_asked_for(job(worker={"template": template}), None) == nodes_asked_for(job(), None)


def test_a_job_within_a_bound_has_its_smallest_grid_and_what_else_has_room() -> None:
    fixed = job(
        topology={"stages": 2, "pipelines": 3}, elastic={"minPipelines": 1, "maxPipelines": 4}, standby={"workers": 1}
    )
    assert [wanted_workers(within(fixed, most)) for most in (9, 8, 7, 5, 3, 2, 0)] == [9, 7, 7, 5, 3, 2, 2]
    assert within(fixed, 9) is fixed
    assert within(fixed, 5).topology.pipelines == 2
    chosen = job(topology={}, elastic={"maxWorkers": 6}, standby={"workers": 2})
    assert [wanted_workers(within(chosen, most)) for most in (8, 7, 3, 2, 1)] == [8, 7, 3, 2, 1]
    assert within(chosen, 1) == replace(
        chosen, elastic=replace(chosen.elastic, max_workers=1), standby=replace(chosen.standby, workers=0)
    )


def test_a_share_has_room_for_one_more_if_there_is_some_for_a_while() -> None:
    share = JobShare()
    assert share.room(10_000) > 0
    share.grant = Grant(bound=2, pods=2, extra=True)
    assert [share.room(pods) for pods in (1, 2, 3)] == [2, 1, 0]
    assert [share.surplus(pods) for pods in (2, 3, 4)] == [0, 0, 1]
    undecided = JobShare(decided=False)
    assert (undecided.room(0), undecided.surplus(5), undecided.held_back) == (0, 0, None)
