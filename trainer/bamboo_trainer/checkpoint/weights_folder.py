"""The folder of a job's final weights, with a file for each stage: it is there as a whole or not at all.

Each saving has a hidden folder of its own beside it, which takes the folder's name once all stages are in it. So a
saving that was given up, and a worker that does not belong to the job any more, never leave a file among the weights.
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
_ENTRY: Final = "bamboo"  # the only one of a file's metadata, of which several have no certain order
_BEFORE: Final = "-before"  # behind a saving's name: what was in the folder before it


def stage_file(stage: int) -> str:
    return f"stage-{stage:03d}.safetensors"


def stages_of(metadata: Mapping[str, Any] | None) -> int | None:
    """How many files there are beside the one with that metadata, itself included; None if it does not say.

    ValueError if it says something else.
    """
    said = (metadata or {}).get(_ENTRY)
    if not said:
        return None
    try:
        return int(json.loads(said)["stages"])
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"metadata {_ENTRY!r}: {said!r}, expected the number of stages") from None


def write_stage(folder: Path, number: int, stage: int, stages: int, tensors: Mapping[str, Tensor], writer: str) -> None:
    """For the folder; durable when it returns. number: of the saving. stages: of it. writer: no other one's name.

    Raises OSError, or ValueError for a dtype that the format does not have, and then leaves no part of the file.
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
        with suppress(OSError):  # what keeps it from being written may keep it from being removed
            partial.unlink(missing_ok=True)


def commit_weights(folder: Path, number: int, stages: int) -> None:
    """Let that saving be the folder's content, durably; may be said again, and by several workers at once.

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
    """That saving will never be committed: remove its stages. One that is being written stays, to be removed by its
    writer; the last one who says this removes the saving's own folder. What cannot be removed is logged.
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
    """Is that path what a save of that folder has left? Beside the folder are maybe those of others, such as .run-2-7
    beside `run`, and what is none at all.
    """
    return re.fullmatch(rf"{re.escape(_hidden(folder, '').name)}\d+({_BEFORE})?", path.name) is not None


def _holds_weights(folder: Path) -> bool:
    try:
        return any(fnmatch(name, STAGE_FILES) for name in os.listdir(folder))
    except FileNotFoundError:
        return False


def _take_name(written: Path, folder: Path) -> None:
    """In the place of what an earlier coordinator's saving has left there. Other workers may do the same meanwhile."""
    before = written.with_name(written.name + _BEFORE)
    if written.exists() and _holds_weights(folder):
        _move_unless_done(folder, before)
    try:
        written.rename(folder)  # also over an empty one
    except FileNotFoundError:  # another worker was faster
        if not _holds_weights(folder):
            _move_unless_done(before, folder)  # this is what it has put there


def _move_unless_done(folder: Path, to: Path) -> None:
    """Another worker may have moved it, and put something in its place."""
    try:
        folder.rename(to)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise
