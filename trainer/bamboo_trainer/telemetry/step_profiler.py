"""torch.profiler in chosen steps of this worker (`spec.training.profiler`), with the engine's instructions as spans.

Each step is a file of its own, `WORKER.STEP.pt.trace.json.gz`: to TensorBoard's plugin the steps are spans of the
worker, and Perfetto opens one. A worker that is lost loses the step in progress.

To end a recording and to write it holds up all threads of the process, also the one that tells that it lives: for about
a second with MOST_EVENTS. So a recording ends before it has more. How many an instruction has is known from the
recording before, and for the first one from a forward that is recorded and thrown away, in the step before if there is
one.
"""

import gzip
import logging
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from bamboo_core.complaints import said_by
from bamboo_core.control.protocol import MOST_TEXT, PROFILER_WRITTEN, Message, WorkerWarning
from bamboo_core.history.files import HistoryFiles
from bamboo_core.job.training_spec import ProfilerSpec
from bamboo_core.metrics.time_use import REDUNDANT, TIME_USE_OF_SPAN, TimeUse
from bamboo_core.planning.plan import Cell
from bamboo_core.storage.errors import StorageError
from bamboo_core.text import count
from bamboo_trainer.engine.observer import Observer
from bamboo_trainer.telemetry.trace import NEVER_AWAITED

logger = logging.getLogger(__name__)

MOST_EVENTS: Final = 200_000  # of a file: about 50 MB, 3 MB compressed
MOST_UNWRITTEN: Final = 5 * MOST_EVENTS  # held in memory, at about as many bytes each as in a file
ROOM_SECONDS: Final = 5.0  # for files to be written before a step is left out
BACKWARD_FACTOR: Final = 3  # a backward has at most so many times the events of its forward
COMPUTED: Final = {TimeUse.FORWARD, TimeUse.BACKWARD, *REDUNDANT}


def is_chosen(wanted: ProfilerSpec, worker: str, cell: Cell) -> bool:
    """Is the worker, which runs that cell, one of those that the manifest chooses?"""
    if wanted.worker is not None:
        number = wanted.worker.removeprefix("w")
        if wanted.worker != worker and worker.rpartition("-")[2] != f"w{number}":
            return False
    return wanted.stage in (None, cell.stage) and wanted.pipeline in (None, cell.pipeline)


@dataclass(slots=True, kw_only=True)
class _Session:
    """A recording of one step. trial: it only counts the events of an instruction."""

    step: int  # so many are committed before it
    recorded: profile
    span: record_function  # of the whole step, by the name that TensorBoard looks for
    trial: bool
    computed: int = 0  # instructions


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trace:
    """What is to be a file. cut: the step went on after it. last: of the chosen steps."""

    step: int
    recorded: profile
    events: int
    cut: bool
    last: bool


