"""The results of a task's decisions as a part of the state, so that later decisions follow from the job alone.

Each layer's state has them, and which of its own parameters are frozen, so that any split can restore them. A state
saved without them, as by a job without decisions, counts as one before any decision.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

from bamboo_trainer.decisions import Number
from bamboo_trainer.frames.payloads import Decided

KIND: Final = "decided"  # names are "decided:3.learning_rate", "decided:3.memory.plateau.best"
_FROZEN: Final = "frozen."
_STOP: Final = "stop."
_MEMORY: Final = "memory."
_RATE: Final = "learning_rate"


def is_of(name: str) -> bool:
    """Return whether a number with that name belongs to decisions."""
    return name.startswith(f"{KIND}:")


def numbers(decided: Decided, frozen: Mapping[str, Collection[int]], layers: Collection[int]) -> dict[str, Number]:
    """Return the numbers by name for the state of these layers. frozen: the layers that use each frozen parameter."""
    shared: dict[str, Number] = {_RATE: decided.learning_rate}
    shared |= {f"{_STOP}{name}": True for name in decided.stops}
    shared |= {f"{_MEMORY}{name}.{key}": v for name, memory in decided.memory.items() for key, v in memory.items()}
    by_name = {f"{KIND}:{layer}.{key}": value for layer in layers for key, value in shared.items()}
    return by_name | {f"{KIND}:{layer}.{_FROZEN}{name}": True for name, using in frozen.items() for layer in using}


def of_numbers(given: Mapping[str, Any], layers: Collection[int]) -> Decided | None:
    """Undo `numbers`; None if nothing was decided. Raises ValueError if the layers' decisions differ or are invalid."""
    frozen: set[str] = set()
    by_layer: list[dict[str, Any]] = []
    for layer in layers:
        start = f"{KIND}:{layer}."
        own = {name.removeprefix(start): value for name, value in given.items() if name.startswith(start)}
        frozen |= {key.removeprefix(_FROZEN) for key in own if key.startswith(_FROZEN)}
        by_layer.append({key: value for key, value in own.items() if not key.startswith(_FROZEN)})
    if any(one != by_layer[0] for one in by_layer):
        raise ValueError("the layers' states have different decisions")
    if not by_layer or not by_layer[0]:
        return None
    rate = by_layer[0].get(_RATE)
    if type(rate) is not float or not math.isfinite(rate) or rate < 0:
        raise ValueError(f"the learning rate's factor must be a finite number that is not negative, got {rate!r}")
    memory: dict[str, dict[str, Number]] = {}
    for key, value in by_layer[0].items():
        if key.startswith(_MEMORY):
            name, _, kept = key.removeprefix(_MEMORY).partition(".")
            memory.setdefault(name, {})[kept] = value
    return Decided(
        learning_rate=rate,
        frozen=tuple(sorted(frozen)),
        stops=tuple(sorted(key.removeprefix(_STOP) for key in by_layer[0] if key.startswith(_STOP))),
        memory=memory,
    )
