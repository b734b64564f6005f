"""A local run's status and its views."""

import io
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.console import Console

from bamboo.job_source import JobSource
from bamboo.local.views.summary import Summary
from bamboo.terminal.live_view import run_snapshot
from bamboo.terminal.picture import live
from bamboo.terminal.snapshot import JobEvent
from bamboo_core.control.memory import Memory, Traffic
from bamboo_core.coordinator.events import Emit, Outcome, SlowWorker, Status, WorkerState
from bamboo_core.job.manifest import parse_manifest
from operator_kit import job, takeover

TAKEOVER = takeover(victim="w1", worker="w0")
NOW = datetime(2026, 12, 1, 12, 0, tzinfo=UTC)

STATUS = Status(
    phase="Running",
    epoch=2,
    step=3,
    steps=10,
    first_loss=3.0,
    loss=1.5,
    losses=(3.0, 2.0, 1.5),
    lost_samples=4,
    step_seconds=0.2,
    samples_per_second=40.0,
    eta_seconds=1.4,
    grid=((("w0", True), ("w2", False)),),
    workers=(("w0", WorkerState.TRAINING), ("w2", WorkerState.TRAINING), ("w3", WorkerState.STANDBY)),
    preemptions=1,
    notices=0,
    takeovers=(TAKEOVER,),
    wanted=3,
    ready=3,
    digests=("aa", "bb"),
    memory=(("w0", Memory(peak=7, limit=4 << 20)), ("w1", Memory(peak=3 << 20, limit=4 << 20))),
    traffic=(("w0", Traffic(sync=4 << 20, activation=1536)), ("w2", Traffic(gradient=5))),
    slow=(SlowWorker(worker="w0", pipeline=0, stage=0, seconds=0.2, usual=0.1, sentence="w0 is slow"),),
    metrics=(("accuracy", 0.123456), ("balance", 2e-7), ("nothing", None), ("x" * 64, 1.0)),
)


def drawn(status: Status, *events: Emit, width: int = 120, height: int = 200, page: str = "") -> str:
    """Return the terminal view of a run that began 90 seconds ago, as text. events: one per second since that time."""
    console = Console(file=io.StringIO(), record=True, width=width, force_terminal=True)
    began = NOW - timedelta(seconds=90)
    told = tuple(
        JobEvent(at=began + timedelta(seconds=n), reason=one.reason, message=one.message, warning=one.warning)
        for n, one in enumerate(events)
    )
    console.print(live(run_snapshot(job("job"), status, told, began), NOW, width, height, page))
    return console.export_text()


def source(document: dict[str, Any]) -> JobSource:
    """Return a manifest as the job source that `bamboo run` reads."""
    return JobSource(name="job.yaml", spec=parse_manifest(document), document=document)


def ran(status: Status = STATUS, outcome: Outcome = Outcome.COMPLETE, reason: str = "Complete", **more: Any) -> Summary:
    """Return the summary of a run that took two seconds."""
    return Summary(
        job="job", outcome=outcome, reason=reason, message="a sentence", status=status, seconds=2.0, batch=8, **more
    )
