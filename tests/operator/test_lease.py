"""The Lease that lets only one operator work: who may take it, its content, and several operators in virtual time."""

import asyncio
import contextlib
import heapq
import logging
import re
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_core.kube.errors import ApiError, ClusterUnreachable
from bamboo_operator.kube.access import TIMEOUT_SECONDS
from bamboo_operator.kube.lease import (
    DURATION_SECONDS,
    NOTICE_SECONDS,
    POLL_SECONDS,
    RENEW_SECONDS,
    HolderPod,
    Lease,
    LeaseLost,
    LeaseName,
    LeaseRecord,
    ObservedLease,
    decide,
    lease_held_by,
    pod_of_holder,
    released,
)
from fake_api import FakeApi

PLACE = LeaseName("system", "operator")
NOW = datetime(2026, 3, 1, 12, 0, 0, 250_000, tzinfo=UTC)


def record(holder: str = "x", renewed: str = "1", before: tuple[str, ...] = ()) -> LeaseRecord:
    return LeaseRecord(holder=holder, seconds=30.0, renewed=renewed, transitions=0, before=before)


# Decisions


@pytest.mark.parametrize(
    ("holder", "silent", "pod", "take", "notice", "message"),
    [
        (None, 0, HolderPod.UNKNOWN, True, False, "there was none"),
        ("me", 0, HolderPod.UNKNOWN, True, False, "it was ours"),
        ("", 0, HolderPod.UNKNOWN, True, False, "nobody held it"),
        ("x", 0, HolderPod.LIVES, False, False, "x holds it"),
        ("x", 29.9, HolderPod.LIVES, False, False, "x holds it"),
        ("x", 29.9, HolderPod.UNKNOWN, False, False, "x holds it"),
        ("x", 30, HolderPod.LIVES, True, False, "x has not renewed it for 30 s"),
        ("x", 30, HolderPod.UNKNOWN, True, False, "x has not renewed it for 30 s"),
        ("x", 0, HolderPod.LEAVES, True, True, "the pod of x is being deleted"),
        ("x", 30, HolderPod.LEAVES, True, False, "x has not renewed it for 30 s"),
        ("x", 0, HolderPod.OVER, True, False, "the pod of x is gone or has ended"),
    ],
)
def test_a_lease_is_taken_only_from_who_is_silent_or_gone(
    holder: str | None, silent: float, pod: HolderPod, take: bool, notice: bool, message: str
) -> None:
    sight = None if holder is None else ObservedLease(record(holder), 100.0)
    verdict = decide(sight, "me", 100.0 + silent, pod)
    assert (verdict.take, verdict.notice, verdict.message) == (take, ("x",) * notice, message)
    if holder is not None and take:
        sight = ObservedLease(record(holder, before=("a", "me")), 100.0)
        verdict = decide(sight, "me", 100.0 + silent, pod)
        assert verdict.notice == ("a", *("x",) * notice), "who had to notice before that still has to"


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        ({"metadata": {}, "status": {"phase": "Failed"}}, HolderPod.OVER),
        ({"metadata": {"deletionTimestamp": "x"}, "status": {"phase": "Succeeded"}}, HolderPod.OVER),
        ({"metadata": {"deletionTimestamp": "x"}, "status": {"phase": "Running"}}, HolderPod.LEAVES),
        ({"metadata": {}, "status": {"phase": "Running"}}, HolderPod.LIVES),
        ({"metadata": {}, "status": {"phase": "Unknown"}}, HolderPod.LIVES),
        ({"metadata": {}}, HolderPod.LIVES),
    ],
)
def test_what_a_pod_says_of_its_processes(pod: dict[str, Any], expected: HolderPod) -> None:
    assert pod_of_holder(pod) is expected


