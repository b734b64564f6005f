"""An event is about its job."""

from bamboo_core.coordinator.events import Emit
from bamboo_operator.kube.objects import JobIdentity
from bamboo_operator.manifests.event import event
from operator_kit import NOW, at


def test_an_event_is_about_its_job() -> None:
    found = event(JobIdentity(("team", "n" * 300), "u1"), Emit("R" * 200, "m" * 2000, True), NOW)
    assert found["involvedObject"] | {"name": ""} == {
        "apiVersion": "bamboo.dev/v1alpha1",
        "kind": "BambooJob",
        "namespace": "team",
        "name": "",
        "uid": "u1",
    }
    assert (len(found["reason"]), len(found["message"]), found["type"]) == (128, 1000, "Warning")
    assert found["firstTimestamp"] == found["lastTimestamp"] == at(0)
