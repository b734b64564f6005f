"""Paths in a checkpoint store: a folder for each attempt to write a checkpoint, with a file for each layer.

step-000000200-5f0c2a9b71d4/layer-00000.safetensors
step-000000200-5f0c2a9b71d4/layer-00001.safetensors
step-000000200-5f0c2a9b71d4/manifest.json              written last: without it the folder is no checkpoint
"""

import re
import secrets
from typing import Annotated, Final

import msgspec

MANIFEST: Final = "manifest.json"
LARGEST_STEP: Final = 10**12
MOST_LAYERS: Final = 10_000  # of a model
ID_PATTERN: Final = r"^[a-z0-9]{1,32}$"
_FOLDER: Final = re.compile(r"step-([0-9]{9,13})-([a-z0-9]{1,32})")


class CheckpointId(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """The identity of an attempt to keep a step's state, in the job's store or in its workers' memory.

    In a store each attempt has its own folder, so an interrupted attempt and its repetition never touch the same file.
    """

    step: Annotated[int, msgspec.Meta(ge=0, le=LARGEST_STEP)]  # optimizer steps that its state has seen
    id: Annotated[str, msgspec.Meta(pattern=ID_PATTERN)]  # unique for the step

    @property
    def folder(self) -> str:
        return f"step-{self.step:09}-{self.id}"

    @property
    def manifest(self) -> str:
        return f"{self.folder}/{MANIFEST}"

    def part(self, layer: int) -> str:
        return f"{self.folder}/{part_name(layer)}"


def new_checkpoint(step: int) -> CheckpointId:
    """Return the identity of a new attempt to checkpoint a step, with a random id."""
    return CheckpointId(step, secrets.token_hex(6))


def part_name(layer: int) -> str:
    assert 0 <= layer < MOST_LAYERS, layer
    return f"layer-{layer:05}.safetensors"


def checkpoint_in(folder: str) -> CheckpointId | None:
    """Parse a checkpoint folder's name into the checkpoint's identity; None if it is not such a name."""
    match = _FOLDER.fullmatch(folder)
    if not match or int(match[1]) > LARGEST_STEP:
        return None
    found = CheckpointId(int(match[1]), match[2])
    return found if found.folder == folder else None
