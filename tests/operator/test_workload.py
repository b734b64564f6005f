"""The Workload that a job asks for."""

import math
from typing import Any

from bamboo_operator.manifests import workload as manifests
from bamboo_operator.manifests.workload import Priority, asked_kinds, kind_after, priority_class, seat_kinds, workload
from operator_kit import META, SETTINGS, job

CARD = {"limits": {"nvidia.com/gpu": 1, "cpu": "2"}}
SPOT, DEAR = {"name": "a", "preset": "GKE"}, {"name": "b", "preset": "GKE", "capacity": "OnDemand"}


def queued(**more: Any) -> Any:
    return job(**{"queue": {"name": "q"}, "worker": {"resources": CARD}, **more})


def pod_sets(spec: Any, seats: int, least: int | None = None, first: int = 0) -> list[dict[str, Any]]:
    kinds = asked_kinds(seat_kinds(spec, META, SETTINGS), first)
    return manifests.pod_sets(kinds, seats, least=least, standby=spec.standby.workers)


def shape(spec: Any) -> str:
    return manifests.shape(spec, asked_kinds(seat_kinds(spec, META, SETTINGS), 0))


def test_a_workload_has_what_kueue_counts_and_nothing_else() -> None:
    spec = queued(standby={"workers": 1})
    sets = pod_sets(spec, 2, 1)
    template = {
        "metadata": {},
        "spec": {
            "nodeSelector": {"kubernetes.io/os": "linux"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "containers": [{"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": "1", "cpu": "2"}}}],
            "restartPolicy": "Never",
        },
    }
    assert sets == [
        {"name": "workers", "count": 2, "template": template, "minCount": 1},
        {"name": "standby", "count": 1, "template": template},
    ]
    urgent = Priority(group="kueue.x-k8s.io", kind="WorkloadPriorityClass", name="urgent", value=7)
    made = workload(spec, META, "v1beta2", 3, sets, urgent, {"one": "1"})
    assert made["spec"] == {
        "queueName": "q",
        "podSets": sets,
        "priorityClassRef": {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": "urgent"},
        "priority": 7,
    }
    assert made["metadata"]["name"].endswith("-3")
    assert (
        made["metadata"]["ownerReferences"][0] | {"uid": META.uid, "controller": True}
        == (made["metadata"]["ownerReferences"][0])
    )


def test_one_pool_says_which_nodes_and_several_leave_it_to_flavors() -> None:
    (one,) = pod_sets(queued(nodePools=[SPOT]), 2)
    assert one["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    (several,) = pod_sets(queued(nodePools=[SPOT, DEAR]), 2)
    asked = several["template"]["spec"]
    assert asked["nodeSelector"] == {"kubernetes.io/os": "linux"}
    assert "affinity" not in asked
    assert "cloud.google.com/gke-spot" in [one["key"] for one in asked["tolerations"]]
    reserved = {"template": {"spec": {"tolerations": [{"key": "team.example/reserved", "operator": "Exists"}]}}}
    (several,) = pod_sets(queued(nodePools=[SPOT, {**DEAR, **reserved}]), 2)
    assert "team.example/reserved" in [one["key"] for one in several["template"]["spec"]["tolerations"]]


def test_its_shape_is_what_needs_another_workload() -> None:
    before = shape(queued())
    assert shape(queued(worker={"resources": CARD, "image": "newer"})) == before
    assert shape(queued(elastic={"maxPipelines": 2})) == before
    others = [
        queued(standby={"workers": 1}),
        queued(worker={"resources": {"limits": {"nvidia.com/gpu": 2}}}),
        queued(queue={"name": "q", "priorityClass": "urgent"}),
    ]
    assert len({before, *(shape(one) for one in others)}) == 4


def of_card(name: str, cards: int, **more: Any) -> dict[str, Any]:
    container = {"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": cards}}}
    return {"name": name, "template": {"spec": {"containers": [container]}}, **more}


def test_pools_whose_pods_ask_for_other_resources_have_a_pod_set_each() -> None:
    pools = [of_card("a", 1, maxWorkers=2), of_card("b", 1, maxWorkers=1), of_card("c", 4, afterSeconds=60)]
    spec = queued(nodePools=pools, standby={"workers": 1}, topology={"stages": 2, "pipelines": 2})
    sets = pod_sets(spec, 4, least=3)
    cards = {one["name"]: one["template"]["spec"]["containers"][0]["resources"]["limits"] for one in sets}
    assert {name: limits["nvidia.com/gpu"] for name, limits in cards.items()} == {
        "workers": 1,
        "workers-2": 4,
        "standby": 1,
    }
    assert [(one["name"], one["count"], one.get("minCount")) for one in sets] == [
        ("workers", 2, None),
        ("workers-2", 2, 1),
        ("standby", 1, None),
    ]
    only = pod_sets(spec, 4, first=1)
    assert [(one["name"], one["count"]) for one in only] == [("workers", 4), ("standby", 1)]
    kinds = seat_kinds(spec, META, SETTINGS)
    assert (kind_after(kinds, 20.0), kind_after(kinds, 60.0)) == ((0, 40.0), (1, math.inf))
    assert len({manifests.shape(spec, asked_kinds(kinds, first)) for first in (0, 1)}) == 2


def test_a_pod_set_has_whole_pipelines_where_each_is_to_be_in_one_rack() -> None:
    spread = {"policy": "ZonePerPipeline", "topologyKey": "rack"}
    pools = [of_card("a", 1, maxWorkers=6), of_card("c", 4)]
    spec = queued(nodePools=pools, queue={"name": "q", "topology": True}, spread=spread, standby={"workers": 1})
    sets = pod_sets(spec, 8)
    assert spec.topology.stages == 2
    assert [(one["name"], one["count"]) for one in sets] == [("workers", 4), ("workers-2", 4), ("standby", 1)]
    assert sets[1]["topologyRequest"] == {"podSetSliceRequiredTopology": "rack", "podSetSliceSize": 2}
    assert sets[2]["topologyRequest"] == {"unconstrained": True}


def test_a_kind_of_pods_with_room_for_any_number_leaves_none_to_others() -> None:
    spec = queued(nodePools=[of_card("a", 1), of_card("c", 4, afterSeconds=60)])
    assert [(one["name"], one["count"]) for one in pod_sets(spec, 4)] == [("workers", 4)]


def test_a_class_of_kueue_comes_before_that_of_the_pods() -> None:
    template = {"template": {"spec": {"priorityClassName": "of-pods"}}}
    assert priority_class(queued()) is None
    assert priority_class(queued(worker=template)) == ("scheduling.k8s.io", "PriorityClass", "of-pods")
    both = queued(worker=template, queue={"name": "q", "priorityClass": "urgent"})
    assert priority_class(both) == ("kueue.x-k8s.io", "WorkloadPriorityClass", "urgent")
