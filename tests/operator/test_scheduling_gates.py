"""When the gates of pods without a node went away."""

from typing import Any

from bamboo_core.names import LABEL_QUEUE
from bamboo_operator.pods.starting.scheduling_gates import GateReleases, gates_of
from operator_kit import job

GATE = {"name": "kueue.x-k8s.io/admission"}


def pod(*gates: Any, queued: bool = False) -> dict[str, Any]:
    labels = {LABEL_QUEUE: "q"} if queued else {}
    return {"metadata": {"labels": labels}, "spec": {"schedulingGates": list(gates)} if gates else {}}


def test_gates_have_names() -> None:
    assert gates_of(pod(GATE, {"name": "other"})) == ("kueue.x-k8s.io/admission", "other")
    assert gates_of(pod()) == gates_of({}) == gates_of({"spec": {"schedulingGates": None}}) == ()


def test_the_moment_when_a_gate_goes_is_kept_while_the_pod_waits() -> None:
    releases = GateReleases(job())
    releases.observe({"w0": pod(GATE), "w1": pod(GATE)}, 1.0)
    assert releases.at("w0") is None
    releases.observe({"w0": pod(), "w1": pod(GATE)}, 2.0)
    releases.observe({"w0": pod(), "w1": pod()}, 3.0)
    assert (releases.at("w0"), releases.at("w1")) == (2.0, 3.0)
    releases.observe({"w1": pod()}, 4.0)
    assert (releases.at("w0"), releases.at("w1")) == (None, 3.0)


def test_a_pod_that_never_had_a_gate_was_never_released() -> None:
    releases = GateReleases(job())
    releases.observe({"w0": pod()}, 1.0)
    assert releases.at("w0") is None


def test_one_that_may_have_had_a_gate_counts_as_released_when_it_is_first_seen_without() -> None:
    queued = GateReleases(job())
    queued.observe({"w0": pod(queued=True), "w1": pod(GATE, queued=True)}, 5.0)
    assert (queued.at("w0"), queued.at("w1")) == (5.0, None)
    by_template = GateReleases(job(worker={"template": {"spec": {"schedulingGates": [GATE]}}}))
    by_template.observe({"w0": pod()}, 6.0)
    assert by_template.at("w0") == 6.0
