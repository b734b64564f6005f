"""The handle of a started job, local or on a cluster: its progress, history, checkpoints and weights."""

import importlib
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from bamboo import background
from bamboo.jobs.errors import BambooError, ClusterError, InvalidRequest, JobInterrupted, NotInTime
from bamboo.jobs.notebook import handle_html
from bamboo.jobs.results import HistoryRows, JobProgress, Occurrence
from bamboo.local.trainer_calls.trainer_process import TrainerError, missing_packages, run_silently
from bamboo_core.checkpoint.selection import ListedState, newest_first
from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_core.history.files import find
from bamboo_core.history.records import HistoryError
from bamboo_core.kube.errors import RemoteError, UsageError
from bamboo_core.storage.bounded import StorageError

if TYPE_CHECKING:
    from bamboo.jobs.cluster_job import ClusterJob
    from bamboo.jobs.local_job import LocalJob


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """A checkpoint of the state after `step`.

    state: Complete, Damaged, Unreadable or Unfinished. reason: why it is not Complete. bytes: the size of all its
    files. written: time in UTC; None if the store does not report it.
    """

    step: int
    state: ListedState
    bytes: int
    written: datetime | None
    reason: str = ""


ExportFormat = Literal["safetensors", "huggingface"]
PRINT_SECONDS = 2.0  # at least, between lines of progress
T = TypeVar("T")
NewEvents = Callable[[], Coroutine[Any, Any, list[Occurrence]]]


async def _news(job: "ClusterJob | LocalJob", new: NewEvents, *, follow: bool) -> tuple[bool, list[Occurrence]]:
    """Return (whether to stop asking, new events). follow: wait for events or the job's end; else do not wait."""
    while True:
        over = not follow or await job.over()
        events = await new()
        if over or events:
            return over, events
        await job.moment()


def call(work: Coroutine[Any, Any, T], job: str = "") -> T:
    """Run a coroutine in the background loop and return its result. job: the job's name, for errors.

    Raises the coroutine's BambooError. Converts UsageError to InvalidRequest, and RemoteError to ClusterError,
    JobInterrupted (for JobDeleted) or NotInTime (for WaitTimedOut).
    """
    try:
        return background.call(work)
    except UsageError as error:
        raise InvalidRequest(str(error)) from None
    except RemoteError as error:
        from bamboo.remote.job_reader import JobDeleted  # slow to import, and imported already where it is raised
        from bamboo.remote.session import WaitTimedOut

        if isinstance(error, JobDeleted):
            raise JobInterrupted(job, "Deleted", "the job was deleted") from None
        raise (NotInTime if isinstance(error, WaitTimedOut) else ClusterError)(str(error)) from None