def test_a_lease_as_it_is_written() -> None:
    first = lease_held_by(PLACE, None, "me", NOW)
    stamp = "2026-03-01T12:00:00.250000Z"
    spec = {"holderIdentity": "me", "leaseDurationSeconds": 30, "acquireTime": stamp, "renewTime": stamp}
    assert first == {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"namespace": "system", "name": "operator"},
        "spec": {**spec, "leaseTransitions": 0},
    }
    first["metadata"]["resourceVersion"] = "7"
    later = lease_held_by(PLACE, first, "me", NOW.replace(second=10))
    assert later["metadata"] == {**first["metadata"], "annotations": {}}
    assert later["spec"] == {**first["spec"], "renewTime": "2026-03-01T12:00:10.250000Z"}
    later["metadata"]["annotations"]["a"] = "b"
    noted = lease_held_by(PLACE, later, "other", NOW.replace(second=50), ("x", "me"))
    assert noted["metadata"]["annotations"] == {"a": "b", "bamboo.dev/holders-before": "x,me"}
    assert LeaseRecord.of(noted).before == ("x", "me")
    assert lease_held_by(PLACE, noted, "other", NOW)["metadata"]["annotations"] == {"a": "b"}
    taken = noted["spec"]
    assert (taken["holderIdentity"], taken["leaseTransitions"]) == ("other", 1)
    assert taken["acquireTime"] == taken["renewTime"] == "2026-03-01T12:00:50.250000Z"
    assert LeaseRecord.of(released(later)).holder == ""


@pytest.mark.parametrize("text", ["", "name", "/name", "a/", "a/b/c", "A/b", "a/B", "a.b/c"])
def test_a_place_is_a_namespace_and_a_name(text: str) -> None:
    with pytest.raises(ValueError, match=f'^expected NAMESPACE/NAME, got "{re.escape(text)}"$'):
        LeaseName.parse(text)
    assert str(LeaseName.parse("bamboo-system/bamboo-operator")) == "bamboo-system/bamboo-operator"


# Several operators in virtual time


class LeaseSimulation:
    """An API server with one Lease and the operators' pods, in virtual time, which passes only in `run`."""

    def __init__(self) -> None:
        self.now, self.numbers = 0.0, count()
        self.queue: list[tuple[float, int, Process, asyncio.Future[None]]] = []
        self.api = FakeApi()
        self.processes: list[Process] = []
        self.checks: list[Callable[[], None]] = []

    @property
    def lease(self) -> dict[str, Any] | None:
        return self.api.all("leases").get(PLACE.name)

    @property
    def pods(self) -> dict[str, dict[str, Any]]:
        return self.api.all("pods")

    def start(self, name: str) -> "Process":
        """Start an operator in a pod named `name`, and return its process."""
        self.api.put("pods", {"metadata": {"name": name}, "status": {"phase": "Running"}})
        self.processes.append(Process(self, name))
        return self.processes[-1]

    async def run(self, seconds: float) -> None:
        end = self.now + seconds
        await self._settle()
        while self.queue and self.queue[0][0] <= end:
            self.now, _, process, future = heapq.heappop(self.queue)
            if process.frozen:
                process.late.append(future)
            elif not future.done():
                future.set_result(None)
                await self._settle()
        self.now = end

    async def _settle(self) -> None:
        """Let all processes run until they wait for the clock, and make the checks."""
        for _ in range(20):
            await asyncio.sleep(0)
        for check in self.checks:
            check()

    def at_work(self) -> list["Process"]:
        return [process for process in self.processes if process.works]

    async def close(self) -> None:
        for process in self.processes:
            await process.kill()


