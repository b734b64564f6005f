"""Progress of simulated runs, as lines on a standard error that is not a terminal."""

import sys

import pytest

from bamboo.terminal.run_progress import SECONDS, RunProgress


@pytest.mark.parametrize("shown", [True, False])
def test_a_line_says_every_half_a_minute_how_far_it_is(
    shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    with RunProgress(12, "grids     ", shown=shown, clock=lambda: clock[0]) as bar:
        for _ in range(12):
            clock[0] += SECONDS / 4
            bar.done(1)
    lines = [f"bamboo: grids: {done} of 12 runs" for done in (4, 8, 12)]
    assert capsys.readouterr().err.splitlines() == (lines if shown else [])
