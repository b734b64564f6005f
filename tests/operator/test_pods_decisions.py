"""The choice of workers to give back, and of probes: extra pods that request nodes of an earlier pool again."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

from bamboo_core.coordinator.events import WorkerState
from bamboo_core.job.placement_spec import NodePool
from bamboo_core.names import LABEL_NODE_POOL
from bamboo_operator.pods.decisions import Create, Delete, KeepProbes, Release, shrink
from bamboo_operator.pods.view import PodsView
from operator_kit import job

SPEC = job(
    nodePools=[
        {"name": "spot", "capacity": "Spot"},
        {"name": "sure", "capacity": "OnDemand", "afterSeconds": 60},
    ]
)
POOLS: tuple[NodePool, ...] = SPEC.node_pools
NONE = KeepProbes(frozenset())


def shrunk(
    placed: dict[str, str],
    *,
    waiting: Iterable[str] = (),
    standby: Iterable[str] = (),
    leaving: Iterable[str] = (),
    probes: Iterable[str] = (),
    adding: int = 0,
    phase: str = "Running",
    chosen: bool = False,
) -> list[Any]:
    """Return the decisions for a job that wants two workers. placed: pool by worker. waiting: workers with no node."""
    living = {name: {"metadata": {"labels": {LABEL_NODE_POOL: pool}}} for name, pool in placed.items()}
    states = dict.fromkeys(living.keys() - set(waiting), WorkerState.TRAINING)
    states |= dict.fromkeys(standby, WorkerState.STANDBY) | dict.fromkeys(leaving, WorkerState.LEAVING)
    view = SimpleNamespace(
        spec=SPEC,
        rolls=False,
        living=living,
        without_node={name: living[name] for name in waiting},
        status=SimpleNamespace(phase=phase, workers=tuple(states.items())),
        wanted=SimpleNamespace(number=2, gone=frozenset(), chosen=chosen),
        adding=adding,
        probes=frozenset(probes),
        may_ask_for_quota=True,
    )
    return list(shrink(cast(PodsView, view)))


def test_a_fallback_worker_is_given_back_once_a_worker_of_an_earlier_pool_is_ready() -> None:
    placed = {"w0": "spot", "w1": "sure", "w2": "spot"}
    kept, released = shrunk(placed, standby=["w2"], probes=["w2"])
    assert (kept, released.worker) == (NONE, "w1"), "the probe has joined, and is needed now"
    assert "sure" in released.message
    assert shrunk(placed, standby=["w2"], leaving=["w0"], probes=["w2"]) == [NONE], "one at a time"


def test_an_earlier_pool_is_tried_with_one_worker_more() -> None:
    placed = {"w0": "spot", "w1": "sure"}
    assert shrunk(placed) == [Create(POOLS[0], probe=True)]
    assert shrunk(placed, adding=1) == [NONE], "a worker is requested already"
    assert shrunk(placed, phase="Restoring") == [NONE]
    probing = shrunk({**placed, "w2": "spot"}, waiting=["w2"], probes=["w2"])
    assert probing == [KeepProbes(frozenset({"w2"}))], "it goes on waiting, and is not one too many"


def test_a_probe_is_one_too_many_when_no_fallback_worker_is_left() -> None:
    assert shrunk(dict.fromkeys(("w0", "w1", "w2"), "spot"), waiting=["w2"], probes=["w2"]) == [NONE, Delete("w2")]


def test_when_a_probe_came_first_and_took_the_place_the_one_who_comes_late_is_one_too_many() -> None:
    assert shrunk({"w0": "spot", "w1": "spot", "w2": "sure"}, standby=["w2"], probes=["w1"])[1].worker == "w2"


def test_who_of_those_there_goes_may_be_for_the_coordinator_to_choose() -> None:
    """A coordinator that chose the number of workers picks who leaves; the operator deletes only pods without nodes."""
    placed = dict.fromkeys(("w0", "w1", "w2"), "spot")
    assert shrunk(placed, standby=["w2"])[1].worker == "w2"
    assert shrunk(placed, standby=["w2"], chosen=True) == [NONE]
    assert shrunk(placed, waiting=["w2"], chosen=True) == [NONE, Delete("w2")]


def test_workers_beyond_those_wanted_go_one_at_a_time() -> None:
    placed = dict.fromkeys(("w0", "w1", "w2", "w3"), "spot")
    assert shrunk(placed, standby=["w2", "w3"]) == [NONE, Release("w3", "w3 is released: 2 workers are wanted")]
    assert shrunk(placed, standby=["w2", "w3"], leaving=["w3"]) == [NONE]
    assert shrunk(placed) == [NONE], "nobody is idle"
    assert shrunk(dict.fromkeys(("w0", "w1"), "spot"), standby=["w1"]) == [NONE], "as many as are wanted"
    assert shrunk(placed, waiting=["w1"], standby=["w2", "w3"]) == [NONE, Delete("w1")], "who waits goes first"
    mixed = placed | {"w1": "sure", "w2": "sure"}
    assert shrunk(mixed, standby=["w1", "w3"], phase="Restoring")[1].worker == "w1", "of the last pool"
    ten = dict.fromkeys(("w0", "w2", "w9", "w10"), "spot")
    assert shrunk(ten, standby=["w9", "w10"])[1].worker == "w10", "of equal workers the newest goes"
