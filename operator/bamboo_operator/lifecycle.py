"""The life of one BambooJob, from the first sight of it to its end: what is valid, what runs, what is told, what is
cleaned up. One of these for each job, in a task of its own.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from bamboo.control.protocol import Stop
from bamboo.coordinator.events import Emit, Outcome, Status
from bamboo.job.spec import CleanPodPolicy, JobSpec
from bamboo_operator.accepted import refusal_in
from bamboo_operator.api import API_ERRORS, Api, ApiError, PodRefused
from bamboo_operator.brain import Brain, Running, known_lost
from bamboo_operator.cluster import Cluster
from bamboo_operator.counts import Counts, Meter
from bamboo_operator.doors import Doors, JobKey, Reviews, path
from bamboo_operator.farewell import farewell
from bamboo_operator.hands import Hands, post
from bamboo_operator.looks import Look
from bamboo_operator.manifests import Manifests
from bamboo_operator.node_marks import NodeMark
from bamboo_operator.pods import JobMeta, OperatorSettings, selector
from bamboo_operator.pools import price_per_hour, spent
from bamboo_operator.removal import FIRST_RETRY, LAST_RETRY, Removal
from bamboo_operator.story import MOST_UNPOSTED
from bamboo_operator.telling import Telling, moment, now

logger = logging.getLogger(__name__)

PASS_SECONDS = 2.0  # between two looks, if nothing happens
GATHER_SECONDS = 0.2  # from a decision to the pass that it causes: when much happens, decisions come first
PASSES_AT_ONCE = 4
STATUSES_AT_ONCE = 4
TURN_SECONDS = 30.0  # between two signs of life of who waits for its turn
LONGEST_WORK_SECONDS = 120.0  # of a pass; one that takes longer may stand still
LAST_WORDS_SECONDS = 30.0  # for the events of a job that is over
RECHECK_SECONDS = 30.0  # what the API server refuses today it may take tomorrow


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What all jobs share. url: ws://HOST:PORT, or wss:, under which workers reach the operator.

    turns: for passes, which may make many calls of the API server. status_turns: for writes of a status.
    """

    cluster: Cluster
    doors: Doors
    api: Api
    reviews: Reviews
    key: bytes
    url: str
    settings: OperatorSettings
    marks: tuple[NodeMark, ...] = ()
    counts: Counts = field(default_factory=Counts)
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PASSES_AT_ONCE))
    status_turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(STATUSES_AT_ONCE))


