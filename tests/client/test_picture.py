"""The live picture of a run."""

from dataclasses import replace
from datetime import timedelta

import pytest

from bamboo.terminal.keys import HELP
from bamboo.terminal.picture import Footer, sparkline
from bamboo_core.coordinator.events import CheckpointWrite, Emit, WorkerState
from operator_kit import checkpoints
from run_view_kit import NOW, STATUS, drawn


def test_the_live_picture_shows_progress_grid_and_events() -> None:
    text = drawn(STATUS, Emit("TakenOver", "w0 [runs] stage 1", True))
    for part in (
        "job  training  1 preemption, 1 takeover",
        "step 3/10  1:30, ETA 1s",
        "40.0 samples/s  accuracy 0.1235  balance 2e-07  nothing -",
        "stage 1",
        "a w0 slow",
        "c w2 unprotected",
        "other workers: d w3 standby",
        "0s w0 [runs] stage 1",
    ):
        assert part in text
    assert "TakenOver" not in text  # the sentence says it
    early = drawn(replace(STATUS, grid=(), losses=(), loss=None, workers=(), eta_seconds=None, preemptions=0))
    assert "step 3/10  1:30" in early
    assert ("ETA" in early, "takeover" in early) == (False, False)


@pytest.mark.parametrize("width", [80, 100, 140])
def test_nothing_is_wider_than_the_terminal_nor_cut_off(width: int) -> None:
    """Also with many stages, which stand below each other, and long sentences, which go on in the next line."""
    grid = tuple(tuple((f"w{16 * d + s}", bool(s % 3)) for s in range(16)) for d in range(2))
    workers = tuple((f"w{n}", WorkerState.TRAINING) for n in range(32))
    said = "w1 runs stage 2 of pipeline 0 in place of w3: pause 1374 ms, repeated 18 forwards, 15 backwards"
    footer = Footer(hints=HELP, page="http://127.0.0.1:1/")
    text = drawn(
        replace(STATUS, grid=grid, workers=workers),
        Emit("A", said),
        Emit("B", f"{said}; {said}"),
        width=width,
        footer=footer,
    )
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    assert f"0s {said} 1s {said}; {said}" in words
    assert all(f" w{n}" in text for n in range(32))
    assert [f"stage {s}" in text for s in range(16)] == [True] * 16
    assert any(said in line for line in text.splitlines()) is (width >= 100)


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize(("step", "share"), [(0, 0.0), (3, 0.3), (10, 1.0)])
def test_the_bar_takes_the_width_that_is_left_and_is_as_long_as_the_job_is_far(
    step: int, share: float, width: int
) -> None:
    line = drawn(replace(STATUS, step=step), width=width).splitlines()[1]
    words = f"  step {step}/10  1:30, ETA 1s"
    room = width - len(words)
    assert line == f"{'█' * int(share * room)}{'░' * (room - int(share * room))}{words}"


@pytest.mark.parametrize("width", [80, 200])
def test_the_curve_takes_the_width_that_is_left(width: int) -> None:
    line = drawn(replace(STATUS, losses=tuple(range(300)), metrics=()), width=width).splitlines()[2]
    assert len(line) == width
    assert line.endswith("█ 299.0000  40.0 samples/s")


def test_the_picture_says_who_is_leaving_or_lost_and_keeps_the_newest_events() -> None:
    text = drawn(replace(STATUS, workers=(("w0", WorkerState.LEAVING),)), *(Emit(f"E{n}", f"e{n}") for n in range(9)))
    assert "a w0 leaving" in text
    assert "c w2 lost" in text
    assert (" e2" in text, " e3" in text) == (False, True)


def test_the_sparkline_has_a_bar_for_each_share() -> None:
    assert sparkline([3.0, 2.0, 1.0], 9) == "█▅▁"
    assert len(sparkline(list(range(1000)), 40)) == 40
    assert sparkline([1.0, 1.0], 9) == "▁▁"
    assert sparkline([float("nan")], 9) == ""


def test_a_loss_that_is_far_from_all_near_it_leaves_the_curve_its_scale() -> None:
    falling = [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    assert sparkline(falling, 9) == "█▇▆▅▄▃▂▁"
    falling[3] = 1e6
    assert sparkline(falling, 9) == "█▇▆█▄▃▂▁"


def test_the_live_picture_has_a_line_about_checkpoints() -> None:
    writing = CheckpointWrite(step=4, seconds=1.0, written=3, layers=8)
    kept = checkpoints(step=2, age=65.0, place="s3://bucket/x", writing=writing)
    line = "checkpoint: step 2, 1:05 old, in s3://bucket/x; writing step 4, 3 of 8 layers"
    assert line in drawn(replace(STATUS, checkpoint=kept))
    assert "checkpoint: none yet, in s3://bucket/x" in drawn(
        replace(STATUS, checkpoint=replace(kept, step=None, age=None, writing=None))
    )
    assert "checkpoint" not in drawn(STATUS), "it keeps none"


def test_the_live_picture_says_whether_the_date_is_met() -> None:
    dated = replace(STATUS, done_by=NOW + timedelta(hours=1), eta_seconds=600.0)
    assert "done by 2026-12-01 13:00 UTC: 50 min before it at the present rate" in " ".join(drawn(dated).split())
    assert "done by" not in drawn(STATUS)
