"""The worker's agent: it obeys the coordinator, handles signals, and reports why it or its task failed."""

import errno
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import getsourcelines
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.control.protocol import (
    Bye,
    Heartbeat,
    Hello,
    Message,
    NoticeReceived,
    Refused,
    RestoreFailed,
    SendPlan,
    Stop,
    ToWorker,
    Welcome,
    WorkerFailed,
    WorkerReady,
)
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import RedundancySpec, TrainingSpec
from bamboo_core.names import EXIT_DRAINED, EXIT_FAILED, EXIT_FENCED
from bamboo_core.planning.grid import initial_plan
from bamboo_core.planning.plan import Peer, Plan
from bamboo_trainer.memory.gpus import DeviceError
from bamboo_trainer.stage.compilation import CompilerUnavailable
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.task_errors import NotDeterministic, RealInterrupt, TaskError, TaskOutOfMemory
from bamboo_trainer.tasks.user_code import run_layer
from bamboo_trainer.worker.agent import (
    Inbox,
    WorkerAgent,
    WorkerSettings,
    exit_code,
    failure_message,
    failure_reason,
    place_of,
)
from bamboo_trainer.worker.loaded_job import record_of
from bamboo_trainer.worker.telemetry import Spans
from manifest_kit import bamboojob, training
from stage_kit import small_task

PATIENCE = 120.0


def test_when_a_plan_came_is_known_once() -> None:
    peers = [Peer(worker="w0", host="127.0.0.1", port=1)]
    spec = TrainingSpec(steps=1, global_batch_size=2, micro_batch_size=1)
    plan = initial_plan(peers, ((0, 1),), 1, spec, RedundancySpec())
    inbox, before = Inbox(), time.monotonic()
    inbox.put(SendPlan(plan=plan))
    arrival = inbox.arrival(plan)
    assert arrival is not None
    assert before <= arrival <= time.monotonic()
    assert inbox.arrival(plan) is None


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TaskError("layer 3 is wrong"), "TaskFailed"),
        (NotDeterministic("layer 3 draws"), "NotDeterministic"),
        (TaskOutOfMemory("in layer 3"), "OutOfMemory"),
        (MemoryError(), "OutOfMemory"),
        (torch.OutOfMemoryError("CUDA out of memory"), "OutOfMemory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "OutOfMemory"),
        (OSError(errno.ENOSPC, "No space left on device"), "WorkerError"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "OutOfMemory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), "OutOfMemory"),
        (ValueError("out of memory"), "WorkerError"),
        (DeviceError("no GPU"), "DeviceUnavailable"),
        (CompilerUnavailable("no compiler"), "CompilerUnavailable"),
        (RuntimeError("a bug"), "WorkerError"),
    ],
)
def test_an_error_is_the_machines_the_tasks_about_memory_or_a_bug(error: Exception, reason: str) -> None:
    assert failure_reason(error) == reason


def test_our_own_sentences_stand_alone_and_others_have_their_type() -> None:
    assert failure_message(TaskError("layer 3 is wrong")) == "layer 3 is wrong"
    assert failure_message(KeyError("x")) == "KeyError: 'x'"


