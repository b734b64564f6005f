"""A worker's process: a gated worker asks before forwards and backwards, and the trainer serves a command."""

import socket
import threading

import pytest

from bamboo.local.trainer_calls import trainer_process
from bamboo.local.trainer_calls.task_check import check_task
from bamboo_core.planning.plan import Cell
from bamboo_trainer.worker.process import StrikeGate
from task_check_kit import SPIRALS

SECONDS = 60.0  # that a test waits for something


def test_a_gated_worker_asks_before_forwards_and_backwards_of_these_steps_only() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(SECONDS)
    gate, done = StrikeGate(theirs, [5]), threading.Event()

    def work() -> None:
        for name, step in (("Forward", 4), ("Rehearsal", 5), ("Forward", 5), ("Backward", 5), ("Forward", 6)):
            gate.begins(name, Cell(0, 0), step, 0)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert ours.recv(100) == b"5\n"
    assert not done.is_set()
    ours.send(b"\n")
    assert ours.recv(100) == b"5\n"
    ours.close()  # nobody will answer: it goes on, and asks no more
    thread.join(SECONDS)
    assert done.is_set()
    gate.begins("Forward", Cell(0, 0), 5, 0)
    gate.close()


def test_without_the_trainer_it_is_said_that_nothing_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_process, "find_spec", lambda name: None if name == "torch" else object())
    assert check_task(SPIRALS, ()) == ("not checked: the task, since torch is not installed here",)
