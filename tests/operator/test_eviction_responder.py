"""The operator's answers to Evictions, as it hears of them and of pods, and what a job's coordinator hears."""

import logging
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from bamboo_core.coordinator.events import Emit, NoticeWithdrawn, PreemptionNotice
from bamboo_core.kube.errors import ApiError
from bamboo_core.names import EVICTION_RESPONDER
from bamboo_operator.cluster.cache import ClusterCache
from bamboo_operator.kube.objects import JobIdentity, api_time, utc_now
from bamboo_operator.signals.eviction_responder import UNATTENDED_SECONDS, EvictionResponder
from bamboo_operator.signals.evictions import EVICTION_SECONDS, HEARTBEAT_SECONDS, PASS_ON_SECONDS
from bamboo_operator.signals.worker_watch import WorkerWatch
from eviction_kit import eviction
from operator_kit import META, render

NAME, KEY = "tiny-w0", ("default", "tiny")


class World:
    """A worker's pod, its Evictions as an API server keeps them, and what its job's coordinator hears.

    there: whether the Evictions are, which only an answer shows. failing: what an answer raises.
    """

    def __init__(self, *, attended: bool = True) -> None:
        self.cache, self.now = ClusterCache(), utc_now()
        self.ours = True
        self.responder = EvictionResponder(self.cache, self, lambda _: self.ours, lambda: self.now)
        self.there, self.failing = True, list[Exception]()
        self.answers: list[dict[str, str]] = []
        self.heard: list[Any] = []
        self._watch = WorkerWatch(JobIdentity(KEY, META.uid), self.cache, (), Counter())
        self.pod("Running")
        if attended:
            self.cache.add_listener(KEY, self)

    def pod(self, phase: str, kind: str = "MODIFIED", uid: str = "u") -> None:
        made = render(number=0)
        made["metadata"] |= {"uid": uid, "namespace": KEY[0]}
        made["status"] = {"phase": phase}
        self.cache.pod_event(kind, made)

    def asked(self, state: str = "Active", kind: str = "MODIFIED") -> None:
        self.cache.eviction_event(kind, eviction(state=state, pod=NAME, started=api_time(self.now)))

    async def after(self, seconds: float) -> list[str]:
        """What is answered so many seconds later: the times' names."""
        self.now += timedelta(seconds=seconds)
        before = len(self.answers)
        await self.responder.turn()
        return sorted(key for one in self.answers[before:] for key in one if key.endswith("Time"))

    async def answer_eviction(self, eviction: Mapping[str, Any], answer: Mapping[str, str]) -> bool:
        if self.failing:
            raise self.failing.pop()
        if self.there:
            self.answers.append(dict(answer))
            (before,) = (one for one in eviction["status"]["responders"])
            status = {**eviction["status"], "responders": [{**before, **answer, "name": EVICTION_RESPONDER}]}
            self.cache.eviction_event("MODIFIED", {**eviction, "status": status})
        return self.there

    def pod_changed(self, name: str) -> None:
        self.heard += [one for one in self._watch.pod_changed(name, 0.0) if not isinstance(one, Emit)]

    def pod_deleted(self, pod: dict[str, Any]) -> None:
        self.heard += self._watch.pod_deleted(pod)

    def node_deleted(self, pod: str, node: str) -> None:
        raise AssertionError("there is no node")


BEATS, DONE = ["expectedCompletionTime", "heartbeatTime"], ["completionTime", "heartbeatTime"]


async def test_a_worker_has_a_notice_until_it_has_left() -> None:
    world = World()
    world.asked("Inactive")
    assert (world.heard, await world.after(0)) == ([], [])
    world.asked()
    (notice,) = world.heard
    assert (notice.worker, notice.seconds) == (NAME, pytest.approx(EVICTION_SECONDS, abs=2))
    assert isinstance(notice, PreemptionNotice)
    assert [await world.after(seconds) for seconds in (2, HEARTBEAT_SECONDS / 2, HEARTBEAT_SECONDS)] == [
        BEATS,
        [],
        BEATS,
    ]
    world.pod("Succeeded")
    assert await world.after(2) == DONE
    assert await world.after(2 * HEARTBEAT_SECONDS) == []


@pytest.mark.parametrize("kind", ["MODIFIED", "DELETED"])
async def test_who_withdraws_the_request_withdraws_the_notice(kind: str) -> None:
    world = World()
    world.asked()
    world.asked("Canceled", kind)
    assert world.heard[1:] == [NoticeWithdrawn(NAME)]
    assert await world.after(1) == []


async def test_a_worker_that_cannot_be_spared_is_left_to_the_eviction_api() -> None:
    world = World()
    world.asked()
    assert await world.after(PASS_ON_SECONDS) == DONE
    assert world.heard[1:] == [NoticeWithdrawn(NAME)]


async def test_a_pod_of_that_name_that_came_later_is_not_meant() -> None:
    world = World()
    world.pod("Running", "DELETED")
    world.pod("Running", uid="later")
    world.heard.clear()
    world.asked()
    assert (world.heard, await world.after(1)) == ([], DONE)


async def test_a_job_that_nobody_looks_after_for_the_moment_is_waited_for() -> None:
    """The operator has just started, or has taken the job over, or begins anew with it after an error."""
    world = World(attended=False)
    assert await world.after(UNATTENDED_SECONDS + 1) == []
    world.asked()
    assert await world.after(1) == BEATS
    world.cache.add_listener(KEY, world)
    assert await world.after(UNATTENDED_SECONDS) == BEATS
    world.cache.remove_listener(KEY, world)
    assert await world.after(1) == []
    assert await world.after(UNATTENDED_SECONDS) == DONE


async def test_a_refused_answer_is_told_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.asked()
    world.failing = [ApiError(403, "Forbidden", "you may not"), ApiError(403, "Forbidden", "you may not")]
    with caplog.at_level(logging.WARNING):
        assert [await world.after(1) for _ in range(3)] == [[], [], BEATS]
    assert len([one for one in caplog.messages if "cannot answer the Eviction default/pod-1-tiny-w0" in one]) == 1


async def test_an_answer_that_is_refused_holds_up_no_other() -> None:
    world = World()
    world.asked()
    world.cache.eviction_event("ADDED", eviction(state="Active", pod="tiny-w1", started=api_time(world.now)))
    world.failing = [ApiError(403, "Forbidden", "you may not")]
    assert await world.after(1) == DONE, "that of a pod that is gone"


async def test_an_eviction_whose_end_no_watch_has_told_is_forgotten_with_its_notice() -> None:
    world = World()
    world.asked()
    world.there = False
    assert await world.after(1) == []
    assert (world.heard[1:], world.cache.evictions()) == ([NoticeWithdrawn(NAME)], [])


async def test_what_another_operator_looks_after_is_answered_by_that_one() -> None:
    world = World(attended=False)
    world.ours = False
    world.asked()
    assert await world.after(UNATTENDED_SECONDS + 1) == []
    world.ours = True
    assert await world.after(1) == BEATS
    assert await world.after(UNATTENDED_SECONDS) == DONE