@pytest.mark.parametrize(("code", "expected"), [(None, 0), (0, 0), (3, 3), (256, 0), (-1, 255), ("help", EXIT_FAILED)])
def test_an_exit_is_that_of_python(code: int | str | None, expected: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert exit_code(SystemExit(code)) == expected
    assert caplog.messages == (["help"] if isinstance(code, str) else [])


SECONDS = 60.0


class Held(nn.Module):
    """A layer whose forward sets `held`, then blocks until `free` is set."""

    def __init__(self, held: threading.Event, free: threading.Event) -> None:
        super().__init__()
        self.held, self.free = held, free

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.held.set()
        assert self.free.wait(SECONDS)
        return given + 1


@contextmanager
def thread_at(work: Callable[[threading.Event, threading.Event], object]) -> Iterator[int]:
    """Run `work(held, free)` in a thread; yield the thread's identifier once `held` is set; afterwards, set `free`."""
    held, free = threading.Event(), threading.Event()
    thread = threading.Thread(target=work, args=(held, free))
    thread.start()
    assert held.wait(SECONDS)
    assert thread.ident is not None
    yield thread.ident
    free.set()
    thread.join(SECONDS)


def test_a_layer_that_hangs_is_named_with_the_line() -> None:
    with thread_at(lambda held, free: run_layer(Held(held, free), 3, (torch.ones(2),))) as thread:
        place = place_of(thread)
    lines, first = getsourcelines(Held.forward)
    line = first + next(number for number, text in enumerate(lines) if "free.wait" in text)
    assert place.startswith("layer 3 (Held), ")
    assert place.endswith(f"test_agent.py line {line}, in forward")


def test_a_thread_that_has_ended_is_nowhere() -> None:
    with thread_at(lambda held, free: (held.set(), free.wait(SECONDS))) as thread:
        pass
    assert "layer" not in place_of(thread)


STOP = Stop(reason="JobOver", message="the job is over")
READY = WorkerReady(samples=12, steps=2, data=record_of(small_task(), 0))


class Own(BaseException):
    """A task's exception class, which does not derive from Exception."""


RAISED: dict[str, type[BaseException]] = {
    kind.__name__: kind for kind in (RuntimeError, KeyboardInterrupt, GeneratorExit, Own)
}


def build(config: Mapping[str, Any]) -> Task:
    if kind := config.get("raises"):
        raise RAISED[kind]("mine")
    return small_task()


def welcome(**config: Any) -> Welcome:
    document = bamboojob(
        task={"entrypoint": "test_agent:build", "config": config}, training=training(2, 6, 2), topology={"stages": 1}
    )
    return Welcome(secret="s", manifest=document)


def plan() -> Plan:
    spec = parse_manifest(welcome().manifest)
    return initial_plan([Peer(worker="w0", host="127.0.0.1", port=1)], ((0, 3),), 1, spec.training, spec.redundancy)


class Channel:
    """A fake control channel. `answers` returns the coordinator's answers to a message, or to a wake (None).

    said: the agent's messages. sent: each one's class name and whether it may be late; ("wake", False) for a wake.
    """

    def __init__(
        self,
        url: str,
        token: Callable[[], str],
        hello: Callable[[], Hello],
        heartbeat: Callable[[], Heartbeat],
        heard: Callable[[ToWorker], None],
        authority: str,
    ) -> None:
        self.heartbeat, self.heard = heartbeat, heard
        self.said: list[Message] = []
        self.sent: list[tuple[str, bool]] = []
        self.answers: Callable[[Message | None], Iterable[ToWorker]] = lambda message: ()

    def start(self) -> None: ...

    def close(self, seconds: float) -> None: ...

    def send(self, message: Message, late: bool = False) -> None:
        self.said.append(message)
        self.sent.append((type(message).__name__, late))
        self._answer(message)

    def wake(self) -> None:
        self.sent.append(("wake", False))
        self._answer(None)

    def _answer(self, message: Message | None) -> None:
        for answer in self.answers(message):
            self.heard(answer)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerAgent]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr("bamboo_trainer.worker.agent.Control", Channel)
    worker = WorkerAgent("w0", "ws://127.0.0.1:1/", lambda: "token", "", Spans(), WorkerSettings(grace=30.0))
    yield worker
    worker.transport.close(0.0)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def channel(agent: WorkerAgent) -> Channel:
    assert isinstance(agent.control, Channel)
    return agent.control


@pytest.fixture
def said(channel: Channel) -> list[Message]:
    """Return the messages that the agent has sent to the coordinator."""
    return channel.said


def run(agent: WorkerAgent, *messages: Any) -> int:
    """Put messages into the inbox and run the agent; return its exit code."""
    for message in messages:
        agent.inbox.put(message)
    return agent.run()


def test_who_is_told_to_stop_says_goodbye(agent: WorkerAgent, said: list[Message]) -> None:
    code = run(agent, STOP)
    assert (code, said) == (EXIT_DRAINED, [Bye()])


def test_who_is_refused_ends_without_a_word(agent: WorkerAgent, said: list[Message]) -> None:
    code = run(agent, Refused(reason="Fenced", message="there is another one"))
    assert (code, said) == (EXIT_FENCED, [])


