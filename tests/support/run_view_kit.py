"""A run's status, as its views are given it."""

import io
from datetime import UTC, datetime

from rich.console import Console

from bamboo.terminal.picture import Footer, render
from bamboo_core.control.memory import Memory, Traffic
from bamboo_core.coordinator.events import Emit, SlowWorker, Status, WorkerState
from operator_kit import takeover

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
    unprotected=("pipeline 0 stage 1",),
    digests=("aa", "bb"),
    memory=(("w0", Memory(peak=7, limit=4 << 20)), ("w1", Memory(peak=3 << 20, limit=4 << 20))),
    traffic=(("w0", Traffic(sync=4 << 20, activation=1536)), ("w2", Traffic(gradient=5))),
    slow=(SlowWorker(worker="w0", pipeline=0, stage=0, seconds=0.2, usual=0.1, told="w0 is slow"),),
    metrics=(("accuracy", 0.123456), ("balance", 2e-7), ("nothing", None), ("x" * 64, 1.0)),
)


NOTHING = Footer()


def drawn(status: Status, *events: Emit, width: int = 120, elapsed: float = 90.0, footer: Footer = NOTHING) -> str:
    console = Console(file=io.StringIO(), record=True, width=width, force_terminal=True)
    timed = [(float(n), event) for n, event in enumerate(events)]
    console.print(render("job", status, timed, elapsed=elapsed, now=NOW, footer=footer, width=width))
    return console.export_text()