class StepProfiler:
    """An observer that passes on what it is told. All is called by the engine's thread. waits_for: the engine's words.

    A profiler that cannot be started or ended is told once, and not asked again.
    """

    def __init__(
        self,
        observer: Observer,
        wanted: ProfilerSpec,
        worker: str,
        device: torch.device,
        waits_for: Callable[[], str],
        files: "TraceWriter",
    ) -> None:
        self._observer, self._wanted, self._worker, self._waits_for = observer, wanted, worker, waits_for
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda" and ProfilerActivity.CUDA in supported_activities():  # type: ignore[no-untyped-call]
            self._activities.append(ProfilerActivity.CUDA)
        self._files = files
        self._failed = False
        self._session: _Session | None = None
        self._span: record_function | None = None  # of an instruction, or of a wait
        self._waiting = self._was_waiting = False
        self._newest: int | None = None  # step of which a recording was begun
        self._events_each: int | None = None  # of an instruction

    def prepare(self) -> None:
        """The first start of a profiler in a process takes seconds: not while others wait."""
        if (first := self._started()) is not None:
            try:
                first.stop()
            except Exception as error:  # as in _started
                self._give_up(f"cannot end: {type(error).__name__}: {said_by(error)}")

    # what the engine tells

    def started(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        self._was_waiting, self._waiting = self._waiting, False
        self._end_span()
        if name not in NEVER_AWAITED:
            self._enter(cell, step)
        if self._session is not None:
            where = f"stage {cell.stage} of pipeline {cell.pipeline}"
            self._begin_span(f"{name} for {where}, step {step + 1}, microbatch {microbatch}")
        self._observer.started(name, cell, step, microbatch)

    def finished(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        self._observer.finished(name, cell, step, microbatch)
        self._end_span()
        if (session := self._session) is not None:
            session.computed += TIME_USE_OF_SPAN.get(name) in COMPUTED
            if session.computed and session.trial:
                self.end()
                self._newest = None
                self._enter(cell, step)
            elif session.computed >= MOST_EVENTS // (self._events_each or MOST_EVENTS):
                self.end(cut=True)
        if self._was_waiting and name in NEVER_AWAITED:
            self._wait()

    def event(self, name: str, **facts: object) -> None:
        self._observer.event(name, **facts)
        if name == "Idle":
            self._wait()

    # recordings

    def end(self, *, cut: bool = False) -> None:
        """Ends the recording in progress, if there is one, and has it written. cut: before its step was done."""
        session, self._session = self._session, None
        if session is None:
            return
        self._end_span()
        try:
            session.span.__exit__(None, None, None)
            session.recorded.stop()
            events = _events(session.recorded)
        except Exception as error:  # as in _started
            return self._give_up(f"cannot end: {type(error).__name__}: {said_by(error)}")
        if session.trial:
            self._events_each = BACKWARD_FACTOR * max(1, events)
        else:
            self._events_each = max(1, events // max(1, session.computed))
            last = session.step + 1 == self._wanted.last_step
            self._files.write(_Trace(step=session.step, recorded=session.recorded, events=events, cut=cut, last=last))

    def when_written(self, done: Callable[[], None]) -> None:
        """Calls that, in any thread, once the files of all recordings that have ended are written and told."""
        self._files.when_written(done)

    def close(self, seconds: float) -> None:
        """At the worker's end: what was recorded is written, if that takes no longer."""
        self.end()
        self._files.close(seconds)

    def _enter(self, cell: Cell, step: int) -> None:
        """An instruction of that step begins."""
        if self._newest is not None and self._newest - 1 <= step <= self._newest:
            return  # also one of the step before, which may be repeated meanwhile
        self.end()
        trial = int(self._events_each is None)  # in the step before, if there is one
        wanted = self._wanted.first_step <= step + 1 + trial and step + 1 <= self._wanted.last_step
        if wanted and not self._failed and is_chosen(self._wanted, self._worker, cell):
            self._newest = step
            if self._files.has_room(step):
                self._begin(step)

    def _begin(self, step: int) -> None:
        if (recorded := self._started()) is not None:
            recorded.add_metadata("worker", self._worker)
            span = record_function(f"ProfilerStep#{step + 1}")
            span.__enter__()  # type: ignore[no-untyped-call]
            self._session = _Session(step=step, recorded=recorded, span=span, trial=self._events_each is None)

    def _started(self) -> profile | None:
        """A recording that has begun; None if it cannot, which is told. One in a process ends another one's."""
        recorded = profile(activities=self._activities, acc_events=False)
        try:
            if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
                self._give_up("cannot start: the task's code has one that runs")
                return None
            recorded.start()
        except Exception as error:  # whatever torch and a device's driver raise
            self._give_up(f"cannot start: {type(error).__name__}: {said_by(error)}")
            return None
        return recorded

    def _give_up(self, text: str) -> None:
        self._failed = True
        self._files.warn(f"torch.profiler {text}")

    # spans

    def _wait(self) -> None:
        self._waiting = True
        if self._session is not None and self._span is None:
            self._begin_span(f"Wait for {self._waits_for()}")

    def _begin_span(self, name: str) -> None:
        self._span = record_function(name)
        self._span.__enter__()  # type: ignore[no-untyped-call]

    def _end_span(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(None, None, None)


def _events(recorded: profile) -> int:
    assert recorded.profiler is not None
    assert recorded.profiler.kineto_results is not None
    return len(recorded.profiler.kineto_results.events())


class TraceWriter:
    """Writes the files in a thread of its own, and tells the coordinator where they are. url: of their folder.

    Once a file could not be written, it writes no more.
    """

    def __init__(self, url: str, worker: str, tell: Callable[[Message], None]) -> None:
        self._files, self._worker, self._tell = HistoryFiles(url), worker, tell
        self._queue = SimpleQueue[_Trace | Callable[[], None] | None]()
        self._changed = threading.Condition()
        self._unwritten = 0  # events
        self._thread: threading.Thread | None = None
        self._written: list[int] = []  # steps, since they were told
        self._cut = False  # one of these is not whole
        self._failed = False

    # in the engine's thread

    def has_room(self, step: int) -> bool:
        """Can another file be taken, in a while at most?"""
        with self._changed:
            room = self._changed.wait_for(lambda: self._unwritten + MOST_EVENTS <= MOST_UNWRITTEN, ROOM_SECONDS)
        if not room:
            self.warn(f"step {step + 1} is left out: the files of the steps before take longer to write")
        return room and not self._failed

    def write(self, trace: _Trace) -> None:
        with self._changed:
            self._unwritten += trace.events
        self._queue.put(trace)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="profiler", daemon=True)
            self._thread.start()

    def when_written(self, done: Callable[[], None]) -> None:
        """Calls that once all files are written and told, in any thread."""
        if self._thread is None:
            done()
        else:
            self._queue.put(done)

    def close(self, seconds: float) -> None:
        """Writes what is left, if that takes no longer."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(seconds)

    def warn(self, text: str) -> None:
        logger.warning("%s", text)
        self._tell(WorkerWarning(reason="ProfilerFailed", message=text[:MOST_TEXT]))

    # in its own thread

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, _Trace):
                self._save(item)
                if item.last:
                    self._tell_written()
            else:
                self._tell_written()
                item()
        self._tell_written()

    def _save(self, trace: _Trace) -> None:
        try:
            if not self._failed:
                self._files.write_bytes(
                    f"{self._worker}.{trace.step + 1}.pt.trace.json.gz", _compressed(trace.recorded)
                )
                self._written.append(trace.step + 1)
                self._cut = self._cut or trace.cut
        except (OSError, StorageError) as error:
            self._failed = True
            self.warn(f"what torch.profiler recorded is not written: {said_by(error)}")
        with self._changed:
            self._unwritten -= trace.events
            self._changed.notify_all()

    def _tell_written(self) -> None:
        if not self._written:
            return
        first, last = min(self._written), max(self._written)
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        cut = f", of each at most {MOST_EVENTS} events" if self._cut else ""
        files = f"{count(len(self._written), 'file')} {self._worker}.STEP.pt.trace.json.gz"
        self._written, self._cut = [], False
        text = f"{steps}{cut}: {files} in {self._files.shown}"
        self._tell(WorkerWarning(reason=PROFILER_WRITTEN, message=text[:MOST_TEXT]))


def _compressed(recorded: profile) -> bytes:
    """The bytes of the file. Raises OSError."""
    with tempfile.TemporaryDirectory(prefix="bamboo-profiler-") as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return gzip.compress(path.read_bytes(), compresslevel=3, mtime=0)
