"""What becomes of a job's pods: those that a gate holds back, and those that are wanted and cannot be made yet."""

from collections.abc import Callable
from typing import Any

import pytest

from hands_kit import Job, Place
from operator_kit import job

pytest_plugins = ["hands_fixtures"]
POOLS = [{"name": "spot"}, {"name": "dear", "afterSeconds": 300}]
GATE = {"name": "kueue.x-k8s.io/admission"}
GATED = {"template": {"spec": {"schedulingGates": [GATE]}}}


# held back by a gate


async def test_a_pod_that_a_gate_holds_back_keeps_its_place(begin: Callable[..., Job]) -> None:
    place = Place()
    queued = begin(place, nodePools=POOLS, queue={"name": "q"}, worker=GATED)
    await queued.passes()
    await queued.passes(5000)
    assert place.pools() == {"tiny-w0": "spot", "tiny-w1": "spot"}
    assert (place.deleted, place.made) == ([], 2)
    assert queued.troubles() == {"Gated": "2 worker(s) are held back by scheduling gates: kueue.x-k8s.io/admission"}
    assert [emit.warning for emit in queued.brain.story if emit.reason == "Gated"] == [False]


async def test_its_time_begins_when_its_gate_goes(begin: Callable[..., Job]) -> None:
    place = Place()
    queued = begin(place, nodePools=POOLS, worker=GATED)
    await queued.passes()
    await queued.passes(5000)
    place.open_gate("tiny-w0")
    await queued.passes()
    await queued.passes(290)
    assert place.deleted == []
    place.open_gate("tiny-w1")
    await queued.passes()
    await queued.passes(20)
    assert place.deleted == ["tiny-w0"], "the one whose gate went later still has time"
    assert place.pools() == {"tiny-w1": "spot", "tiny-w2": "dear"}
    assert "FallbackPool" in queued.told()
    await queued.passes(290)
    assert place.pools() == {"tiny-w2": "dear", "tiny-w3": "dear"}


@pytest.mark.parametrize("queue", [{}, {"queue": {"name": "q"}}])
async def test_an_operator_that_comes_later_does_not_count_the_time_in_the_queue(
    begin: Callable[..., Job], queue: dict[str, Any]
) -> None:
    """A pod does not tell since when it has had no gates; without a queue it never had any."""
    first = Place()
    await begin(first, nodePools=POOLS, **queue).passes()
    place = Place()
    for name, pod in first.pods.items():
        place.put(pod, f"uid-{name}", age=3600)
    taken_over = begin(place, nodePools=POOLS, **queue)
    await taken_over.passes()
    assert place.deleted == ([] if queue else ["tiny-w0", "tiny-w1"])
    await taken_over.passes(310)
    assert place.pools() == {"tiny-w2": "dear", "tiny-w3": "dear"}


# wanted, and not made yet


def of(pipelines: int, **spec: Any) -> dict[str, Any]:
    """Of a job with two stages."""
    return {"elastic": {"maxPipelines": pipelines}, **spec}


async def test_what_a_quota_refused_is_not_made_when_it_is_not_wanted_any_more(begin: Callable[..., Job]) -> None:
    place = Place()
    place.room = 3
    scaled = begin(place, **of(4))
    await scaled.passes(10)
    assert (len(place.pods), scaled.hands.adding, scaled.brain.state.requested) == (3, 5, 8)
    scaled.edit(job(**of(1)))
    place.room = 100
    await scaled.passes(10)
    assert place.made == 3, "more was made than is wanted"
    assert (sorted(place.pods), scaled.hands.adding) == (["tiny-w0", "tiny-w1"], 0)
    assert scaled.brain.state.requested == 2, "the coordinator waits for workers that nobody makes"
    scaled.edit(job(**of(2)))
    await scaled.passes(10)
    assert (len(place.pods), place.made) == (4, 5)
    assert (scaled.hands.adding, scaled.brain.state.requested) == (0, 4)


async def test_what_a_full_pool_did_not_take_is_not_made_either(begin: Callable[..., Job]) -> None:
    place = Place()
    pools = [{"name": "spot", "maxWorkers": 3}]
    scaled = begin(place, **of(2, nodePools=pools))
    await scaled.passes(10)
    assert scaled.troubles() == {"PoolsFull": "1 worker(s) are not requested: every node pool is at its maxWorkers"}
    scaled.edit(job(**of(1, nodePools=[{"name": "spot"}])))
    await scaled.passes(10)
    assert (len(place.pods), place.made, scaled.troubles()) == (2, 3, {})


async def test_an_edit_is_heeded_in_the_middle_of_a_pass(begin: Callable[..., Job]) -> None:
    place = Place()
    scaled = begin(place, **of(4))
    place.meanwhile = lambda: scaled.edit(job(**of(1)))
    await scaled.passes(10)
    assert (place.made, scaled.hands.adding, scaled.brain.state.requested) == (2, 0, 2)
