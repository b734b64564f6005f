"""StrikeGate, where a worker asks before forwards and backwards of chosen steps, and a task check without torch."""

import os
import signal
import threading

import pytest

from bamboo.local.trainer_calls import trainer_process
from bamboo.local.trainer_calls.task_check import check_task
from bamboo_core.planning.plan import Cell
from bamboo_trainer.worker.process import StrikeGate
from task_check_kit import SPIRALS


def test_a_gated_worker_asks_before_forwards_and_backwards_of_these_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, asking = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        gate = StrikeGate("w1", asking, [5])
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # the answer is there already
        for name, step in (("Forward", 4), ("Rehearsal", 5), ("Forward", 5), ("Forward", 6)):
            gate.begins(name, Cell(0, 0), step, 0)
        monkeypatch.setattr("bamboo_trainer.worker.process.ANSWER_SECONDS", 0.01)
        for _ in range(2):  # nobody answers: it goes on, and asks no more
            gate.begins("Backward", Cell(0, 0), 5, 0)
        assert os.read(asked, 100) == b'["w1", 5]\n["w1", 5]\n'
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(asked)
        os.close(asking)


def test_without_the_trainer_it_is_said_that_nothing_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_process, "find_spec", lambda name: None if name == "torch" else object())
    assert check_task(SPIRALS, ()) == ("not checked: the task, since torch is not installed here",)
