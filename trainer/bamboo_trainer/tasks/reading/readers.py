"""Several readers of a task's data at once: processes, or threads of this one.

A reader process holds nothing that matters: it may be killed, and another one reads its batch.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from bamboo_core.complaints import said_by
from bamboo_trainer.data.prefetched import Prefetched
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.reading import reader_process
from bamboo_trainer.tasks.reading.reader_process import START_SECONDS, Batch, ReaderProcess, ReaderTemplate
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.user_code import load_batch

logger = logging.getLogger(__name__)

MOST_ENDS: Final = 3  # of reader processes over one batch


class Readers:
    """The readers of a dataset, as many as it wants. They start with the first submitted batch.

    With processes, only the thread that runs torch operations may call `submit` and `result`; it is quiet meanwhile:
    locks that it held while a process is forked would stay locked there. Only in these calls is the template forked
    from this process, the first time and again if it was killed.
    """

    def __init__(self, task: Task, wanted: Prefetched) -> None:
        self._task, self._processes = task, wanted.processes
        self._threads = ThreadPoolExecutor(wanted.readers, thread_name_prefix="data-reader")
        self._children: dict[int, ReaderProcess] = {}  # by the thread that asks them
        self._state = threading.Condition()
        self._reading, self._paused, self._closed = 0, 0, False
        self._template: ReaderTemplate | None = None
        self._keeper: threading.Thread | None = None  # of the template

    def submit(self, indices: Sequence[int]) -> Future[Batch]:
        """Submit samples; the future has the dataset's batch, or a TaskError or TaskOutOfMemory."""
        try:
            self._require_template()
        except TaskError as error:
            failed: Future[Batch] = Future()
            failed.set_exception(error)
            return failed
        return self._threads.submit(self._read_in_child if self._processes else self._read_here, indices)

    def result(self, future: Future[Batch]) -> Batch:
        """Return a submitted batch when it is ready."""
        future.add_done_callback(lambda _: self._tell())
        while not future.done():
            self._require_template()
            with self._state:
                self._state.wait_for(lambda: future.done() or not (self._closed or self._ready()))
        return future.result()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the reading threads of this process while in this context."""
        with self._state:
            self._paused += 1
            self._state.wait_for(lambda: self._processes or not self._reading)
        try:
            yield
        finally:
            with self._state:
                self._paused -= 1
                self._state.notify_all()

    def close(self) -> None:
        """End the readers, even busy ones. Threads that are stuck end with the process."""
        with self._state:
            self._closed = True
            template, keeper = self._template, self._keeper
            self._state.notify_all()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if template and keeper:
            template.close()
            keeper.join(START_SECONDS)
            template.kill()  # if it is still there
        for thread in list(self._children):
            self._end(thread)

    def _tell(self) -> None:
        with self._state:
            self._state.notify_all()

    def _ready(self) -> bool:
        """Return whether readers can be started."""
        return not self._processes or (self._template is not None and not self._template.gone)

    def _require_template(self) -> None:
        """Fork the template, if there is none now. Raises TaskError."""
        if self._ready() or self._closed:
            return
        if self._template:
            logger.warning("the process that starts the readers of the dataset has ended; it is started again")
        made: Future[ReaderTemplate] = Future()
        keeper = threading.Thread(target=self._keep, args=(made,), name="data-readers", daemon=True)
        keeper.start()
        try:
            template = made.result(START_SECONDS)
        except (OSError, TimeoutError) as error:
            raise TaskError(f"no process that reads the dataset can be started: {said_by(error)}") from None
        with self._state:
            self._template, self._keeper = template, keeper
            self._state.notify_all()

    def _keep(self, made: Future[ReaderTemplate]) -> None:
        try:
            template = ReaderTemplate(lambda indices: load_batch(self._task, indices))
        except BaseException as error:
            made.set_exception(error)
            return
        made.set_result(template)
        template.wait()
        self._tell()

    def _read_here(self, indices: Sequence[int]) -> Batch:
        with self._state:
            self._state.wait_for(lambda: not self._paused or self._closed)
            self._reading += 1
        try:
            return load_batch(self._task, indices)
        finally:
            with self._state:
                self._reading -= 1
                self._state.notify_all()

    def _read_in_child(self, indices: Sequence[int]) -> Batch:
        how, thread = "", threading.get_ident()
        for _ in range(MOST_ENDS):
            child = self._child(thread)
            try:
                child = child or self._new_child(thread)
                return child.read(indices)
            except TimeoutError:
                self._end(thread)
                raise TaskError(
                    f"the dataset, asked for samples {list(indices)[:8]}, has not answered within "
                    f"{reader_process.SILENT_SECONDS:g} s: its reader process is stuck"
                ) from None
            except (EOFError, OSError) as error:
                how = self._end(thread) or f"cannot be started: {said_by(error)}"
                if self._closed:
                    raise TaskError("the worker ends") from None
                logger.warning("a process that reads the dataset %s; another one reads its samples", how)
        raise TaskError(
            f"the dataset, asked for samples {list(indices)[:8]}, cannot be read: its reader process {how}, and so did "
            f"{MOST_ENDS - 1} others (of too little memory, or in a library's code?)"
        )

    def _end(self, thread: int) -> str:
        """Return how that thread's process has ended; "" if it has none."""
        with self._state:
            child = self._children.pop(thread, None)
        ended = child.end() if child else ""
        self._tell()  # the template may turn out to be gone
        return ended

    def _child(self, thread: int) -> ReaderProcess | None:
        """Return the process of that thread, or None when one can be started."""
        with self._state:
            self._state.wait_for(lambda: self._closed or thread in self._children or self._ready())
            if self._closed:
                raise TaskError("the worker ends")
            return self._children.get(thread)

    def _new_child(self, thread: int) -> ReaderProcess:
        assert self._template is not None
        child = self._template.start()
        with self._state:
            self._children[thread] = child
        return child
