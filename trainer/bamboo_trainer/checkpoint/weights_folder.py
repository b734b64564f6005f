"""The folder of a job's final weights, a file for each stage, which appears as a whole or not at all.

Each save has a hidden folder of its own next to it, which is renamed to the folder once all stages are in it. So a save
that was given up, or a worker that does not belong to the job any more, never leaves a file among the weights.
"""

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from bamboo_core.storage.durable import sync, sync_names
from bamboo_trainer.checkpoint.layer_file import safetensors_bytes

logger = logging.getLogger(__name__)

STAGE_FILES: Final = "stage-*.safetensors"
_ENTRY: Final = "bamboo"  # the only entry: several would have no certain order
_BEFORE: Final = "-before"  # suffix of a save's name: the folder's content before it


def stage_file(stage: int) -> str:
    return f"stage-{stage:03d}.safetensors"


def stages_of(metadata: Mapping[str, Any] | None) -> int | None:
    """Return the number of files in the folder, from one file's metadata; None if it is not there.

    Raises ValueError for anything but a number.
    """
    entry = (metadata or {}).get(_ENTRY)
    if not entry:
        return None
    try:
        return int(json.loads(entry)["stages"])
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"metadata {_ENTRY!r}: {entry!r}, expected the number of stages") from None


def write_stage(folder: Path, number: int, stage: int, stages: int, tensors: Mapping[str, Tensor], writer: str) -> None:
    """Write a stage's file for the folder, durably. number: of the save. stages: how many. writer: a unique name.

    Raises OSError, or ValueError for a dtype that the format does not have; then no part of the file remains.
    """
    if os.path.lexists(folder) and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    file = _hidden(folder, str(number)) / stage_file(stage)
    partial = file.with_name(f".{file.name}.{writer}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as written:  # safetensors' own writer makes files that only their owner may read
            written.writelines(safetensors_bytes(tensors, {_ENTRY: json.dumps({"stages": stages})}))
        sync(partial)
        partial.replace(file)
        sync_names(file.parent)
    finally:
        with suppress(OSError):  # what prevents writing may also prevent removing
            partial.unlink(missing_ok=True)


def commit_weights(folder: Path, number: int, stages: int) -> None:
    """Make that save the folder's content, durably; may be repeated, and by several workers at once.

    Raises OSError: FileNotFoundError if neither all stages are written nor another worker has made the folder of them.
    """
    written = _hidden(folder, str(number))
    if all((written / stage_file(stage)).is_file() for stage in range(stages)):
        _take_name(written, folder)
    elif not _holds_weights(folder):
        raise FileNotFoundError(errno.ENOENT, "a stage of the final weights is missing", str(written))
    for partial in folder.glob(f".{STAGE_FILES}.*"):  # of a writer that was killed, or is not needed any more
        partial.unlink(missing_ok=True)
    sync_names(folder)
    sync_names(folder.parent)
    for other in [path for path in folder.parent.iterdir() if _is_saving(path, folder)]:
        try:
            shutil.rmtree(other)
        except FileNotFoundError:
            pass  # another worker does the same
        except OSError as error:
            logger.warning("%s is of no use any more and cannot be removed: %s", other, error)


def discard_weights(folder: Path, number: int) -> None:
    """Remove the stages of a save that will never be committed. The writer of an unfinished stage removes it; the last
    worker to call this removes the save's own folder. What cannot be removed is logged.
    """
    written = _hidden(folder, str(number))
    try:
        for file in written.glob(STAGE_FILES):
            file.unlink(missing_ok=True)
        written.rmdir()
    except FileNotFoundError:
        pass  # another worker did the same
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            logger.warning("%s is of no use any more and cannot be removed: %s", written, error)


def _hidden(folder: Path, name: str) -> Path:
    return folder.with_name(f".{folder.name}-{name}")


def _is_saving(path: Path, folder: Path) -> bool:
    """Return whether that path is a save of that folder. Next to it may be saves of other folders, such as .run-2-7
    beside `run`, and unrelated files.
    """
    return re.fullmatch(rf"{re.escape(_hidden(folder, '').name)}\d+({_BEFORE})?", path.name) is not None


def _holds_weights(folder: Path) -> bool:
    try:
        return any(fnmatch(name, STAGE_FILES) for name in os.listdir(folder))
    except FileNotFoundError:
        return False


def _take_name(written: Path, folder: Path) -> None:
    """Move a save into the place of an earlier coordinator's. Other workers may do the same meanwhile."""
    before = written.with_name(written.name + _BEFORE)
    if written.exists() and _holds_weights(folder):
        _move_unless_done(folder, before)
    try:
        written.rename(folder)  # also over an empty one
    except FileNotFoundError:  # another worker was faster
        if not _holds_weights(folder):
            _move_unless_done(before, folder)  # that worker put it there


def _move_unless_done(folder: Path, to: Path) -> None:
    """Rename a folder; ignore that another worker has moved it, or put another in its place."""
    try:
        folder.rename(to)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise
