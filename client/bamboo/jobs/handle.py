"""A job that was begun, here or on a cluster: what a program asks of it."""

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from bamboo.jobs import background
from bamboo.jobs.checkpoints import StoredCheckpoint, checkpoints_at
from bamboo.jobs.errors import BambooError, NotInTime
from bamboo.jobs.export import ExportFormat, export
from bamboo.jobs.notebook import handle_html
from bamboo.jobs.results import HistoryRows, JobProgress, Occurrence
from bamboo.local.trainer_calls.trainer_process import missing_packages
from bamboo_core.storage.errors import StorageError

PRINT_SECONDS = 2.0  # at least, between two lines of progress


class EventFeed(Protocol):
    """The events of a job that have not been told yet."""

    async def new(self) -> list[Occurrence]: ...


class BegunJob(Protocol):
    """A job, wherever it runs, in the loop in the background. All raise BambooError."""

    @property
    def name(self) -> str: ...
    async def progress(self) -> JobProgress: ...
    def feed(self) -> "EventFeed": ...
    async def over(self) -> bool:
        """Does nothing more happen to it for now?"""

    async def moment(self) -> None:
        """Waits until something may have happened."""

    async def wait(self, seconds: float | None) -> JobProgress: ...
    async def preempt(self, worker: str | None, *, notice: bool) -> None: ...
    async def scale(self, workers: int) -> None: ...
    async def suspend(self) -> None: ...
    async def resume(self) -> None: ...
    async def interrupted(self) -> None:
        """Ctrl-C was pressed while this job was waited for."""

    async def stop(self) -> None: ...
    async def history(self) -> HistoryRows: ...
    def checkpoint_place(self) -> str: ...
    def weights_place(self) -> str: ...
    def task_config(self) -> Mapping[str, Any]: ...
    async def close(self) -> None: ...


async def _export(job: BegunJob, path: str | Path, form: ExportFormat, *, step: int | None, force: bool) -> Path:
    """The states of a step are only in checkpoints."""
    place = job.checkpoint_place() if step is not None else job.weights_place()
    return await export(place, Path(path), form, step=step, task_config=job.task_config(), force=force)


async def _news(job: BegunJob, feed: EventFeed, *, follow: bool) -> tuple[bool, list[Occurrence]]:
    """What is new; with follow as soon as something is, or the job is over. Whether nothing more will come."""
    while True:
        over = not follow or await job.over()
        events = await feed.new()
        if over or events:
            return over, events
        await job.moment()


class JobHandle:
    """A job that was begun. All its methods raise BambooError if they cannot do it.

    As a context manager it ends a local job with its block; one on a cluster goes on.
    """

    def __init__(self, job: BegunJob) -> None:
        self._job = job

    @property
    def name(self) -> str:
        return self._job.name

    @property
    def progress(self) -> JobProgress:
        """How far the job is now."""
        return background.call(self._job.progress())

    def events(self, *, follow: bool = False) -> Iterator[Occurrence]:
        """What happened to the job, oldest first; with follow also what does until it is over."""
        feed, over = self._job.feed(), False
        while not over:
            over, events = background.call(_news(self._job, feed, follow=follow))
            yield from events

    def history(self) -> HistoryRows:
        """The losses, evaluations and events of all steps."""
        return background.call(self._job.history())

    def wait(self, timeout: float | None = None) -> JobProgress:
        """Waits until the job is complete. timeout: seconds, after which NotInTime is raised, and the job goes on.

        Raises JobFailed, JobUnrecoverable or JobInterrupted, with the reason and the traceback of the user's code.
        Ctrl-C ends a local job, after its state is kept; of a job on a cluster it ends only the wait.
        """
        try:
            return background.call(self._job.wait(timeout))
        except KeyboardInterrupt:
            background.call(self._job.interrupted())
            raise

    def watch(self) -> JobProgress:
        """Waits as `wait` does, and prints meanwhile what happens and, every two seconds, how far the job is."""
        feed, shown = self._job.feed(), ""
        while True:
            ended, failure = None, None
            try:
                ended = self.wait(PRINT_SECONDS)
            except NotInTime:
                pass
            except BambooError as error:
                failure = error
            try:
                for event in background.call(feed.new()):
                    print(event, flush=True)
            except BambooError:
                if failure is None:
                    raise
            if failure is not None:
                raise failure
            progress = ended or self.progress
            if str(progress) != shown:
                shown = str(progress)
                print(shown, flush=True)
            if ended is not None:
                return ended

    def preempt(self, worker: str | None = None, *, notice: bool = False) -> None:
        """Takes a worker away, as a cloud would, to see the job survive it. worker: None for one that trains."""
        background.call(self._job.preempt(worker, notice=notice))

    def scale(self, workers: int) -> None:
        """Changes how many workers may run stages (elastic.maxWorkers)."""
        background.call(self._job.scale(workers))

    def suspend(self) -> None:
        """Keeps the job's state in a checkpoint, stops its workers, and waits until they are gone."""
        background.call(self._job.suspend())

    def resume(self) -> None:
        """Lets a suspended job go on."""
        background.call(self._job.resume())

    def stop(self) -> None:
        """Ends the job, and waits until it has ended; one that keeps checkpoints writes a last one."""
        background.call(self._job.stop())

    def checkpoints(self) -> list[StoredCheckpoint]:
        """The job's checkpoints, the newest first."""
        return background.call(checkpoints_at(self._job.checkpoint_place()))

    def export(
        self,
        path: str | Path,
        format: ExportFormat = "safetensors",
        *,
        step: int | None = None,
        force: bool = False,
    ) -> Path:
        """Writes the trained weights, or with step the checkpoint of that step, as one state dict: `bamboo export`."""
        return background.call(_export(self._job, path, format, step=step, force=force))

    def weights(self) -> dict[str, Any]:
        """The trained weights as a state dict of tensors, named as `load` names them."""
        return load(self._job.weights_place())

    def close(self) -> None:
        """Stops a job that runs here, and removes its temporary output; a job on a cluster goes on."""
        background.call(self._job.close())

    def __enter__(self) -> "JobHandle":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<JobHandle {self._seen()}>"

    def _repr_html_(self) -> str:
        return handle_html(self._seen(), self._losses())

    def _seen(self) -> JobProgress:
        """The progress, or why it cannot be told now."""
        try:
            return self.progress
        except BambooError as error:
            return JobProgress(name=self.name, state="Unknown", message=str(error))

    def _losses(self) -> list[tuple[int, float | None]]:
        try:
            return self.history().losses()
        except BambooError:  # it keeps no history, or has none yet
            return []


def load(url: str | Path, *, step: int | None = None) -> dict[str, Any]:
    """The weights in a file or folder that a job or an export has written, or in a checkpoint, as a state dict of
    tensors on the CPU.

    Those of a module that `from_module` has split have the names of the module's own `state_dict`, all others
    "layers.NUMBER.NAME".

    url: of a file of safetensors, or a folder of weights or of checkpoints. step: of a checkpoint; None: the newest.
    Raises BambooError if nothing is there or it is damaged, and without
    bamboo-trainer, which reads them.
    """
    if missing := missing_packages():
        raise BambooError(f"weights are read with {missing}, not installed here")
    weights = importlib.import_module("bamboo_trainer.weights")
    try:
        found: dict[str, Any] = weights.load(url, step=step)
    except (StorageError, ValueError) as error:
        raise BambooError(str(error)) from None
    return found
