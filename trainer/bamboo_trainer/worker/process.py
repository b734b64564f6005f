"""One worker in this process: its agent, its log and its metrics.

Each line of the log has the time, the worker and the number of committed steps (the next step is in progress). Local
workers share one file, so each line of the task's output gets them, too. A pod's log has one writer, so the task's
output stays unchanged there.

`StrikeGate` lets `bamboo run --preempt at:STEP` end a worker in the middle of a step, however fast the machine is:
before each forward and backward of chosen steps the worker asks the launcher and waits, and the local runner lets it
proceed or ends it right there.
"""

import faulthandler
import io
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TextIO

import torch

from bamboo_core.complaints import SilentErrorsNamed
from bamboo_core.planning.plan import Cell
from bamboo_trainer.worker.agent import LOCAL_SETTINGS, WorkerAgent, WorkerSettings
from bamboo_trainer.worker.telemetry import Follower, Spans, TraceFile

FORMAT = "%(asctime)s %(levelname)s %(worker)s step %(step)s %(name)s: %(message)s"
LONGEST_LINE = 1 << 16  # characters after which a line break is inserted

Step = Callable[[], int | None]


def begin_log(worker: str, step: Step, *, shared: bool) -> None:
    """Set up this process's log for the worker. step: returns the number of committed steps; None before training.
    shared: other workers write to the same file.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT))
    handler.addFilter(_Context(worker, step))
    handler.addFilter(SilentErrorsNamed())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("bamboo_trainer").setLevel(logging.WARNING if shared else logging.INFO)
    if not faulthandler.is_enabled():  # a parent that forked this process may have enabled it
        faulthandler.enable(sys.stderr, all_threads=False)  # only the thread that crashed
    if shared:
        sys.stdout = Printed(sys.stdout, worker, step)
        sys.stderr = Printed(sys.stderr, worker, step)


def end_log() -> None:
    """Write incomplete lines before this process ends."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Printed):
            stream.close()


def _shown(step: Step) -> str:
    newest = step()
    return "-" if newest is None else str(newest)


class _Context(logging.Filter):
    """A filter that adds worker and step to every record."""

    def __init__(self, worker: str, step: Step) -> None:
        super().__init__()
        self._worker, self._step = worker, step

    def filter(self, record: logging.LogRecord) -> bool:
        record.worker, record.step = self._worker, _shown(self._step)
        return True


class Printed(io.TextIOBase):
    """A text stream that writes each line to another stream in one piece, with time, worker and step before it."""

    def __init__(self, stream: TextIO, worker: str, step: Step) -> None:
        self._stream, self._worker, self._step = stream, worker, step
        self._partial: dict[int, str] = {}  # by thread, so that threads do not mix their lines

    def write(self, text: str) -> int:
        """Write text. If a progress bar overwrites its line, only the bar's last state becomes a line."""
        thread = threading.get_ident()
        *lines, partial = (self._partial.pop(thread, "") + text).split("\n")
        partial = partial.rpartition("\r")[2] if partial[:-1].count("\r") else partial
        if len(partial) > LONGEST_LINE:
            lines, partial = [*lines, partial], ""
        if partial:
            self._partial[thread] = partial
        for line in lines:
            self._put(line.rstrip("\r").rpartition("\r")[2])
        return len(text)

    def flush(self) -> None:
        """Flush the other stream; incomplete lines wait for their end."""
        self._stream.flush()

    def close(self) -> None:
        """Write incomplete lines. The other stream stays open."""
        while self._partial:
            self._put(self._partial.popitem()[1])

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def buffer(self) -> object:
        """The stream for bytes, which are passed on unchanged."""
        return self._stream.buffer

    def _put(self, line: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self._stream.write(f"{stamp} {self._worker} step {_shown(self._step)} | {line}\n")
        self._stream.flush()


logger = logging.getLogger(__name__)

GATED = ("Forward", "Backward", "BackwardInput")  # two for each microbatch, with any schedule
ANSWER_SECONDS = 60.0


class StrikeGate(Follower):
    """A gate that asks the launcher before each forward and backward of chosen steps, and waits for SIGUSR1. If
    that does not come within ANSWER_SECONDS, the worker proceeds, and never asks again. Create it before other threads.

    channel: the descriptor of a pipe to the launcher. steps: the chosen steps, from 0.
    """

    def __init__(self, worker: str, channel: int, steps: Collection[int]) -> None:
        self._worker, self._channel, self._steps = worker, channel, frozenset(steps)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

    def begins(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        if step not in self._steps or name not in GATED:
            return
        os.write(self._channel, json.dumps([self._worker, step]).encode() + b"\n")
        if signal.sigtimedwait({signal.SIGUSR1}, ANSWER_SECONDS) is None:
            logger.warning("nobody answered before step %d went on", step + 1)
            self._steps = frozenset()  # a late answer must not be taken for the next question's


def _read_token(path: Path) -> str:
    """Return the token in the file. Raises OSError, also for an empty file (not yet written) or non-ASCII text."""
    token = path.read_bytes().decode(errors="replace").strip()
    if not token.isascii() or not token:
        raise OSError(f"there is no token in {path}")
    return token


def main(
    worker: str,
    url: str,
    token: str | Path,
    zone: str = "",
    trace: str | None = None,
    gate: int | None = None,
    steps: Collection[int] = (),
    follower: Follower | None = None,
    settings: WorkerSettings = LOCAL_SETTINGS,
) -> int:
    """Run one worker in this process until it is asked to stop or fails; return its exit code.

    token: the token, or the file that always holds the newest one. gate: the descriptor of the pipe to which a
    `StrikeGate` writes its questions. steps: the steps in which it asks. follower: gets the worker's spans.
    trace: path of a `TraceFile`.
    """
    torch.set_num_threads(1)
    followers = [follower] if follower else []
    if gate is not None:
        followers.append(StrikeGate(worker, gate, steps))
    if trace:
        followers.append(TraceFile(Path(trace), worker, os.getpid()))
    newest = partial(_read_token, token) if isinstance(token, Path) else lambda: str(token)
    agent = WorkerAgent(worker, url, newest, zone, Spans(*followers), settings)
    begin_log(worker, lambda: agent.engine.step if agent.engine else None, shared=not settings.pod)
    try:
        if settings.metrics_port:
            from bamboo_trainer.worker.metrics import serve  # imported only if needed

            serve(agent, settings.host, settings.metrics_port)
        return agent.run()
    finally:
        end_log()
