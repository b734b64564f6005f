"""The Workload that a job asks for."""

from typing import Any

from bamboo_operator.manifests.workload import Priority, pod_sets, priority_class, shape, workload
from operator_kit import META, SETTINGS, job

CARD = {"limits": {"nvidia.com/gpu": 1, "cpu": "2"}}
SPOT, DEAR = {"name": "a", "preset": "GKE"}, {"name": "b", "preset": "GKE", "capacity": "OnDemand"}


def queued(**more: Any) -> Any:
    return job(**{"queue": {"name": "q"}, "worker": {"resources": CARD}, **more})


def test_a_workload_has_what_kueue_counts_and_nothing_else() -> None:
    spec = queued(standby={"workers": 1})
    sets = pod_sets(spec, META, SETTINGS, 2, 1)
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
    (one,) = pod_sets(queued(nodePools=[SPOT]), META, SETTINGS, 2, None)
    assert one["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    (several,) = pod_sets(queued(nodePools=[SPOT, DEAR]), META, SETTINGS, 2, None)
    asked = several["template"]["spec"]
    assert asked["nodeSelector"] == {"kubernetes.io/os": "linux"}
    assert "affinity" not in asked
    assert "cloud.google.com/gke-spot" in [one["key"] for one in asked["tolerations"]]
    reserved = {"template": {"spec": {"tolerations": [{"key": "team.example/reserved", "operator": "Exists"}]}}}
    (several,) = pod_sets(queued(nodePools=[SPOT, {**DEAR, **reserved}]), META, SETTINGS, 2, None)
    assert "team.example/reserved" in [one["key"] for one in several["template"]["spec"]["tolerations"]]


def test_its_shape_is_what_needs_another_workload() -> None:
    before = shape(queued(), META, SETTINGS)
    assert shape(queued(worker={"resources": CARD, "image": "newer"}), META, SETTINGS) == before
    assert shape(queued(elastic={"maxPipelines": 2}), META, SETTINGS) == before
    others = [
        queued(standby={"workers": 1}),
        queued(worker={"resources": {"limits": {"nvidia.com/gpu": 2}}}),
        queued(queue={"name": "q", "priorityClass": "urgent"}),
    ]
    assert len({before, *(shape(one, META, SETTINGS) for one in others)}) == 4


def test_a_class_of_kueue_comes_before_that_of_the_pods() -> None:
    template = {"template": {"spec": {"priorityClassName": "of-pods"}}}
    assert priority_class(queued()) is None
    assert priority_class(queued(worker=template)) == ("scheduling.k8s.io", "PriorityClass", "of-pods")
    both = queued(worker=template, queue={"name": "q", "priorityClass": "urgent"})
    assert priority_class(both) == ("kueue.x-k8s.io", "WorkloadPriorityClass", "urgent")
