"""Checkpoints of made-up layers, and a store with faults."""

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from fsspec.implementations.memory import MemoryFileSystem

from bamboo_core.checkpoint.layout import CheckpointId, new_checkpoint, part_name
from bamboo_core.checkpoint.manifest import CheckpointManifest, CheckpointPart, DataPosition, DataRecord, Versions
from bamboo_core.checkpoint.selection import ListedCheckpoint, ListedState
from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_core.storage.bounded import StoreLimits
from bamboo_core.storage.object_store import ObjectFiles

DIGEST = "0123456789abcdef"
EPOCH = 1_750_000_000
IMPATIENT = StoreLimits(seconds=20.0, tries=3, pause=0.0)


def layer_bytes(step: int, layer: int) -> bytes:
    return f"step {step}, layer {layer} ".encode() * 20


def make_manifest(
    attempt: CheckpointId, parts=None, *, digest: str = DIGEST, created: float | None = None
) -> CheckpointManifest:
    return CheckpointManifest(
        job="small",
        step=attempt.step,
        attempt=attempt.id,
        layers=tuple(parts if parts is not None else made_up_parts(attempt.step)),
        data=DataPosition(step=attempt.step, samples=8 * attempt.step),
        seed=3,
        digest=digest,
        versions=Versions(bamboo="0.1.0", torch="2.13.0", python="3.11.9"),
        created=datetime.fromtimestamp(EPOCH + attempt.step if created is None else created, UTC),
        of_data=DataRecord(samples=400, order="0" * 16),
    )


def made_up_parts(step: int, layers: int = 2) -> list[CheckpointPart]:
    contents = [layer_bytes(step, layer) for layer in range(layers)]
    return [
        CheckpointPart(layer=number, file=part_name(number), bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        for number, data in enumerate(contents)
    ]


def save(store: CheckpointStore, step: int, layers: int = 2, *, digest: str = DIGEST) -> CheckpointManifest:
    """Write and commit a whole checkpoint, as workers do."""
    attempt = new_checkpoint(step)
    parts = [store.write_part(attempt, layer, [layer_bytes(step, layer)]) for layer in range(layers)]
    manifest = make_manifest(attempt, parts, digest=digest)
    store.commit(manifest)
    return manifest


def complete(step: int, id: str = "a", **options) -> ListedCheckpoint:
    attempt = CheckpointId(step, id)
    manifest = make_manifest(attempt, **options)
    return ListedCheckpoint(
        attempt=attempt, state=ListedState.COMPLETE, manifest=manifest, modified=manifest.created.timestamp()
    )


class Killed(BaseException):
    """Raised by a fault that simulates a killed process."""


class FaultyFileSystem(MemoryFileSystem):
    """An in-memory file system with faults. faults: name by operation number from 0, or (number, operation) -> name."""

    cachable = False

    def __init__(self, faults: Mapping[int, str] | Callable[[int, str], str | None] | None = None) -> None:
        super().__init__()
        self.store, self.pseudo_dirs = {}, [""]
        self.faults = faults or {}
        self.operations: list[str] = []
        self.answer = threading.Event()  # ends the wait of operations that hang

    def _fault(self, operation: str) -> str | None:
        number = len(self.operations)
        self.operations.append(operation)
        fault = self.faults(number, operation) if callable(self.faults) else self.faults.get(number)
        match fault:
            case "killed before":
                raise Killed
            case "fails":
                raise ConnectionResetError(errno.ECONNRESET, "reset by https://key:hunter2secret@store/?sig=abcdef123")
            case "denies":
                raise PermissionError("AccessDenied: token=abcdef123456")
            case "full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            case "hangs":
                self.answer.wait()
        return fault

    def _done(self, fault: str | None) -> None:
        if fault == "killed after":
            raise Killed
        if fault == "answer lost":
            raise ConnectionResetError(errno.ECONNRESET, "reset by peer")

    def pipe_file(self, path, value, mode="overwrite", **options):
        fault = self._fault("write")
        if fault in ("tears", "killed within"):  # a store that shows an object before it is whole
            value = value[: len(value) // 2]
        elif fault == "wrong bytes":
            value = value[:-1] + bytes([value[-1] ^ 1])
        if fault != "forgets":
            super().pipe_file(path, value, mode=mode, **options)
        if fault == "killed within":
            raise Killed
        self._done(fault)

    def cat_file(self, path, start=None, end=None, **options):
        fault = self._fault("read")
        data = super().cat_file(path, start=start, end=end, **options)
        self._done(fault)
        return data[:-1] + bytes([data[-1] ^ 1]) if fault == "wrong bytes" else data

    def ls(self, path, detail=True, **options):
        fault = self._fault("list")
        found = super().ls(path, detail=detail, **options)
        self._done(fault)
        return found

    def rm(self, path, recursive=False, maxdepth=None):
        fault = self._fault("remove")
        super().rm(path, recursive=recursive, maxdepth=maxdepth)
        self._done(fault)

    def size(self, path):
        fault = self._fault("size")
        found = MemoryFileSystem.size(self, path)
        self._done(fault)
        return found


def faulty_store(filesystem: FaultyFileSystem, limits: StoreLimits = IMPATIENT) -> CheckpointStore:
    return CheckpointStore("memory://run", limits=limits, files=ObjectFiles(filesystem, "/run"))


def states(store):
    return [(one.attempt.step, one.state.value) for one in store.list()]
