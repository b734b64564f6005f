"""A worker's part in checkpoints: writing and committing them while training continues, finding and restoring them.

A separate thread writes, commits and finds them, so that training does not wait for the store.
"""

import logging
import platform
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Final

import msgspec
import torch

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.checkpoint.manifest import (
    CheckpointDamaged,
    CheckpointExists,
    CheckpointManifest,
    DataPosition,
    DataRecord,
    Versions,
    difference,
)
from bamboo_core.checkpoint.selection import DEAD_AFTER_SECONDS, GIVEN_UP_SECONDS, ListedState, choose, removable
from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_core.control.protocol import (
    MOST_TEXT,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointFound,
    CommitCheckpoint,
    FindCheckpoint,
    Message,
    PartsWritten,
    WorkerWarning,
)
from bamboo_core.job.edits import numbers_digest
from bamboo_core.job.spec import JobSpec
from bamboo_core.storage.bounded import StorageError
from bamboo_trainer.checkpoint.layer_file import RestoreError, encode, read_layer
from bamboo_trainer.stage.layer_state import LayerState
from bamboo_trainer.stage.values import StageValues

logger = logging.getLogger(__name__)

MOST_WAITING: Final = 64  # requests in the queue: a store that cannot keep up fails checkpoints, not the training
END_SECONDS: Final = 5.0  # that `close` waits for the thread
MOST_PASSED: Final = 20  # unused checkpoints that an answer names


@dataclass(frozen=True, slots=True)
class _Layers:
    checkpoint: CheckpointId
    states: dict[int, LayerState]  # not written yet


@dataclass(frozen=True, slots=True)
class _Remains:
    checkpoint: CheckpointId  # its files are removed, unless it is complete


Work = _Layers | _Remains | CommitCheckpoint | FindCheckpoint
AboutCheckpoint = PartsWritten | CheckpointCommitted | CheckpointFailed


def versions() -> Versions:
    """Return the versions of Bamboo, PyTorch and Python in this process, for a checkpoint's manifest."""
    return Versions(bamboo=version("bamboo-spot-core"), torch=str(torch.__version__), python=platform.python_version())


