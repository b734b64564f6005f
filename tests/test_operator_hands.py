"""What becomes of a job's pods: those that a gate holds back, those that are wanted and cannot be made yet, and those
that go before anybody looks.
"""

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from bamboo.spec import JobSpec
from bamboo_operator import hands as module
from bamboo_operator.api import ApiError
from bamboo_operator.brain import Brain, Running
from bamboo_operator.cluster import Cluster
from bamboo_operator.doors import Doors, Reviews
from bamboo_operator.hands import Hands
from bamboo_operator.pods import worker_pool
from operator_kit import META, SETTINGS, job

POOLS = [{"name": "spot"}, {"name": "dear", "afterSeconds": 300}]
GATE = {"name": "kueue.x-k8s.io/admission"}
GATED = {"template": {"spec": {"schedulingGates": [GATE]}}}


class Place:
    """An API server with room for so many pods, and the watch of it. It places none of them."""

    def __init__(self) -> None:
        self.cluster, self.room, self.made = Cluster(), 100, 0
        self.pods: dict[str, dict[str, Any]] = {}
        self.deleted: list[str] = []
        self.meanwhile: Callable[[], None] = lambda: None  # while a pod is made
        self.shown = True  # does the watch tell of pods that are made?

    async def create_pod(self, pod: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)
        if len(self.pods) >= self.room:
            raise ApiError(403, "Forbidden", "exceeded quota: pods")
        self.made += 1
        made = self.put(pod, f"uid-{self.made}")
        self.meanwhile()
        return copy.deepcopy(made)

    def put(self, pod: dict[str, Any], uid: str, age: float = 0.0) -> dict[str, Any]:
        made = (datetime.now(UTC) - timedelta(seconds=age)).isoformat()
        pod = copy.deepcopy(pod)
        pod["metadata"] |= {"uid": uid, "creationTimestamp": made}
        if pod["spec"].get("schedulingGates"):
            condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
            pod["status"] = {"phase": "Pending", "conditions": [condition]}
        self.pods[pod["metadata"]["name"]] = pod
        if self.shown:
            self.cluster.pod_event("ADDED", pod)
        return pod

    def take(self, name: str) -> None:
        """Somebody else deletes that pod."""
        self.cluster.pod_event("DELETED", self.pods.pop(name))

    def open_gate(self, name: str) -> None:
        """NB: the condition stays until the scheduler has judged the pod."""
        del self.pods[name]["spec"]["schedulingGates"]
        self.cluster.pod_event("MODIFIED", self.pods[name])

    async def delete_pod(self, namespace: str, name: str, uid: str) -> None:
        assert self.pods[name]["metadata"]["uid"] == uid
        self.deleted.append(name)
        self.cluster.pod_event("DELETED", self.pods.pop(name))

    async def create_network_policy(self, policy: dict[str, Any]) -> None:
        """Takes it."""

    def pools(self) -> dict[str, str | None]:
        return {name: worker_pool(pod) for name, pod in sorted(self.pods.items())}


class Job:
    """A job's coordinator and hands at that place. now: what they take for the time, in seconds."""

    def __init__(self, place: Place, spec: JobSpec) -> None:
        self.place, self.now = place, 10_000.0
        running = Running(key=(spec.namespace, spec.name), uid=META.uid, spec=spec, manifest={}, resumed=False)
        self.brain = Brain(running, place.cluster, Doors(), Reviews(place), b"key", lambda: None)  # type: ignore[arg-type]
        self.hands = Hands(running, self.brain, place.cluster, place, SETTINGS, 0)  # type: ignore[arg-type]

    async def passes(self, seconds: float = 0.0, count: int = 4) -> None:
        """Time passes, and then some passes are made; what the API server refuses is tried again in the next."""
        self.now += seconds
        for _ in range(count):
            with contextlib.suppress(ApiError):
                await self.hands.work()

    def edit(self, spec: JobSpec) -> None:
        self.brain.edit(spec)
        self.hands.edit(spec)

    def told(self) -> list[str]:
        return [emit.reason for emit in self.brain.story]

    def troubles(self) -> dict[str, str]:
        return {trouble.reason: trouble.message for trouble in self.hands.troubles()}


