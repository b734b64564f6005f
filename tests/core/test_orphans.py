"""Child processes with their process groups, and the termination of orphaned processes."""

import os
import signal
import subprocess
import sys

from bamboo_core.orphans import GRACE_SECONDS, Orphans, carries, children

SECONDS = 60.0
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(); input()"


def process(code: str, **variables: str) -> subprocess.Popen[bytes]:
    """Start a Python process that runs the code, and return it once it has written a line."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    started = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **variables}, process_group=0, **pipes)
    assert started.stdout is not None
    started.stdout.readline()
    return started


def test_children_are_told_with_their_groups_until_they_are_reaped() -> None:
    with process("print(); input()") as one:
        assert children()[one.pid] == one.pid
        one.kill()
        os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
        assert one.pid in children(), "it has ended, and nobody has reaped it"
        one.wait(SECONDS)
        assert one.pid not in children()


def test_a_process_is_known_by_what_it_was_started_with() -> None:
    with process("print(); input()", MARK="abc") as one:
        assert carries(one.pid, "MARK", "abc")
        assert not carries(one.pid, "MARK", "ab")
        one.kill()
    assert not carries(one.pid, "MARK", "abc")


def test_who_does_not_heed_the_first_signal_gets_another_one_after_a_while() -> None:
    with process(DEAF) as one:
        orphans = Orphans()
        for now in (0.0, 0.1, GRACE_SECONDS - 0.1):
            orphans.end([one.pid], now)
            assert one.poll() is None
        orphans.end([one.pid], GRACE_SECONDS)
        assert one.wait(SECONDS) == -signal.SIGKILL
        assert orphans
        orphans.end([], GRACE_SECONDS + 0.1)
        assert not orphans


def test_one_that_has_ended_meanwhile_is_what_was_wanted() -> None:
    with process("print()") as one:
        one.wait(SECONDS)
    orphans = Orphans()
    for now in (0.0, GRACE_SECONDS):
        orphans.end([one.pid], now)
