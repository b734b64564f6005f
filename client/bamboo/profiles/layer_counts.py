"""Counts of what a model's layers compute and move on any device, made by the trainer without a GPU.

A JSON file like a profile; `bamboo.profiles.analytic` turns counts into times. Sizes are bytes.
"""

from typing import Annotated, Final

import msgspec

from bamboo.profiles.versioned_json import decode_versioned
from bamboo_core.planning.profile import MOST_LAYERS, Bytes, Name, ProfiledTask, ProfileError, Text, Whole

FORMAT: Final = "bamboo-counts"
VERSION: Final = 1
MOST_OPERATIONS: Final = 100_000

Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
# The format of its products, floating point operations, bytes read and written, and how often it is run.
Operation = tuple[Name, Number, Number, Whole]
Operations = Annotated[tuple[Operation, ...], msgspec.Meta(max_length=MOST_OPERATIONS)]


class _CountPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Base of the parts of a file of counts."""


class LayerCount(_CountPart, frozen=True, kw_only=True):
    """One layer, or several equal ones in a row (times)."""

    # forward, backward: of one microbatch. The rest as in `bamboo_core.planning.profile.Layer`
    forward: Operations
    backward: Operations
    parameters: Bytes
    optimizer: Bytes
    gradients: Bytes
    activations: Bytes
    boundary: Bytes
    cost: Annotated[float, msgspec.Meta(ge=0, le=1e24)]
    times: Annotated[int, msgspec.Meta(ge=1, le=MOST_LAYERS)] = 1


class TaskCounts(_CountPart, frozen=True, kw_only=True):
    """Counts of the layers of a task."""

    format: str = FORMAT
    version: int = VERSION
    name: Name
    samples: Whole  # of a microbatch
    layers: Annotated[tuple[LayerCount, ...], msgspec.Meta(min_length=1, max_length=MOST_LAYERS)]
    task: ProfiledTask
    source: Text  # who counted, and what


_DECODER = msgspec.json.Decoder(TaskCounts, strict=True)


def parse_counts(path: str, text: bytes | str) -> TaskCounts:
    """Return the counts in a text. path: for messages. Raises ProfileError naming it and the expected value."""
    expected = FORMAT, VERSION
    return decode_versioned(
        _DECODER, path, text, what="counts of a model's layers", expected=expected, error=ProfileError
    )


def folded(layers: tuple[LayerCount, ...]) -> tuple[LayerCount, ...]:
    """Return the counts with equal neighbouring layers as one."""
    found: list[LayerCount] = []
    for layer in layers:
        if found and msgspec.structs.replace(found[-1], times=layer.times) == layer:
            found[-1] = msgspec.structs.replace(layer, times=found[-1].times + layer.times)
        else:
            found.append(layer)
    return tuple(found)