class JobHandle:
    """A started job. All methods raise BambooError if they fail.

    Used as a context manager, it stops a local job at the end of the block; a job on a cluster goes on.
    """

    def __init__(self, job: "ClusterJob | LocalJob") -> None:
        self._job = job

    @property
    def name(self) -> str:
        return self._job.name

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return call(work, self.name)

    @property
    def progress(self) -> JobProgress:
        """The job's current progress, read anew each time."""
        return self._do(self._job.progress())

    def events(self, *, follow: bool = False) -> Iterator[Occurrence]:
        """Yield the job's events, oldest first. follow: also new ones, until it ends or, if local, is suspended."""
        new, over = self._job.feed(), False
        while not over:
            over, events = self._do(_news(self._job, new, follow=follow))
            yield from events

    def history(self) -> HistoryRows:
        """Return the committed steps, evaluations and events. Raises InvalidRequest if they cannot be read."""
        try:
            return HistoryRows(find(self._job.history_place()).read_all())
        except UsageError as error:
            raise InvalidRequest(str(error)) from None
        except (HistoryError, StorageError, ValueError) as error:
            raise InvalidRequest(f"{self.name}: {error}") from None

    def wait(self, timeout: float | None = None) -> JobProgress:
        """Wait until the job is complete. timeout: seconds, after which NotInTime is raised and the job goes on.

        Raises JobFailed, JobUnrecoverable or JobInterrupted with the reason; InvalidRequest for a suspended local job.
        Ctrl-C ends a local job, after a last checkpoint if it keeps any; for a job on a cluster it ends only the wait.
        """
        try:
            return self._do(self._job.wait(timeout))
        except KeyboardInterrupt:
            self._do(self._job.interrupted())
            raise

    def watch(self) -> JobProgress:
        """Wait like `wait` without a timeout; print all events, and progress at most about every two seconds."""
        new, shown = self._job.feed(), ""
        while True:
            ended, failure = None, None
            try:
                ended = self.wait(PRINT_SECONDS)
            except NotInTime:
                pass
            except BambooError as error:
                failure = error
            try:
                for event in self._do(new()):
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
        """Preempt a worker (None: any that trains), as a cloud would. notice: warn it first instead of killing it."""
        self._do(self._job.preempt(worker, notice=notice))

    def scale(self, workers: int) -> None:
        """Set the most workers that may run stages (elastic.maxWorkers). Raises InvalidRequest if the grid is fixed."""
        self._do(self._job.scale(workers))

    def suspend(self) -> None:
        """Save the job's state in a checkpoint, stop its workers, and wait until they are gone.

        Without checkpoints, a local job raises InvalidRequest, and a job on a cluster resumes at step 0.
        """
        self._do(self._job.suspend())

    def resume(self) -> None:
        """Resume a suspended job."""
        self._do(self._job.resume())

    def stop(self) -> None:
        """Stop a local job, after a last checkpoint if it keeps any, or delete a job on a cluster; wait for its end."""
        self._do(self._job.stop())

    def checkpoints(self) -> list[StoredCheckpoint]:
        """Return the job's checkpoints, newest first. Raises InvalidRequest if it keeps none or their store fails."""
        try:
            found = CheckpointStore(self._job.checkpoint_place()).list()
        except (StorageError, ValueError) as error:
            raise InvalidRequest(str(error)) from None
        return [
            StoredCheckpoint(
                step=one.attempt.step,
                state=one.state,
                bytes=one.bytes,
                written=None if one.written is None else datetime.fromtimestamp(one.written, UTC),
                reason=one.reason,
            )
            for one in sorted(found, key=newest_first)
        ]

    def export(
        self,
        path: str | Path,
        format: ExportFormat = "safetensors",
        *,
        step: int | None = None,
        force: bool = False,
    ) -> Path:
        """Export the trained weights, or the checkpoint of `step`, like `bamboo export`; return the path.

        format: one file with a state dict, or a folder for transformers. force: replace an existing path.
        """
        job, output = self._job, Path(path)
        url = job.checkpoint_place() if step is not None else job.weights_place()  # only a checkpoint has that step
        options = {"output": output, "format": format, "step": step, "config": dict(job.task_config())}
        try:
            run_silently("an export", "export", url, **options, force=force, quiet=True)
        except TrainerError as error:
            raise BambooError(str(error)) from None
        return output

    def weights(self) -> dict[str, Any]:
        """Return the trained weights as a state dict of tensors, named as `load` names them."""
        return load(self._job.weights_place())

    def close(self) -> None:
        """Stop a local job and remove its temporary output; a job on a cluster goes on."""
        self._do(self._job.close())

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
        """Return the progress; if it cannot be read, one in state "Unknown", with the reason as its message."""
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
    """Load weights as a state dict of CPU tensors, from a file or folder of weights or from a checkpoint.

    A module split by `from_module` keeps the names of its own `state_dict`; other layers are named
    "layers.NUMBER.NAME".

    url: a safetensors file, or a folder of weights or of checkpoints. step: the checkpoint's step; None: the newest
    complete one. Raises BambooError without bamboo-trainer, or if the weights are missing or damaged.
    """
    if missing := missing_packages():
        raise BambooError(f"weights are read with {missing}, not installed here")
    weights = importlib.import_module("bamboo_trainer.checkpoint.sources")
    try:
        tensors: dict[str, Any] = weights.load(url, step=step)
    except (StorageError, ValueError) as error:
        raise BambooError(str(error)) from None
    return tensors
