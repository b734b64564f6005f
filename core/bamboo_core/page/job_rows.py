"""The list of jobs, for its page: a line for each, those first that ask for attention. Pure."""

from collections.abc import Iterable

from bamboo_core.page import document as d
from bamboo_core.page.builder import Labels, finite, state_now, unix
from bamboo_core.view.job_view import JobView

FAILED, SUSPENDED = "Failed", "Suspended"
UNKNOWN_AGE = 0.0


def job_row(view: JobView, cost: d.PageCost | None) -> d.JobRow:
    """A job's line. What its coordinator says counts first, once it knows the job again after a restart."""
    written, training, live = view.status, view.status.training, view.live
    if live is not None and live.phase == "Recovering" and not live.grid:
        live = None
    shown = state_now(view, Labels(view.name))
    rate = training.samples_per_second if live is None else finite(live.samples_per_second)
    left = training.eta_seconds if live is None else finite(live.eta_seconds)
    return d.JobRow(
        namespace=view.namespace,
        name=view.name,
        state=shown,
        step=training.step if live is None else live.step,
        steps=training.steps or view.spec.training.known_steps if live is None else live.steps,
        loss=training.loss if live is None else finite(live.loss),
        samples_per_second=None if shown.over else rate,
        eta_seconds=None if shown.over else left,
        workers=written.workers.ready,
        workers_wanted=written.workers.desired,
        preemptions=max(written.preemptions, live.preemptions if live else 0),
        made=unix(view.metadata.creation_timestamp) or unix(written.start_time),
        cost=cost.total if cost else None,
        cost_per_hour=cost.per_hour if cost else None,
    )


def by_attention(rows: Iterable[d.JobRow]) -> tuple[d.JobRow, ...]:
    """Those first that somebody should look at; among equals the newest first."""
    return tuple(
        sorted(rows, key=lambda row: (urgency(row.state), -(row.made or UNKNOWN_AGE), row.namespace, row.name))
    )


def urgency(state: d.PageState) -> int:
    """How soon somebody should look at a job in that state, 0 first: one that cannot go on or computes wrong numbers,
    one that trains with less than it should have, one that has failed, one that waits, one that trains, one that is
    suspended, one that is complete.
    """
    if state.over:
        return 2 if state.name == FAILED else 6
    if state.name == SUSPENDED:
        return 5
    return {"bad": 0, "warn": 1, "good": 4}.get(state.tone, 3)