@pytest.fixture
async def begin(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Job]]:
    thinking: list[asyncio.Task[None]] = []

    def make(place: Place, **spec: Any) -> Job:
        made = Job(place, job(**spec))
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now))
        thinking.append(asyncio.create_task(made.brain.run()))
        return made

    yield make
    for task in thinking:
        task.cancel()
    for ended in await asyncio.gather(*thinking, return_exceptions=True):
        assert isinstance(ended, asyncio.CancelledError), ended


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
    assert (len(place.pods), scaled.brain.adding, scaled.brain.state.requested) == (3, 5, 8)
    scaled.edit(job(**of(1)))
    place.room = 100
    await scaled.passes(10)
    assert place.made == 3, "more was made than is wanted"
    assert (sorted(place.pods), scaled.brain.adding) == (["tiny-w0", "tiny-w1"], 0)
    assert scaled.brain.state.requested == 2, "the coordinator waits for workers that nobody makes"
    scaled.edit(job(**of(2)))
    await scaled.passes(10)
    assert (len(place.pods), place.made) == (4, 5)
    assert (scaled.brain.adding, scaled.brain.state.requested) == (0, 4)


async def test_what_a_full_pool_did_not_take_is_not_made_either(begin: Callable[..., Job]) -> None:
    place = Place()
    pools = [{"name": "spot", "maxWorkers": 3}]
    scaled = begin(place, **of(2, nodePools=pools))
    await scaled.passes(10)
    assert scaled.troubles() == {"PoolsFull": "1 worker(s) are not asked for: every node pool has its maxWorkers"}
    scaled.edit(job(**of(1, nodePools=[{"name": "spot"}])))
    await scaled.passes(10)
    assert (len(place.pods), place.made, scaled.troubles()) == (2, 3, {})


async def test_an_edit_is_heeded_in_the_middle_of_a_pass(begin: Callable[..., Job]) -> None:
    place = Place()
    scaled = begin(place, **of(4))
    place.meanwhile = lambda: scaled.edit(job(**of(1)))
    await scaled.passes(10)
    assert (place.made, scaled.brain.adding, scaled.brain.state.requested) == (2, 0, 2)


# gone before anybody looks


async def test_a_pod_that_goes_when_a_coordinator_begins_is_replaced(begin: Callable[..., Job]) -> None:
    """As those of a job that is suspended and resumed at once."""
    first = Place()
    await begin(first).passes()
    place = Place()
    for name, pod in first.pods.items():
        place.put(pod, f"uid-{name}")
    resumed = begin(place)
    place.take("tiny-w0")  # NB: the coordinator is made, and its loop has not begun
    await resumed.passes()
    assert sorted(place.pods) == ["tiny-w1", "tiny-w2"]
    assert (resumed.brain.adding, resumed.brain.state.requested) == (0, 2)


@pytest.mark.parametrize("answered", [True, False])
async def test_a_pod_of_which_no_watch_has_told_is_replaced_when_it_goes(
    begin: Callable[..., Job], answered: bool
) -> None:
    """Events that come in one moment reach us as one, so that of such a pod only its end is told."""
    place = Place()
    place.shown = False
    started = begin(place)
    if not answered:
        place.meanwhile = lambda: place.take("tiny-w0") if place.made == 1 else None
    await started.passes()
    if answered:
        assert sorted(place.pods) == ["tiny-w0", "tiny-w1"]
        place.take("tiny-w0")
        await started.passes()
    assert sorted(place.pods) == ["tiny-w1", "tiny-w2"]
    assert (started.brain.adding, started.brain.state.requested) == (0, 2)