class WorkerCheckpoints:
    """A worker's part in the checkpoints of a job: it writes, commits, finds and restores them.

    layers: number of layers of the model. send: sends a message to the coordinator, from any thread. data: record of
    the training data. last_state: the URL of the store, if the job keeps only its last state.
    """

    def __init__(
        self,
        spec: JobSpec,
        layers: int,
        send: Callable[[Message], None],
        data: DataRecord,
        last_state: str = "",
    ) -> None:
        self._layers, self._data = layers, data
        self._spec, self._send = spec, send
        self._url = spec.checkpoint.place(spec.name) if spec.checkpoint else last_state
        self._reports: tuple[AboutCheckpoint, ...] = ()  # the newest messages, about one checkpoint
        self._digest = numbers_digest(spec)
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._store: CheckpointStore | None = None
        self._opening = threading.Lock()
        self._probed = False  # used only by the thread
        self._manifests: dict[CheckpointId, CheckpointManifest] = {}
        self._newest: CheckpointId | None = None  # the newest with layers to write
        self._begun: CheckpointId | None = None  # this worker has begun to write it; used only by the thread
        self._in_part: CheckpointId | None = None  # not all its layers are written; used only by the thread
        self._stall = 0.0  # seconds that copying the newest checkpoint's layers took
        self.stalled = 0.0  # the sum for all checkpoints
        self.written = 0  # bytes
        self.read = 0  # layers, from the store

    # in the worker's thread

    def keep(self, checkpoint: CheckpointId, states: Mapping[int, LayerState], seconds: float) -> None:
        """Queue layers for writing into the checkpoint; if the queue is full, report that the checkpoint failed.

        states: by layer, copies that no other code changes. seconds: the time that copying them took.
        """
        self._stall = seconds + (self._stall if self._newest == checkpoint else 0.0)
        self.stalled += seconds
        self._newest = checkpoint
        self._do(_Layers(checkpoint, dict(states)))

    def obey(self, request: CommitCheckpoint | FindCheckpoint) -> None:
        """Queue the coordinator's request to commit or find a checkpoint; the thread sends the answer. If the queue is
        full, a commit fails, and a search is dropped.
        """
        self._do(request)

    def drop(self, checkpoints: Sequence[CheckpointId]) -> None:
        """Stop writing this worker's newest checkpoint if it is one of `checkpoints`, which were given up or replaced.
        Ask the thread to remove its files if this worker has begun to write it, unless it has a manifest.
        """
        if self._newest is not None and self._newest in checkpoints:
            self._do(_Remains(self._newest))
            self._newest = None

    def restore(
        self, values: StageValues, checkpoint: CheckpointId, here: Mapping[int, LayerState]
    ) -> Mapping[int, LayerState]:
        """Restore a stage's values from a checkpoint of any grid; return, by layer, the states read from the store.

        Waits for the store. here: by layer, states that need not be read. Raises RestoreError.
        """
        read: dict[int, LayerState] = {}
        try:
            for layer in values.layers_needed():
                if layer not in here:
                    read[layer] = read_layer(self._open(), self._manifest(checkpoint), layer)
            self.read += len(read)
            values.restore({**here, **read})
        except StorageError as error:
            raise RestoreError(checkpoint, str(error), isinstance(error, CheckpointDamaged)) from error
        except (ValueError, IndexError) as error:
            raise RestoreError(
                checkpoint, f"it does not fit the task (was its code changed?): {error}", True
            ) from error
        if values.version != checkpoint.step:
            raise RestoreError(checkpoint, f"its files are of step {values.version}", True)
        return read

    def report(self) -> None:
        """Send the messages about the last reported checkpoint again, since the coordinator may have missed them."""
        for message in self._reports:
            self._send(message)

    def _report(self, message: AboutCheckpoint) -> None:
        same = (earlier for earlier in self._reports if earlier.checkpoint == message.checkpoint)
        self._reports = (*same, message)
        self._send(message)

    def close(self) -> None:
        """End the thread, and wait at most END_SECONDS for it. The thread begins no further layer, handles the other
        requests in the queue, and then removes an unfinished checkpoint if it left out some of its queued layers.
        """
        if self._thread is None:
            return
        self._newest = None  # so that the thread writes no more layers
        self._work.put(None)
        self._thread.join(END_SECONDS)

    def _do(self, work: Work) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
            self._thread.start()
        if self._work.qsize() < MOST_WAITING:
            self._work.put(work)
        else:
            if isinstance(work, _Layers):
                work.states.clear()
            if not isinstance(work, FindCheckpoint | _Remains):
                self._report(
                    CheckpointFailed(checkpoint=work.checkpoint, message="the store is too slow for this worker")
                )

    # in the checkpoint thread

    def _run(self) -> None:
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        """Handle the next request in the queue; return False when the thread must end. This is not a part of `_run`, so
        that an idle thread holds no reference to a layer's copy.
        """
        work = self._work.get()
        if work is None:
            if self._in_part:
                self._try(_Remains(self._in_part))
            return False
        self._try(work)
        return True

    def _try(self, work: Work) -> None:
        try:
            self._handle(work)
        except StorageError as error:
            self._failed(work, str(error))
        except Exception as error:  # a thread that ends in silence would leave the coordinator waiting
            logger.exception("a checkpoint was not written")
            self._failed(work, f"{type(error).__name__}: {error}")
        finally:
            if isinstance(work, _Layers):
                work.states.clear()

    def _failed(self, work: Work, message: str) -> None:
        match work:
            case FindCheckpoint():
                self._send(CheckpointFound(number=work.number, problem=message[:MOST_TEXT]))
            case _Remains():
                logger.warning("what is left of a checkpoint was not removed: %s", message)
            case _Layers() | CommitCheckpoint():
                self._report(CheckpointFailed(checkpoint=work.checkpoint, message=message[:MOST_TEXT]))
        if isinstance(work, _Layers):  # no part of it will be used, and a full store has no room for the next one
            self._clear(work.checkpoint)

    def _clear(self, checkpoint: CheckpointId) -> None:
        """Remove all workers' files of a failed checkpoint if this worker has begun to write it, then call `_collect`.
        If the removal fails, only log the error.
        """
        try:
            self._remove(checkpoint)
        except StorageError as error:
            logger.warning("what is left of a checkpoint was not removed: %s", error)
        else:
            self._collect(GIVEN_UP_SECONDS)

    def _remove(self, checkpoint: CheckpointId) -> None:
        if checkpoint == self._begun:
            self._open().delete_unfinished(checkpoint)
            self._begun = None

    def _handle(self, work: Work) -> None:
        match work:
            case _Layers(checkpoint, states):
                if checkpoint not in (self._newest, self._begun):
                    return  # none of it was written
                self._begun = self._in_part = checkpoint
                for layer in sorted(states):
                    if self._newest != checkpoint:
                        return  # it was given up, or another one would not have begun
                    state = states.pop(layer)
                    part = self._open().write_part(checkpoint, state.layer, encode(state))
                    common = msgspec.to_builtins(state.common)
                    self.written += part.bytes
                    self._report(PartsWritten(checkpoint=checkpoint, parts=(part,), stall=self._stall, common=common))
                self._in_part = None
            case CommitCheckpoint(checkpoint=checkpoint):
                with suppress(CheckpointExists):  # another worker was faster, and it has the same parts
                    self._commit(work)
                self._report(CheckpointCommitted(checkpoint=checkpoint))
                self._collect()
                self._report(CheckpointCommitted(checkpoint=checkpoint, tidied=True))
            case _Remains(checkpoint):
                self._remove(checkpoint)
            case FindCheckpoint():
                self._send(self._find(work))  # if the answer is lost the coordinator asks again
                self._probe()

    def _probe(self) -> None:
        """Warn the coordinator if `CheckpointStore.probe` fails. Done once, after the first search without an error."""
        if not self._probed:
            self._probed = True
            try:
                self._open().probe()
            except StorageError as error:
                self._send(WorkerWarning(reason="CheckpointStoreNotWritable", message=str(error)[:MOST_TEXT]))

    def _commit(self, request: CommitCheckpoint) -> None:
        spec, checkpoint = self._spec, request.checkpoint
        manifest = CheckpointManifest(
            job=spec.name,
            step=checkpoint.step,
            attempt=checkpoint.id,
            layers=request.parts,
            data=DataPosition(step=checkpoint.step, samples=checkpoint.step * spec.training.global_batch_size),
            seed=spec.training.seed,
            digest=self._digest,
            versions=versions(),
            created=datetime.now(UTC),
            score=request.score,
            common=request.common,
            of_data=self._data,
        )
        self._open().commit(manifest)

    def _collect(self, dead_after: float = DEAD_AFTER_SECONDS) -> None:
        """Remove the checkpoints that `removable` returns, unless the job keeps only its last state. If the
        store fails, log the error and stop; the next call tries again. dead_after: see `removable`.
        """
        store, spec = self._open(), self._spec.checkpoint
        if spec is None:
            return
        try:
            stored, now = store.list(), time.time()
            for attempt in removable(stored, spec.keep_latest, now=now, digest=self._digest, dead_after=dead_after):
                store.delete(attempt)
        except StorageError as error:
            logger.warning("old checkpoints were not removed: %s", error)

    def _find(self, request: FindCheckpoint) -> CheckpointFound:
        number, attempts = request.number, request.bad
        stored, steps = self._open().list(), self._spec.training.steps
        choice = choose(stored, self._digest, layers=self._layers, steps=steps, bad=attempts)
        newest = choice.manifest.step if choice.manifest else -1
        for one in stored:
            if (
                one.state is ListedState.UNREADABLE
                and newest < one.attempt.step <= steps
                and one.attempt not in attempts
            ):
                return CheckpointFound(number=number, problem=one.reason[:MOST_TEXT])  # it may be sound
        passed = tuple(
            f"the checkpoint of step {attempt.step} is not used: {reason}"[:MOST_TEXT]
            for attempt, reason in choice.passed[:MOST_PASSED]
            if attempt not in attempts
        )
        manifest = choice.manifest
        found = manifest.place if manifest else None
        differing = difference(manifest.of_data, self._data) if manifest else None
        other = "" if differing is None else f"data with {differing[0]}, and the job's have {differing[1]}"
        return CheckpointFound(number=number, checkpoint=found, passed=passed, other_data=other[:MOST_TEXT])

    # in either

    def _manifest(self, checkpoint: CheckpointId) -> CheckpointManifest:
        if checkpoint not in self._manifests:
            self._manifests = {checkpoint: self._open().manifest(checkpoint)}
        return self._manifests[checkpoint]

    def _open(self) -> CheckpointStore:
        assert self._url
        with self._opening:
            if self._store is None:
                self._store = CheckpointStore(self._url)
            return self._store
