"""Is a reconciliation of no use as long as none is due? One is made every 2 s all the same, and may not do anything."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from bamboo_core.job.api_object import written
from bamboo_operator.jobs.coordinator_runner import TICK_SECONDS
from bamboo_operator.jobs.reconcile_schedule import (
    MARGIN_SECONDS,
    RECONCILE_SECONDS,
    Happened,
    ReconcileSchedule,
)
from bamboo_operator.pods.controller import PodController
from bamboo_operator.status.document import worth_writing
from bamboo_operator.status.writer import StatusWriter


class Audit:
    """An audit of one job. fail: is called with what was done though nothing was due. looks: how many were made to find
    that out.
    """

    def __init__(self, fail: Callable[[str], None]) -> None:
        self._fail, self.looks = fail, 0
        self._not_due = False
        self._happened: Happened | None = None

    @property
    def _idle(self) -> bool:
        """Was nothing due when it was last asked, and has nothing happened since then?"""
        return self._not_due and self._quiet

    @property
    def _quiet(self) -> bool:
        return self._happened is not None and self._happened.urgent is None and self._happened.changed is None

    def called(self, what: str) -> None:
        """The API server is asked to change something."""
        task = asyncio.current_task()
        if self._idle and task is not None and task.get_name().startswith("reconcile "):
            self._fail(f"{what} by a reconciliation that was not due")

    @contextmanager
    def patched(self) -> Iterator[None]:
        """A block in which jobs are looked at as often as if nothing told when that is of use."""
        due, reconcile, write = ReconcileSchedule.due, PodController.reconcile, StatusWriter.write

        def early(schedule: ReconcileSchedule, happened: Happened) -> float:
            at = due(schedule, happened)
            self._happened = happened
            self._not_due = self._quiet and schedule.ok and time.monotonic() < at - MARGIN_SECONDS
            return min(at, schedule.ended + RECONCILE_SECONDS) if schedule.ok else at

        async def judged(controller: PodController) -> None:
            self.looks += self._idle
            await reconcile(controller)
            if self._idle and not controller.settled:
                self._fail("a reconciliation that was not due left something to the next one")

        async def compared(writer: StatusWriter, *arguments: object) -> None:
            before, idle = writer.written, self._idle
            await write(writer, *arguments)  # type: ignore[arg-type]
            if idle and self._idle and worth_writing(writer.written, before, 0.0):
                was, now = written(before), written(writer.written)
                changes = {k: (was.get(k), v) for k, v in now.items() if v != was.get(k)}
                await asyncio.sleep(2 * TICK_SECONDS)  # the coordinator tells at its next tick what is different
                if self._idle:
                    self._fail(f"a status has changed though nothing was due: {changes}")

        with (
            patch.object(ReconcileSchedule, "due", early),
            patch.object(PodController, "reconcile", judged),
            patch.object(StatusWriter, "write", compared),
        ):
            yield