class Process:
    """The process of one operator: its Lease, and its connection to the API server."""

    def __init__(self, simulation: LeaseSimulation, name: str) -> None:
        self.simulation, self.name = simulation, name
        self.works = self.frozen = self.cut = False
        self.disturbed = -1e9  # when it was last frozen or cut off
        self.late: list[asyncio.Future[None]] = []
        self.writes = 0
        self.lease = self._lease()
        self.task = asyncio.create_task(self._live())

    def _lease(self) -> Lease:
        return Lease(self, PLACE, self.name, clock=lambda: self.simulation.now, sleep=self.sleep)

    async def _live(self) -> None:
        """Take and keep the Lease; one second after its loss, begin again like a restarted container."""
        while True:
            self.lease = self._lease()
            await self.lease.acquire()
            keeping = asyncio.create_task(self.lease.keep())
            settling = asyncio.create_task(self._settle())
            try:
                await asyncio.wait((keeping, settling), return_when=asyncio.FIRST_COMPLETED)
                self.works = not keeping.done()
                with contextlib.suppress(LeaseLost):
                    await keeping
            finally:
                self.works = False
                keeping.cancel()
                settling.cancel()
                await asyncio.gather(keeping, settling, return_exceptions=True)
            await self.sleep(1)

    async def _settle(self) -> None:
        await self.lease.settle()

    @property
    def in_its_pod(self) -> bool:
        """Whether the operator's pod exists and is not being deleted."""
        pod = self.simulation.pods.get(self.name)
        return pod is not None and "deletionTimestamp" not in pod["metadata"]

    async def kill(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def again(self) -> None:
        """End the container's process and start it again."""
        await self.kill()
        self.task = asyncio.create_task(self._live())

    async def end(self) -> None:
        """End the process as SIGTERM does, and release the Lease if the API server answers."""
        await self.kill()
        with contextlib.suppress(ClusterUnreachable, ApiError):
            await self.lease.release()

    def freeze(self, *, frozen: bool) -> None:
        self.frozen, self.disturbed = frozen, self.simulation.now
        for future in self.late:
            heapq.heappush(self.simulation.queue, (self.simulation.now, next(self.simulation.numbers), self, future))
        self.late.clear()

    def cut_off(self, *, cut: bool) -> None:
        self.cut, self.disturbed = cut, self.simulation.now

    async def meet(self, action: str) -> None:
        """Apply one of ACTIONS to the operator, if the operator's state permits it."""
        match action:
            case "again" if self.in_its_pod:
                await self.again()
            case "end" if not self.cut:
                await self.end()
            case "vanish":
                await self.kill()
                self.simulation.pods.pop(self.name, None)
            case "evict":
                self.simulation.pods.get(self.name, {"metadata": {}})["metadata"]["deletionTimestamp"] = "now"
            case "cut" | "join":
                self.cut_off(cut=action == "cut")
            case "freeze" | "thaw":
                self.freeze(frozen=action == "freeze")

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(
            self.simulation.queue, (self.simulation.now + seconds, next(self.simulation.numbers), self, future)
        )
        await future

    # what the API server answers

    async def _reach(self) -> None:
        if self.cut:
            await self.sleep(TIMEOUT_SECONDS)
            raise ClusterUnreachable("late")

    async def read_lease(self, namespace: str, name: str) -> dict[str, Any] | None:
        await self._reach()
        assert namespace == PLACE.namespace
        return self.simulation.api.read("leases", name) if name in self.simulation.api.all("leases") else None

    async def create_lease(self, lease: dict[str, Any]) -> dict[str, Any]:
        await self._reach()
        return self._wrote(self.simulation.api.create("leases", lease))

    async def replace_lease(self, lease: dict[str, Any]) -> dict[str, Any]:
        await self._reach()
        return self._wrote(self.simulation.api.replace("leases", lease))

    def _wrote(self, lease: dict[str, Any]) -> dict[str, Any]:
        self.writes += 1
        return lease

    async def read_pod(self, namespace: str, name: str) -> dict[str, Any]:
        await self._reach()
        assert namespace == "system"
        return self.simulation.api.read("pods", name)


@contextlib.asynccontextmanager
async def two() -> AsyncIterator[tuple[LeaseSimulation, Process, Process]]:
    """Yield a simulation and its two operators: the first one works, and the second one waits for the Lease."""
    simulation = LeaseSimulation()
    first = simulation.start("first")
    await simulation.run(1)
    second = simulation.start("second")
    await simulation.run(100)
    assert simulation.at_work() == [first]
    try:
        yield simulation, first, second
    finally:
        await simulation.close()


@pytest.mark.parametrize("gone", [True, False])
async def test_a_dead_holder_is_not_waited_for(gone: bool) -> None:
    async with two() as (simulation, first, second):
        await first.kill()
        await simulation.run(4 * POLL_SECONDS)
        assert simulation.at_work() == [], "its pod is there"
        if gone:
            del simulation.pods["first"]
        else:
            simulation.pods["first"]["status"]["phase"] = "Failed"
        await simulation.run(POLL_SECONDS)
        assert simulation.at_work() == [second]


async def test_an_evicted_holder_that_lives_notices_before_the_next_one_works() -> None:
    async with two() as (simulation, first, second):
        simulation.pods["first"]["metadata"]["deletionTimestamp"] = "now"
        await simulation.run(POLL_SECONDS)
        assert simulation.at_work() == [first]
        assert second.lease.waiting == "waiting until first has ended"
        await simulation.run(RENEW_SECONDS)
        assert simulation.at_work() == []
        await simulation.run(NOTICE_SECONDS)
        assert simulation.at_work() == [second]


async def test_one_that_is_cut_off_goes_on_and_says_so_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with two() as (simulation, first, second):
        first.cut_off(cut=True)
        await simulation.run(300)
        assert simulation.at_work() == [first, second], "it cannot know"
        said = [entry.message for entry in caplog.records if "cannot renew the lease system/operator" in entry.message]
        assert 4 <= len(said) <= 6
        first.cut_off(cut=False)
        await simulation.run(TIMEOUT_SECONDS + POLL_SECONDS)
        assert simulation.at_work() == [second]
    async with two() as (simulation, first, second):
        first.cut_off(cut=True)
        await simulation.run(2 * POLL_SECONDS)
        first.cut_off(cut=False)
        await simulation.run(100)
        assert simulation.at_work() == [first]


@pytest.mark.parametrize("away", [20, 300])
async def test_an_api_server_that_was_away_for_all_takes_the_lease_from_nobody(away: float) -> None:
    async with two() as (simulation, first, second):
        for process in (first, second):
            process.cut_off(cut=True)
        await simulation.run(away)
        second.cut_off(cut=False)
        await simulation.run(1.5 * TIMEOUT_SECONDS)  # the holder's last attempt hangs, and ends after this
        first.cut_off(cut=False)
        await simulation.run(100)
        assert simulation.at_work() == [first]
        await first.kill()
        await simulation.run(DURATION_SECONDS + 2 * POLL_SECONDS)
        assert simulation.at_work() == [second]


async def test_who_is_no_pod_is_waited_for() -> None:
    """A Lease's holder may run outside the cluster. Then the lack of a pod with its name does not prove that it ended,
    and a name that is not valid for a pod must not get into a URL.
    """
    simulation = LeaseSimulation()
    for name in ("../nodes/x", "Laptop", "a pod", "laptop-a"):
        simulation.api.put("leases", lease_held_by(PLACE, None, name, NOW))
        process = simulation.start("me")
        await simulation.run(DURATION_SECONDS - 1)
        assert simulation.at_work() == []
        await simulation.run(2 * POLL_SECONDS)
        assert simulation.at_work() == [process]
        await process.kill()
    await simulation.close()


ACTIONS = st.sampled_from(("again", "end", "evict", "vanish", "cut", "join", "freeze", "thaw"))
STEPS = st.lists(st.tuples(st.floats(0, 50), ACTIONS, st.integers(0, 2)), max_size=12)


@settings(max_examples=60)
@given(STEPS)
def test_never_do_two_work_that_reach_the_api_server_and_at_last_one_does(
    steps: list[tuple[float, str, int]],
) -> None:
    asyncio.run(_play(steps))


async def _play(steps: list[tuple[float, str, int]]) -> None:
    simulation, names = LeaseSimulation(), (f"pod-{number}" for number in count())

    def at_most_one_works() -> None:
        calm = [p for p in simulation.at_work() if not p.cut and not p.frozen and simulation.now - p.disturbed > 13]
        assert len(calm) <= 1, f"at {simulation.now}: {[p.name for p in calm]}"

    simulation.checks.append(at_most_one_works)
    for _ in range(2):
        simulation.start(next(names))
    for pause, action, index in steps:
        await simulation.run(pause)
        process = simulation.processes[index % len(simulation.processes)]
        await process.meet(action)
        if action == "evict":
            simulation.start(next(names))
    simulation.start(next(names))
    for process in simulation.processes:
        process.cut_off(cut=False)
        process.freeze(frozen=False)
    await simulation.run(DURATION_SECONDS + 2 * NOTICE_SECONDS + 20)
    assert len(simulation.at_work()) == 1
    await simulation.close()