def test_a_worker_says_what_its_data_are_once_the_task_is_loaded(agent: WorkerAgent, channel: Channel) -> None:
    assert channel.heartbeat().doing == "starting"
    run(agent, welcome(), STOP)
    assert channel.said == [READY, Bye()]


@pytest.mark.parametrize("kind", RAISED)
def test_whatever_a_task_raises_is_its_error(
    agent: WorkerAgent, said: list[Message], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    code = run(agent, welcome(raises=kind))
    (failed,) = said
    assert isinstance(failed, WorkerFailed)
    assert (code, failed.reason) == (EXIT_FAILED, "TaskFailed")
    assert f"{kind}: mine" in failed.message
    assert "in build" in failed.message
    assert caplog.messages[-1] == f"TaskFailed: {failed.message}", "the last line is what Kubernetes tells of its end"


def test_a_real_interrupt_is_none(agent: WorkerAgent, said: list[Message]) -> None:
    agent.inbox.put = lambda item: None  # type: ignore[method-assign]
    agent.inbox.take = lambda seconds: os.kill(os.getpid(), signal.SIGINT) or []  # type: ignore[func-returns-value, method-assign]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start tests with it ignored
    try:
        with pytest.raises(RealInterrupt):
            agent.run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert said == []


def test_a_signal_is_a_notice_that_is_told_again_to_the_next_coordinator(agent: WorkerAgent, channel: Channel) -> None:
    def answers(message: Message | None) -> Iterator[ToWorker]:
        if isinstance(message, NoticeReceived):
            yield STOP if channel.said.count(READY) == 2 else welcome()  # the coordinator was restarted
        elif channel.said == [READY]:
            for _ in range(2):  # a person may send one, and the kubelet another
                os.kill(os.getpid(), signal.SIGTERM)

    channel.answers = answers
    before = time.monotonic()
    assert run(agent, welcome()) == EXIT_DRAINED
    first, again = (message for message in channel.said if isinstance(message, NoticeReceived))
    assert first == NoticeReceived(seconds=30.0)
    assert 30.0 - (time.monotonic() - before) - 1e-6 <= again.seconds <= 30.0


def test_a_signal_after_the_grace_period_ends_the_worker_at_once(
    agent: WorkerAgent, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(message: Message | None) -> Iterator[ToWorker]:
        if channel.said == [READY]:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
            yield STOP

    channel.answers, agent.settings = answers, WorkerSettings(grace=0.0)
    monkeypatch.setattr(os, "_exit", sys.exit)
    assert run(agent, welcome()) == 128 + signal.SIGTERM


def test_what_is_told_late_of_a_commit_leaves_before_the_worker_waits(
    agent: WorkerAgent, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bamboo_trainer.worker.agent.LATE_SECONDS", 1e9)  # a machine may stall for longer

    def answers(message: Message | None) -> list[ToWorker]:
        return [STOP] if message is None and "CellFinished" in dict(channel.sent) else []

    channel.answers = answers
    run(agent, welcome(), SendPlan(plan=plan()))
    told = [one for one in channel.sent if one[0] in ("StepCommitted", "CellFinished", "wake")]
    assert told[0] == ("StepCommitted", True)
    assert [name for name, _ in told if name != "wake"] == ["StepCommitted", "StepCommitted", "CellFinished"]
    assert told[-1] == ("wake", False), "there is nothing to do, so it is not waited for the next instruction"


def test_a_checkpoint_that_cannot_be_read_is_told_and_the_worker_goes_on(
    agent: WorkerAgent, channel: Channel, tmp_path: Path
) -> None:
    begin, checkpoint = welcome(), CheckpointId(step=1, id="a")
    begin.manifest["spec"]["checkpoint"] = {"everySteps": 1, "storage": tmp_path.as_uri()}
    channel.answers = lambda message: [STOP] if isinstance(message, RestoreFailed) else []
    code = run(agent, begin, SendPlan(plan=msgspec.structs.replace(plan(), restore=checkpoint)))
    failed = channel.said[-2]
    assert isinstance(failed, RestoreFailed)
    assert (failed.origin, failed.checkpoint, failed.damaged) == (plan().origin, checkpoint, True)
    assert code == EXIT_DRAINED
