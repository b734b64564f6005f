"""One training of a job, reconciled until the job ends or is suspended: pods, events and status follow its coordinator.

Nothing here decides about workers; that is the coordinator's part, which never waits for the API server.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from bamboo_core.job.spec import gives_back
from bamboo_operator.jobs.coordinator_runner import CoordinatorRunner, TrainingRun
from bamboo_operator.jobs.cost_counter import CostCounter
from bamboo_operator.jobs.effective_spec import EffectiveSpec
from bamboo_operator.jobs.reconcile_schedule import (
    RECONCILE_SECONDS,
    ReconcileOutcome,
    ReconcileSchedule,
    ReconcileTrigger,
)
from bamboo_operator.jobs.shared import SharedResources
from bamboo_operator.kube.attempts import ApiAttempts
from bamboo_operator.pods.controller import PodController
from bamboo_operator.status.budget import suspends
from bamboo_operator.status.event_queue import post_events
from bamboo_operator.status.writer import StatusWriter

HEARTBEAT_SECONDS = 30.0  # while a job waits for its turn
LONGEST_SECONDS = 120.0  # of a reconciliation; one that takes longer counts as stuck
RESAVE_SECONDS = 30.0  # what the API server refuses today it may accept tomorrow


class Training:
    """edited: set when the BambooJob has changed; trigger: told when there is something to reconcile."""

    def __init__(
        self,
        run: TrainingRun,
        runner: CoordinatorRunner,
        controller: PodController,
        status: StatusWriter,
        spec: EffectiveSpec,
        cost: CostCounter,
        shared: SharedResources,
        attempts: ApiAttempts,
        *,
        edited: asyncio.Event,
        trigger: ReconcileTrigger,
    ) -> None:
        self._run, self._runner, self._controller, self._status, self._spec = run, runner, controller, status, spec
        self._cost = cost
        self._api, self._turns, self._status_turns = shared.api, shared.turns, shared.status_turns
        self._burst = shared.burst
        self._edited, self._trigger, self._attempts = edited, trigger, attempts
        self._tell_prices()  # before it asks for workers
        self._coordinating = asyncio.create_task(runner.run(), name=f"coordinator of {run.job.key}")
        self._coordinating.add_done_callback(lambda _: trigger.at_once())
        self._follows_edits = True
        self._save_after = 0.0  # time.monotonic()
        self._began = math.inf  # the reconciliation that is under way, once it has its turn; time.monotonic()

    async def run(self) -> None:
        """Until the job is over, or is suspended, and its workers have exited or had the time to."""
        await self._reconcile_until_over()
        self._follows_edits = False
        await self._attempt("remove the disruption budget", self._controller.end())

    async def close(self) -> None:
        """Also after a failure, so that the workers notice, and connect to the next one."""
        self._follows_edits = False
        self._controller.close()
        self._coordinating.cancel()
        await asyncio.gather(self._coordinating, return_exceptions=True)
        await self._runner.close()

    def apply_edits(self) -> None:
        """What the user has changed, and whether the job's time is up.

        What comes after the end of this training is for the next one, or for the clean-up.
        """
        if not self._follows_edits or self._runner.ending:
            return
        if self._edited.is_set():
            self._edited.clear()
            spec = self._spec.follow()
            self._spec.report_problems(self._runner.events.append)
            if spec.suspend:
                message = "the job is suspended; it goes on from its newest checkpoint, or from step 0 if it has none"
                self._runner.interrupt("Suspended", message)
                return
            self._runner.edit(spec)
        if why := suspends(self._status.facts, self._runner.state.phase):
            self._runner.interrupt("BudgetSpent", why)

    def _count(self) -> None:
        """Bring the facts up to date, and the cost: when workers have come or gone, at once."""
        self._cost.count(joined=self._runner.joined)
        self._tell_prices()
        self._status.update(
            pods=dict(self._controller.pods.by_pool()),
            finish=self._runner.finish,
            rollout=self._controller.rollout,
            unmanaged=self._controller.unmanaged,
        )

    def _tell_prices(self) -> None:
        """What workers cost now, by their pools, if the coordinator goes by that."""
        if gives_back(self._runner.state.spec):
            self._runner.tell_prices(self._cost.prices_told())

    # reconciling

    async def _reconcile_until_over(self) -> None:
        schedule = ReconcileSchedule()
        while not schedule.over:
            self._trigger.clear()
            self.apply_edits()
            began, finished = time.monotonic(), self._runner.finished
            pods, events = await self._reconcile_with_status()
            status = await self._write_status()
            outcome = ReconcileOutcome(
                pods=pods,
                events=events,
                status=status,
                finished=finished,
                unposted=bool(self._runner.events),
            )
            ended = time.monotonic()
            self._run.meter.reconciled(ended - began, ok=outcome.ok)
            schedule = schedule.after(outcome, began, ended)
            if finished and status:
                self._runner.end_written()
            if schedule.over:
                return
            self._attempts.heartbeat()
            if self._coordinating.done() and not self._runner.finished:
                await self._coordinating  # raises what ended it
            await self._until_due(schedule)

    async def _until_due(self, schedule: ReconcileSchedule) -> None:
        """Meanwhile what the workers cost is counted whenever something happens."""
        while (left := schedule.due(self._trigger) - time.monotonic()) > 0:
            await self._trigger.wait(left)
            self._count()

    async def _reconcile_with_status(self) -> tuple[bool, bool]:
        """Bring the pods up to date, and post events; which of the two succeeded.

        The status is kept up to date meanwhile: if many jobs have much to do, and the API server is slow, both the wait
        for a turn and the turn itself may take minutes.
        """
        self._began = math.inf
        working = asyncio.create_task(self._reconcile(), name=f"reconcile {self._run.job.key}")
        try:
            while time.monotonic() < self._began + LONGEST_SECONDS:
                await asyncio.wait({working}, timeout=RECONCILE_SECONDS)
                if working.done():
                    break
                await self._write_status()
            return await working
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _reconcile(self) -> tuple[bool, bool]:
        async with turn(self._turns, self._attempts.heartbeat):
            await self._burst.wait_for_its_end()
            self._began = time.monotonic()
            await self._save_manifest()
            pods = await self._attempt("bring the pods up to date", self._controller.reconcile())
            self._status.update(startup_problems=self._controller.startup_problems())  # which records events, too
            posting = post_events(self._api, self._run.job, self._runner.events)
            return pods, await self._attempt("post events", posting)

    async def _save_manifest(self) -> None:
        """For another operator. Without it the job runs as well, so a failure does not hold up anything."""
        accepted = self._spec.accepted
        if accepted.saved or time.monotonic() < self._save_after:
            return
        if not await self._attempt("save the manifest that the job's workers run with", accepted.save()):
            self._save_after = time.monotonic() + RESAVE_SECONDS

    async def _write_status(self) -> bool:
        """If it is worth a write; whether that succeeded."""
        async with turn(self._status_turns, self._attempts.heartbeat):
            await self._burst.wait_for_its_end()
            self._count()
            record = self._runner.plan_record(self._controller.deleting)
            self._status.update(startup_problems=self._controller.startup_problems(), plan=record)
            write = self._status.write(self._runner.status(), self._controller.created)
            if not await self._attempt("write the status", write):
                return False
            for warning in self._status.take_warnings():
                self._runner.events.append(warning)
                self._trigger.soon()  # so that it is posted
            return True

    async def _attempt(self, what: str, act: Coroutine[Any, Any, None]) -> bool:
        """One part of a reconciliation; what the API server refuses must not hold up the others."""
        return await self._attempts.once(what, act, self._runner.events.append)


@contextlib.asynccontextmanager
async def turn(turns: asyncio.Semaphore, heartbeat: Callable[[], None]) -> AsyncIterator[None]:
    """One after the other, and not too many at once: decisions of all jobs come before what follows from them.

    Whoever waits keeps its place, or those that were served already would come before it.
    """
    beating = asyncio.create_task(_beat(heartbeat))
    try:
        await turns.acquire()
    finally:
        beating.cancel()
    try:
        yield
    finally:
        turns.release()


async def _beat(heartbeat: Callable[[], None]) -> None:
    """Until cancelled: a job that waits for others is not stuck."""
    while True:
        heartbeat()
        await asyncio.sleep(HEARTBEAT_SECONDS)