class Life:
    """body: the BambooJob as the API server has it; seen() brings newer ones."""

    def __init__(self, body: Mapping[str, Any], tools: Tools) -> None:
        self.body, self._tools = body, tools
        metadata = body["metadata"]
        self.key: JobKey = (metadata["namespace"], metadata["name"])
        self.uid: str = metadata["uid"]
        self.passed = time.monotonic()  # when the last pass was made
        self.meter = Meter(tools.counts)
        self._meta = JobMeta(uid=self.uid)
        self._changed = asyncio.Event()
        self._wake = asyncio.Event()  # there is something to do for the next pass
        self._keep_after = self._counted = 0.0  # time.monotonic()
        self._began_work = math.inf  # the pass that is under way, once it has its turn; time.monotonic()
        self._told: deque[Emit] = deque(maxlen=MOST_UNPOSTED)  # to be posted while there is no coordinator
        self._told_of_manifest = refusal_in(body.get("status") or {})
        self._refusal = ""
        self._brain: Brain | None = None  # the last one
        self._driven: Brain | None = None  # while it is at work
        self._removal = Removal(self.key, self.uid, tools.cluster, tools.api, self._beat)
        self._telling = Telling(self.key, self.uid, selector(self._meta), body.get("status") or {})
        self._manifests = Manifests(self.uid, body, self._telling, tools.api, self._removal)

    def look(self) -> Look:
        """What the job's page is made of."""
        brain, telling, (namespace, name) = self._brain, self._telling, self.key
        return Look(
            namespace=namespace, name=name, spec=telling.facts.spec, facts=telling.facts, written=telling.written,
            status=brain.status() if brain else None, record=brain.record if brain else None,
        )  # fmt: skip

    @property
    def queued(self) -> int:
        """Events that wait for the job's coordinator."""
        return self._brain.queued if self._brain else 0

    def seen(self, body: Mapping[str, Any]) -> None:
        """The coordinator hears of an edit at once, also while the API server does not answer a pass."""
        changed = body["metadata"].get("generation") != self.body["metadata"].get("generation")
        self.body = self._manifests.body = body
        if changed:
            self._changed.set()
            self._wake.set()
            if self._driven:
                self._hear(self._driven)

    def gone(self) -> None:
        """The job was deleted: its workers need not wait for the end of their pods' grace period."""
        if self._brain:
            self._brain.send_away("JobDeleted", "the job was deleted")

    async def run(self) -> None:
        """Until the job is deleted because its time is over, or this task is cancelled."""
        while not self._telling.over:
            self._changed.clear()
            spec = await self._manifests.next_spec(self._settings())
            if self._changed.is_set():
                continue
            if spec is None or spec.suspend:
                await self._rest(spec)
                continue
            await self._train(spec)
            if not self._telling.over:  # NB: it was suspended; by now it may be resumed
                await self._removal.remove(CleanPodPolicy.ALL)
        await self._clean_up()

    async def _rest(self, spec: JobSpec | None) -> None:
        """Until the job is edited, for it is suspended, or not valid (None): then nobody works, but who has begun."""
        begun, tools = self._begun(), self._tools
        self._tell_manifest(self._told)
        if spec is None and begun:
            self._telling.note(unattended=True)
            await self._keep_writing(None)
            await self._wait_for_change(RECHECK_SECONDS, CleanPodPolicy.NONE)
            return
        stop = Stop(reason="Suspended", message="the job is suspended")
        async with farewell((self.key, self.uid), tools.cluster, tools.doors, tools.reviews, stop):
            await self._removal.remove(CleanPodPolicy.ALL)
            await self._keep_writing(None)
            await self._wait_for_change(None if spec else RECHECK_SECONDS, CleanPodPolicy.ALL)

    # what is wanted

    def _begun(self) -> bool:
        """Are there workers that train, and that another operator has left to us? They don't stop for a bad edit."""
        return self._telling.plan is not None

    def _settings(self) -> OperatorSettings:
        return replace(self._tools.settings, coordinator_url=self._tools.url.rstrip("/") + path(self.key))

    # training

    async def _train(self, spec: JobSpec) -> None:
        """Until the job is over, or is suspended."""
        telling, plan = self._telling, self._telling.plan  # NB: not the epoch, which a suspended job keeps
        telling.begin()
        manifest = self._manifests.begin(resumed=plan is not None)
        job = Running(
            key=self.key, uid=self.uid, spec=spec, manifest=manifest, resumed=plan is not None,
            judged=known_lost(plan) | self._removal.dismissed, meter=self.meter, marks=self._tools.marks,
        )  # fmt: skip
        tools = self._tools
        brain = Brain(job, tools.cluster, tools.doors, tools.reviews, tools.key, self._wake.set)
        self.meter.begin(resumed=job.resumed)
        self._tell_manifest(brain.story)
        self._brain = brain
        hands = Hands(job, brain, tools.cluster, tools.api, self._settings(), telling.created)
        thinking = asyncio.create_task(brain.run(), name=f"brain {self.key}")
        try:
            self._driven = brain
            await self._drive(job, brain, hands, thinking)
            self._driven = None
            await self._attempt("remove the disruption budget", brain, hands.end())
            await self._removal.let_leave()
            telling.note(pods=dict(hands.by_pool()), paid=dict(hands.paid_for()), troubles=())
            await self._keep_writing(brain.status())
        finally:
            self._driven = None
            thinking.cancel()
            await asyncio.gather(thinking, return_exceptions=True)
            await brain.close()  # NB: also after a failure, so that the workers notice and come back to the next one

    async def _drive(self, job: Running, brain: Brain, hands: Hands, thinking: "asyncio.Task[None]") -> None:
        retry, ended = FIRST_RETRY, math.inf
        self._counted = time.monotonic()
        while True:
            self._hear(brain)
            now, finish = time.monotonic(), brain.finish
            done, posted = await self._work(brain, hands)
            written = await self._tell(brain, hands)
            self.meter.passed(time.monotonic() - now, ok=done and written and posted)
            if finish is not None and written:  # NB: as it was before the pass, for that is what was written
                brain.dismiss()
                ended = min(ended, now)
                if not brain.story or now - ended > LAST_WORDS_SECONDS:
                    return
            if done and written and posted:
                retry, pause = FIRST_RETRY, PASS_SECONDS
            else:
                retry, pause = min(2 * retry, LAST_RETRY), retry
            self.passed = time.monotonic()
            if thinking.done() and brain.finish is None:
                await thinking  # raises what ended it
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()
                    await asyncio.sleep(GATHER_SECONDS)
            self._wake.clear()

    async def _keep_manifest(self, brain: Brain) -> None:
        """For another operator. Without it the job runs as well, so a failure does not hold up anything."""
        if self._manifests.accepted.kept or time.monotonic() < self._keep_after:
            return
        keeping = self._manifests.accepted.keep(self._tools.api)
        if not await self._attempt("save the manifest that the job's workers run with", brain, keeping):
            self._keep_after = time.monotonic() + RECHECK_SECONDS

    async def _work(self, brain: Brain, hands: Hands) -> tuple[bool, bool]:
        """Bring the pods up to date, and post events; which of the two went well.

        The status is kept up to date meanwhile: if many jobs have much to do, and the API server is slow, both the wait
        for a turn and the turn itself may take minutes.
        """
        self._began_work = math.inf
        working = asyncio.create_task(self._pass(brain, hands), name=f"pass over {self.key}")
        try:
            while time.monotonic() < self._began_work + LONGEST_WORK_SECONDS:
                await asyncio.wait({working}, timeout=PASS_SECONDS)
                if working.done():
                    break
                await self._tell(brain, hands)
            return await working
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _pass(self, brain: Brain, hands: Hands) -> tuple[bool, bool]:
        async with self._turn(self._tools.turns):
            self._began_work = time.monotonic()
            await self._keep_manifest(brain)
            done = await self._attempt("bring the pods up to date", brain, hands.work())
            self._telling.note(troubles=hands.troubles())  # NB: which are among the events
            posting = post(self._tools.api, (self.key, self.uid), brain.story)
            return done, await self._attempt("post events", brain, posting)

    async def _tell(self, brain: Brain, hands: Hands) -> bool:
        """Write the status if it is worth it; whether that went well."""
        async with self._turn(self._tools.status_turns):
            self._count(brain, hands, time.monotonic())
            self._telling.note(troubles=hands.troubles(), plan=brain.plan())
            telling = self._telling.write(self._tools.api, brain.status(), hands.created)
            return await self._attempt("write the status", brain, telling)

    @contextlib.asynccontextmanager
    async def _turn(self, turns: asyncio.Semaphore) -> AsyncIterator[None]:
        """One after the other, and not too many at once: decisions of all jobs come before what follows from them.

        NB: who waits gives up its place for nothing, or those that were served already would come before it.
        """
        alive = asyncio.create_task(self._keep_alive())
        try:
            await turns.acquire()
        finally:
            alive.cancel()
        try:
            yield
        finally:
            turns.release()

    async def _keep_alive(self) -> None:
        """Until cancelled: to wait for others is no standstill."""
        while True:
            self._beat()
            await asyncio.sleep(TURN_SECONDS)

    async def _attempt(self, what: str, brain: Brain, act: Coroutine[Any, Any, None]) -> bool:
        """One part of a pass; what the API server refuses must not hold up the others."""
        self.passed = time.monotonic()
        try:
            await act
        except API_ERRORS as error:
            self._removal.complain(what, error)
            self._tell_refusal(brain, error)
            return False
        return True

    def _count(self, brain: Brain, hands: Hands, at: float) -> None:
        """Bring the facts up to date, and the cost by what the workers cost since it was counted last."""
        facts, paid = self._telling.facts, dict(hands.paid_for())
        seconds, self._counted = at - self._counted, at
        self.meter.paid += sum(paid.values()) * seconds
        per_hour = price_per_hour(facts.spec.node_pools, paid) if facts.spec else None
        pools, comparison = facts.spec.node_pools if facts.spec else (), facts.comparison
        compared = comparison.later(pools, paid, seconds, now())
        more = spent(per_hour, seconds)
        self.meter.cost += float(more)
        self.meter.on_demand += float(compared.on_demand - comparison.on_demand)
        self._telling.note(
            pods=dict(hands.by_pool()), paid=paid, finish=brain.finish, cost=facts.cost + more, comparison=compared
        )

    def _hear(self, brain: Brain) -> None:
        """What the user has changed, and whether the job's time is up.

        NB: what comes after the end of this training is for the next one, or for the clean-up.
        """
        if brain.ending:
            return
        if self._changed.is_set():
            self._changed.clear()
            spec = self._manifests.follow()
            self._tell_manifest(brain.story)
            if spec.suspend:
                brain.interrupt("Suspended", "the job is suspended; without a checkpoint it will start from step 0")
                return
            brain.edit(spec)
        spec_now, active = self._telling.facts.spec, self._telling.active_for()
        limit = spec_now.active_deadline_seconds if spec_now else None
        if limit and active and active > timedelta(seconds=limit):
            message = f"the job has been active for more than {limit} s"
            brain.interrupt("DeadlineExceeded", message, Outcome.FAILED)

    # what is told

    async def _keep_writing(self, status: Status | None) -> None:
        while True:
            try:
                await self._telling.write(self._tools.api, status)
            except API_ERRORS as error:
                self._removal.complain("write the status", error)
                await self._sleep(PASS_SECONDS)
            else:
                break
        try:
            await post(self._tools.api, (self.key, self.uid), self._told)
        except API_ERRORS as error:
            self._removal.complain("post events", error)  # with the next status, then

    def _tell_manifest(self, story: deque[Emit]) -> None:
        """What is wrong with the newest manifest; once, also over operators."""
        facts = self._telling.facts
        message = "; ".join(facts.problems) or facts.refused
        if message and message != self._told_of_manifest:
            story.append(Emit("InvalidSpec" if facts.problems else "ChangeRefused", message, True))
        self._told_of_manifest = message

    def _tell_refusal(self, brain: Brain, error: BaseException) -> None:
        """What the API server has against us is for the user to know; once. Of pods the troubles tell."""
        if isinstance(error, PodRefused):
            return
        if isinstance(error, ApiError) and error.message != self._refusal and error.status in (403, 422):
            self._refusal = error.message
            brain.story.append(Emit("ClusterRefuses", error.message, True))

    async def _wait_for_change(self, seconds: float | None, policy: CleanPodPolicy) -> None:
        """Until the job is edited; at most that long. Pods that are seen only now go as the others did."""
        end = time.monotonic() + (math.inf if seconds is None else seconds)
        while not self._changed.is_set() and time.monotonic() < end:
            self.passed = time.monotonic()
            if self._removal.living():
                await self._removal.remove(policy)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(PASS_SECONDS, end - self.passed)):
                    await self._changed.wait()

    async def _sleep(self, seconds: float) -> None:
        self._beat()
        await asyncio.sleep(seconds)

    def _beat(self) -> None:
        self.passed = time.monotonic()

    # the end

    async def _clean_up(self) -> None:
        spec, tools = self._manifests.parsed() or self._telling.facts.spec, self._tools
        policy = spec.clean_pod_policy if spec else CleanPodPolicy.RUNNING
        stop = Stop(reason="JobOver", message="the job is over")
        async with farewell((self.key, self.uid), tools.cluster, tools.doors, tools.reviews, stop):
            await self._removal.remove(policy)
            while (left := self._left_to_live()) is None or left > 0:
                await self._wait_for_change(left, policy)
                self._changed.clear()
        await self._removal.persist("delete the job", lambda: self._tools.api.delete_job(*self.key, self.uid))

    def _left_to_live(self) -> float | None:
        """Seconds until the job, which is over, is to be deleted; None if it stays."""
        spec = self._manifests.parsed()
        if spec is None or spec.ttl_seconds_after_finished is None:
            return None
        done = moment(self._telling.written.get("completionTime")) or now()
        return (done + timedelta(seconds=spec.ttl_seconds_after_finished) - now()).total_seconds()
