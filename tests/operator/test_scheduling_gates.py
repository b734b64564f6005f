"""When the gates of pods without a node went away."""

from typing import Any

from bamboo_operator.pods.starting.scheduling_gates import GateReleases, gates_of
from operator_kit import job

GATE = {"name": "example.com/held"}


def pod(*gates: Any) -> dict[str, Any]:
    return {"metadata": {}, "spec": {"schedulingGates": list(gates)} if gates else {}}


def test_gates_have_names() -> None:
    assert gates_of(pod(GATE, {"name": "other"})) == ("example.com/held", "other")
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
    gated = GateReleases(job(worker={"template": {"spec": {"schedulingGates": [GATE]}}}))
    gated.observe({"w0": pod(), "w1": pod(GATE)}, 6.0)
    assert (gated.at("w0"), gated.at("w1")) == (6.0, None)
