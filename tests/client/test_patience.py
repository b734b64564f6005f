"""How long a process is waited for, by what it does."""

import os
import signal
import subprocess
import sys
import time

import pytest

from bamboo.patience import MOST_SECONDS, QUIET_SECONDS, Effort, WaitSoFar, effort_of

SECONDS = 120.0


@pytest.mark.parametrize(
    ("waited", "quiet", "cpu", "said"),
    [
        (59.0, 59.0, 59.0, ""),  # it has its time in any case
        (60.0, 59.0, 1.0, ""),
        (61.0, QUIET_SECONDS, 1.0, "it has done nothing for 60 s, and took 1.0 s of processor time before"),
        (60.0, 0.0, 60.0, "it has taken 60.0 s of processor time and is not done"),
        (599.0, 0.0, 5.0, ""),  # on a busy machine
        (600.0, 0.0, 5.0, "it has taken 5.0 s of processor time and is not done"),
    ],
)
def test_who_works_is_waited_for_and_not_for_ever(waited: float, quiet: float, cpu: float, said: str) -> None:
    assert WaitSoFar(waited, quiet, Effort(cpu)).exceeds(60.0) == said


def test_what_has_hours_is_waited_for_no_longer() -> None:
    progress = WaitSoFar(2 * MOST_SECONDS, 0.0, Effort(1.0))
    assert (progress.exceeds(2 * MOST_SECONDS) != "", progress.exceeds(3 * MOST_SECONDS)) == (True, "")


def test_quiet_is_as_long_as_nothing_is_done() -> None:
    progress = (
        WaitSoFar().after(5.0, Effort()).after(5.0, Effort(0.01)).after(5.0, Effort(0.01)).after(2.0, Effort(0.01))
    )
    assert (progress.waited, progress.quiet) == (17.0, 7.0)
    assert progress.after(1.0, Effort(0.01, 1)).quiet == 0.0, "it reads, and waits for the disk"


def test_what_a_process_has_started_works_for_it() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with subprocess.Popen([sys.executable, "-c", code], process_group=0) as parent:
        try:
            late = time.monotonic() + SECONDS
            before = effort_of(parent.pid)
            while effort_of(parent.pid).cpu < before.cpu + 0.5:
                assert time.monotonic() < late
                time.sleep(0.05)
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
    assert effort_of(parent.pid) == Effort()
