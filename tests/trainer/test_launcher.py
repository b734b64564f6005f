"""The fork server ends no job when its workers end."""

import errno
import os
from collections.abc import Iterator

import pytest

from bamboo_trainer.worker.launch.launcher import Launcher

SECONDS = 60.0  # that a test waits for something


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    ends = os.pipe()
    yield (made := Launcher(*ends))
    made._selector.close()
    for end in (*ends, made._woken, made._waker):
        os.close(end)


def test_two_workers_that_end_at_the_same_time_do_not_end_the_launcher(launcher: Launcher) -> None:
    """All that have ended are reaped at the first word of one, when the second one's closed socket was told of, too."""
    launcher._open_gate("w1").close()
    (told,) = launcher._selector.select(SECONDS)
    launcher._close_gate("w1")
    told[0].data()
    assert launcher._gates == {}


def test_a_worker_that_cannot_be_started_leaves_no_socket(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(launcher, "_fork", refuse)
    launcher._start({"worker": "w1", "url": "", "token": "", "zone": "", "gate": [5]})
    assert (launcher._gates, dict(launcher._selector.get_map())) == ({}, {})
