"""The work clock, which leaves out waits for a processor."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bamboo_trainer.worker.work_clock import SCHEDSTAT, WorkClock

needs_the_kernels_account = pytest.mark.skipif(not SCHEDSTAT.exists(), reason="this kernel keeps no account of waits")
WAITED = 0.3  # seconds that the thread is kept from its processor, at least


@needs_the_kernels_account
def test_what_others_do_on_the_processor_is_not_counted() -> None:
    """WorkClock leaves out the time in which an endless loop of another process has the only processor."""
    before = os.sched_getaffinity(0)
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        one = {min(before)}
        os.sched_setaffinity(0, one)
        os.sched_setaffinity(other.pid, one)
        clock = WorkClock()
        work, wall, computed = clock(), time.monotonic(), time.thread_time()
        while time.monotonic() - wall - (time.thread_time() - computed) < WAITED:
            pass
        worked, passed = clock() - work, time.monotonic() - wall
        assert passed - worked > WAITED / 2
        assert worked < time.thread_time() - computed + WAITED / 2
    finally:
        os.sched_setaffinity(0, before)
        other.kill()
        other.wait()


def test_without_an_account_it_is_the_clock(tmp_path: Path) -> None:
    now = [7.0]
    clock = WorkClock(lambda: now[0], tmp_path / "none")
    assert clock() == 7.0
    now[0] = 9.5
    assert clock() == 9.5


def test_what_the_kernel_says_is_taken_off(tmp_path: Path) -> None:
    account = tmp_path / "schedstat"
    account.write_text("123456789 2500000000 42\n")
    assert WorkClock(lambda: 10.0, account)() == 7.5


def test_a_wait_between_its_two_readings_does_not_turn_it_back(tmp_path: Path) -> None:
    """WorkClock never goes back, since the coordinator would refuse a negative time for a layer."""
    account, now = tmp_path / "schedstat", [10.0]
    account.write_text("1 0 1\n")
    clock = WorkClock(lambda: now[0], account)
    assert clock() == 10.0
    account.write_text("1 3000000000 2\n")  # it has waited, and the clock was read before that
    assert clock() == 10.0
    now[0] = 14.0
    assert clock() == 11.0
