"""The page of a local run, from its start to its end."""

import pytest

from bamboo.local.views.page_view import PageView
from bamboo_core.coordinator.events import Emit, Outcome
from bamboo_core.view.job_view import ShownState
from operator_kit import job, said
from page_kit import Time
from run_view_kit import drawn, ran


async def test_the_view_of_a_run_from_its_start_to_its_end() -> None:
    clock = Time()
    view = PageView(job(), clock=clock)
    starting = view.document()
    assert (starting.state.name, starting.job.steps, starting.job.place) == ("Starting", 10, "local")
    view.start(lambda wish: None)
    view.status(said(step=0, loss=None, losses=()))
    view.status(said(step=1, loss=4.0))
    view.emit(Emit("WorkerLost", "w1 is lost", True))
    shown = view.document()
    assert (shown.points, len(shown.marks)) == (((1, 1000.0, (4.0, None, None)),), 1)
    view.finish(ran(said(), Outcome.FAILED, "LossNotFinite"))
    view.stop()
    assert view.document().state == ShownState(name="Failed", tone="bad", sentence="a sentence", over=True)


@pytest.mark.parametrize("page", ["", "http://127.0.0.1:40429/#token=abc"])
def test_the_live_view_names_the_page(page: str) -> None:
    assert (f"page: {page}" in drawn(said(), page=page, width=80)) is bool(page)
