"""Paths below a store's URL: a folder for each attempt to write a checkpoint, and in it a file for each layer.

step-000000200-5f0c2a9b71d4/layer-00000.safetensors
step-000000200-5f0c2a9b71d4/layer-00001.safetensors
step-000000200-5f0c2a9b71d4/manifest.json              written last: without it the folder is no checkpoint
"""

import re
import secrets
from dataclasses import dataclass
from typing import Final

MANIFEST: Final = "manifest.json"
LARGEST_STEP: Final = 10**12
MOST_LAYERS: Final = 100_000
ID_PATTERN: Final = r"^[a-z0-9]{1,32}$"
_FOLDER: Final = re.compile(r"step-([0-9]{9,13})-([a-z0-9]{1,32})")


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """One attempt to write the state of one step. It has a folder of its own, so an interrupted attempt and its
    repetition never touch the same file.
    """

    step: int
    id: str  # lower-case letters and digits, unique for the step

    def __post_init__(self) -> None:
        if not 0 <= self.step <= LARGEST_STEP or not re.fullmatch(ID_PATTERN, self.id):
            raise ValueError(
                f"attempt {self.id!r} at step {self.step}: expected 1 to 32 letters and digits, and a step"
            )

    @property
    def folder(self) -> str:
        return f"step-{self.step:09}-{self.id}"

    @property
    def manifest(self) -> str:
        return f"{self.folder}/{MANIFEST}"

    def part(self, layer: int) -> str:
        return f"{self.folder}/{part_name(layer)}"


def new_attempt(step: int) -> Attempt:
    """Return an attempt at that step with a random id."""
    return Attempt(step, secrets.token_hex(6))


def part_name(layer: int) -> str:
    assert 0 <= layer < MOST_LAYERS, layer
    return f"layer-{layer:05}.safetensors"


def attempt_of(folder: str) -> Attempt | None:
    """Return the attempt of a folder; None if the name is not an attempt's."""
    match = _FOLDER.fullmatch(folder)
    if not match or int(match[1]) > LARGEST_STEP:
        return None
    attempt = Attempt(int(match[1]), match[2])
    return attempt if attempt.folder == folder else None
