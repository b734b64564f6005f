"""A store of checkpoints at a path or URL: write, commit, list, read and remove. The text of each StorageError is one
sentence with the reason and the file, which errors of `manifest` may omit. Decisions are in `selection`.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from bamboo_core.checkpoint import manifest as manifests
from bamboo_core.checkpoint.layout import MANIFEST, CheckpointId, checkpoint_in, new_checkpoint, part_name
from bamboo_core.checkpoint.manifest import CheckpointDamaged, CheckpointExists, CheckpointManifest, CheckpointPart
from bamboo_core.checkpoint.selection import ListedCheckpoint, ListedState, newest_first
from bamboo_core.storage.bounded import BoundedCalls, MissingFile, StorageError, StoreLimits, StoreUnavailable, at_once
from bamboo_core.storage.files import Buffer, FileEntry, Files, total
from bamboo_core.storage.local_files import LocalFiles
from bamboo_core.storage.url import parse_url

COMMITS: Final = 3  # attempts to write a manifest that the store does not keep
_HASHED: Final = 8 << 20  # bytes; interrupts are handled between two pieces
_PROBE: Final = b"probe"


class CheckpointStore:
    """A folder of checkpoints. Thread-safe; create it after a fork, because an object store's client has a thread.

    url: a path, or a URL of `url.PROTOCOLS`. files: the storage to use instead of the one at the URL. The constructor
    does not access the store; it raises StorageError if the URL is invalid or a package is missing.
    """

    def __init__(self, url: str, limits: StoreLimits | None = None, files: Files | None = None) -> None:
        try:
            parsed = parse_url(url)
        except ValueError as error:
            raise StorageError(str(error)) from None
        self.shown = parsed.shown
        self._calls = BoundedCalls(limits or StoreLimits())
        if files is not None:
            self._files = files
        elif parsed.protocol == "file":
            self._files = LocalFiles(parsed.path)
        else:
            from bamboo_core.storage.object_store import open_store  # clients of object stores import slowly

            open_it = partial(open_store, parsed)
            self._files = self._calls.call(f"cannot open {self.shown}", open_it)

    def probe(self) -> None:
        """Check that this process can write, read and remove files. Raises StorageError now rather than hours later."""
        attempt = new_checkpoint(0)
        path = f"{attempt.folder}/{_PROBE.decode()}"
        self._write(f"cannot write to {self.shown}", lambda: self._files.write(path, [_PROBE]))
        try:
            if self._read(path, 0, len(_PROBE) + 1) != _PROBE:
                raise StoreUnavailable(f"{self.shown} does not return what was written to it")
        finally:
            self._delete(attempt.folder)

    def write_part(self, attempt: CheckpointId, layer: int, chunks: Sequence[Buffer]) -> CheckpointPart:
        """Write a layer's file durably; return its entry for the manifest. Raises StoreUnavailable. chunks: the file's
        bytes, in order; they must not change meanwhile.
        """
        path, size = attempt.part(layer), total(chunks)
        digest = hashlib.sha256()
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            for start in range(0, view.nbytes, _HASHED):
                digest.update(view[start : start + _HASHED])
        self._write(f"cannot write {self._shown(path)}", lambda: self._files.write(path, chunks), size)
        return CheckpointPart(layer=layer, file=part_name(layer), bytes=size, sha256=digest.hexdigest())

    def commit(self, manifest: CheckpointManifest) -> None:
        """Complete the checkpoint by writing its manifest. Idempotent.

        Raises ValueError for an unsound manifest; CheckpointDamaged, with nothing committed, if a file is missing or
        has another size; CheckpointExists if the attempt was committed with another manifest; StoreUnavailable, after
        which `list` shows whether it was committed.
        """
        attempt, data = manifest.place, manifests.encode(manifest)
        if problem := _missing_part(manifest, self._entries(attempt.folder)):
            raise CheckpointDamaged(f"{self._shown(attempt.folder)} cannot be committed: {problem}")
        for _ in range(COMMITS):
            with contextlib.suppress(FileExistsError):  # by an earlier try whose answer was lost, or by another process
                what = f"cannot write {self._shown(attempt.manifest)}"
                self._write(what, lambda: self._files.create(attempt.manifest, data), len(data))
            stored = self._read(attempt.manifest, 0, manifests.MOST_BYTES + 1)
            if stored == data:
                return
            if _is_sound(stored):
                raise CheckpointExists(f"{self._shown(attempt.manifest)} is there, with other contents")
            self._delete(attempt.manifest)  # it is torn, so no reader accepts it
        raise StoreUnavailable(f"{self._shown(attempt.manifest)} does not stay as it is written")

    def list(self) -> tuple[ListedCheckpoint, ...]:
        """Return the attempts in the store, newest first; empty if the folder does not exist yet. Other files are
        ignored. Raises StoreUnavailable if the folder itself cannot be listed.
        """
        entries = self._entries("")
        folders = [entry for entry in entries if entry.size is None and checkpoint_in(entry.name) is not None]
        if not folders:
            return ()
        found = at_once(self._look, folders)
        return tuple(sorted((one for one in found if one is not None), key=newest_first))

    def read_part(self, manifest: CheckpointManifest, layer: int) -> bytes:
        """Read and check a layer's file. Raises StoreUnavailable, or CheckpointDamaged if it is missing or changed."""
        part = manifest.layers[layer]
        path = manifest.place.part(layer)
        data = self._read(path, 0, part.bytes + 1)
        if len(data) != part.bytes:
            actual = f"more than {part.bytes}" if len(data) > part.bytes else f"{len(data)}"
            raise CheckpointDamaged(f"{self._shown(path)} has {actual} bytes, expected {part.bytes}")
        if hashlib.sha256(data).hexdigest() != part.sha256:
            raise CheckpointDamaged(f"{self._shown(path)} has other contents than were written (its sha256 differs)")
        return data

    def read_start(self, manifest: CheckpointManifest, layer: int, size: int) -> bytes:
        """Return the first `size` bytes of a layer's file, or all if it has fewer. Its sha256 is not checked."""
        return self._read(manifest.place.part(layer), 0, min(size, manifest.layers[layer].bytes))

    def verify(self, manifest: CheckpointManifest) -> Iterator[tuple[CheckpointPart, str]]:
        """Check each layer's file; yield its manifest entry and the problem, "" if none. Raises StoreUnavailable."""
        for part in manifest.layers:
            try:
                self.read_part(manifest, part.layer)
            except CheckpointDamaged as error:
                yield part, str(error)
            else:
                yield part, ""

    def delete(self, attempt: CheckpointId) -> None:
        """Remove a checkpoint, its manifest first, so that an interruption leaves no damaged checkpoint. Raises
        StoreUnavailable.
        """
        self._delete(attempt.manifest)
        self._delete(attempt.folder)

    def delete_unfinished(self, attempt: CheckpointId) -> None:
        """Remove the files of an abandoned attempt, unless it has a manifest. Raises StoreUnavailable."""
        if not any(entry.name == MANIFEST for entry in self._entries(attempt.folder)):
            self._delete(attempt.folder)

    def _look(self, folder: FileEntry) -> ListedCheckpoint | None:
        """Return the state of an attempt's folder; None if it has just been removed from an object store."""
        attempt = checkpoint_in(folder.name)
        assert attempt is not None
        try:
            entries = self._entries(attempt.folder)
        except StoreUnavailable as error:
            return ListedCheckpoint(attempt=attempt, state=ListedState.UNREADABLE, reason=str(error))
        files = [entry for entry in entries if entry.size is not None]
        result = partial(
            ListedCheckpoint,
            attempt=attempt,
            bytes=sum(entry.size or 0 for entry in files),
            modified=max((entry.modified for entry in files if entry.modified is not None), default=folder.modified),
        )
        if not files and folder.modified is None:
            return None  # an object store's folder exists only through its files
        if not any(entry.name == MANIFEST for entry in files):
            return result(state=ListedState.UNFINISHED, reason="it was never committed")
        try:
            manifest = self.manifest(attempt)
        except CheckpointDamaged as error:
            return result(state=ListedState.DAMAGED, reason=str(error))
        except StoreUnavailable as error:
            return result(state=ListedState.UNREADABLE, reason=str(error))
        if problem := _missing_part(manifest, files):
            return result(state=ListedState.DAMAGED, manifest=manifest, reason=problem)
        return result(state=ListedState.COMPLETE, manifest=manifest)

    def manifest(self, attempt: CheckpointId) -> CheckpointManifest:
        """Read a checkpoint's manifest. Raises StoreUnavailable, or CheckpointDamaged if it is missing or damaged."""
        manifest = manifests.decode(self._read(attempt.manifest, 0, manifests.MOST_BYTES + 1))
        if manifest.place != attempt:
            raise CheckpointDamaged(f"the manifest is that of {manifest.place.folder}")
        return manifest

    def _entries(self, folder: str) -> Sequence[FileEntry]:
        try:
            return self._calls.call(f"cannot list {self._shown(folder)}", lambda: self._files.list(folder))
        except MissingFile as error:
            raise StoreUnavailable(f"cannot list {self._shown(folder)}: {error}") from None

    def _read(self, path: str, start: int, end: int) -> bytes:
        what = f"cannot read {self._shown(path)}"
        try:
            return self._calls.call(what, lambda: self._files.read(path, start, end), end - start)
        except MissingFile:
            raise CheckpointDamaged(f"{self._shown(path)} is not there") from None

    def _write(self, what: str, function: Callable[[], None], moved: int = 0) -> None:
        try:
            self._calls.call(what, function, moved)
        except MissingFile as error:
            raise StoreUnavailable(f"{what}: {error}") from None

    def _delete(self, path: str) -> None:
        with contextlib.suppress(MissingFile):  # another process removed it first
            self._calls.call(f"cannot remove {self._shown(path)}", lambda: self._files.delete(path))

    def _shown(self, path: str) -> str:
        return f"{self.shown.rstrip('/')}/{path}" if path else self.shown


def _missing_part(manifest: CheckpointManifest, entries: Sequence[FileEntry]) -> str:
    """Describe the first layer file that is missing or has another size; "" if all are complete."""
    sizes = {entry.name: entry.size for entry in entries}
    for part in manifest.layers:
        if (actual := sizes.get(part.file)) is None:
            return f"{part.file} is missing"
        if actual != part.bytes:
            return f"{part.file} has {actual} bytes, expected {part.bytes}"
    return ""


def _is_sound(data: bytes) -> bool:
    try:
        manifests.decode(data)
    except CheckpointDamaged:
        return False
    return True
