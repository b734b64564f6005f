"""Which worker a job gives back."""

from bamboo_core.job.placement_spec import NodePool
from bamboo_operator.pods.scale_down import ScaleDown, WorkersByPool, scale_down
from operator_kit import job

POOLS: tuple[NodePool, ...] = job(
    nodePools=[
        {"name": "spot", "capacity": "Spot"},
        {"name": "sure", "capacity": "OnDemand", "afterSeconds": 60},
    ]
).node_pools


SPOT, SURE = POOLS


def workers(placed: dict[str, str], **more: object) -> WorkersByPool:
    known: dict[str, object] = {"placed": placed, "without_node": {}, "joined": set(placed), "wanted": 2}
    return WorkersByPool(**{"pools": POOLS, **known, **more})  # type: ignore[arg-type]


def test_a_fallback_worker_is_given_back_once_a_worker_of_an_earlier_pool_is_ready() -> None:
    placed = {"w0": "spot", "w1": "sure", "w2": "spot"}
    decision = scale_down(workers(placed, standby=["w2"], probes=frozenset({"w2"})))
    assert (decision.release, decision.probe, decision.delete) == ("w1", None, None)
    assert "sure" in decision.reason
    assert decision.probes == frozenset(), "it has joined, and is needed now"
    leaving = scale_down(workers(placed, standby=["w2"], leaving=["w0"], probes=frozenset({"w2"})))
    assert leaving == ScaleDown(), "one at a time"


def test_an_earlier_pool_is_tried_with_one_worker_more() -> None:
    placed = {"w0": "spot", "w1": "sure"}
    assert scale_down(workers(placed)).probe == SPOT
    assert scale_down(workers(placed, adding=1)).probe is None, "a worker is requested already"
    assert scale_down(workers(placed, training=False)).probe is None
    waiting = {**placed, "w2": "spot"}
    probing = workers(waiting, joined={"w0", "w1"}, without_node={"w2": "spot"}, probes=frozenset({"w2"}))
    assert scale_down(probing) == ScaleDown(probes=frozenset({"w2"})), "it goes on waiting, and is not one too many"


def test_a_probe_is_one_too_many_when_no_fallback_worker_is_left() -> None:
    placed = {"w0": "spot", "w1": "spot", "w2": "spot"}
    waiting = workers(placed, joined={"w0", "w1"}, without_node={"w2": "spot"}, probes=frozenset({"w2"}))
    assert scale_down(waiting) == ScaleDown(delete="w2")


def test_when_a_probe_came_first_and_took_the_place_the_one_who_comes_late_is_one_too_many() -> None:
    placed = {"w0": "spot", "w1": "spot", "w2": "sure"}
    assert scale_down(workers(placed, standby=["w2"], probes=frozenset({"w1"}))).release == "w2"


def test_who_of_those_there_goes_may_be_for_the_coordinator_to_choose() -> None:
    """It goes by prices and losses; a pod that finds no node is nobody's."""
    placed = {"w0": "spot", "w1": "spot", "w2": "spot"}
    assert scale_down(workers(placed, standby=["w2"])).release == "w2"
    assert scale_down(workers(placed, standby=["w2"], chosen=True)) == ScaleDown()
    waits = workers(placed, joined={"w0", "w1"}, without_node={"w2": "spot"}, chosen=True)
    assert scale_down(waits).delete == "w2"


def test_workers_beyond_those_wanted_go_one_at_a_time() -> None:
    placed = {"w0": "spot", "w1": "spot", "w2": "spot", "w3": "spot"}
    decision = scale_down(workers(placed, standby=["w2", "w3"]))
    assert (decision.release, decision.reason) == ("w3", "w3 is released: 2 workers are wanted")
    assert scale_down(workers(placed, standby=["w2", "w3"], leaving=["w3"])).release is None
    assert scale_down(workers(placed)).release is None, "nobody is idle"
