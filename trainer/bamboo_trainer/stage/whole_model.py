"""All parameters of the model, on a worker that has the optimizer's state of some layers only: see `planning.shards`.

Forwards and backwards run on it. It is no state of its own: it follows the shards. Its version is the one of which all
shards' values are here: of those that are held here, and of the others as their owners have sent them. The shards that
are held here have its memory for their parameters, so it can be used only while they are at its version.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.state.values import StageValues
from bamboo_trainer.task import Parts


class WholeModel:
    """stage: without what an optimizer remembers. shards: the layers of each."""

    def __init__(self, stage: Stage, shards: Sequence[tuple[int, int]]) -> None:
        self._stage, self._own, self._shards = stage, stage.values, shards
        self._version = -1
        self._values: dict[tuple[int, int], Parts] = {}  # by version and shard
        self._fixed: dict[int, Parts] = {}  # by shard: what no step changes

    @property
    def version(self) -> int:
        """-1 before the first one is here as a whole."""
        return self._version

    @property
    def stage(self) -> Stage | None:
        """At that version; None before the first."""
        return self._stage if self._version >= 0 else None

    def take(self, version: int, shard: int, values: Parts, *, fixed: bool) -> None:
        """What a shard's owner has sent. fixed: what no step changes. Raises ValueError if it is nothing of that."""
        if shard >= len(self._shards):
            raise ValueError(f"values of shard {shard} of {len(self._shards)}")
        own = self._own.of_layers(self._shards[shard], fixed=fixed)
        found, expected = ([(tuple(t.shape), t.dtype) for t in tensors] for tensors in (values, own))
        if found != expected:
            differ = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
            which = "" if differ is None else f", and tensor {differ} is {found[differ]}, expected {expected[differ]}"
            raise ValueError(f"{len(found)} tensors of shard {shard}, expected {len(expected)}{which}")
        if fixed and self._version < 0:
            self._fixed.setdefault(shard, values)
        elif not fixed and version > self._version:
            self._values.setdefault((version, shard), values)

    def lacks(self, version: int, held: Mapping[int, StageValues]) -> Iterator[tuple[int, bool]]:
        """What of that version is still to come: shards, and whether it is what no step changes.

        held: the shards' states that are here. One that has this memory has to come to that version itself.
        """
        for shard in range(len(self._shards)):
            mine = held.get(shard)
            here = mine is not None and mine.version == version
            if not here and ((mine and mine.shares) or (version, shard) not in self._values):
                yield shard, False
            if self._version < 0 and shard not in held and shard not in self._fixed:
                yield shard, True

    def follow(self, version: int, held: Mapping[int, StageValues]) -> bool:
        """Go on to that version, if all of it is here; held: the shards' states, of which one at least is at it."""
        if version <= self._version or any(self.lacks(version, held)):
            return False
        like = next(values for values in held.values() if values.version == version)
        self._own.follow(like, self._pairs(version, held), begins=self._version < 0)
        self._version = version
        for mine in held.values():
            if mine.version == version and not mine.shares:
                mine.share(self._own)
        self._values = {key: values for key, values in self._values.items() if key[0] > version}
        self._fixed.clear()
        return True

    def _pairs(self, version: int, held: Mapping[int, StageValues]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each of the model's tensors that changes, and its value at that version; the first time, all tensors."""
        for shard, layers in enumerate(self._shards):
            mine = held.get(shard)
            at_it = mine is not None and mine.version == version
            values = mine.of_layers(layers) if mine and at_it else self._values[version, shard]
            yield from zip(self._own.of_layers(layers), values, strict=True)
            if self._version < 0:
                fixed = mine.of_layers(layers, fixed=True) if mine else self._fixed[shard]
                yield from zip(self._own.of_layers(layers, fixed=True), fixed, strict=True)

    def tensors(self) -> Iterator[Tensor]:
        """What others have sent and waits."""
        for values in (*self._values.values(), *self._fixed.values()):
            yield from values

    def part_for(self, shard: StageValues, final: Parts) -> Parts:
        """The part of the step's final gradient, and of the running buffers after it, that a shard's update takes."""
        return self._own.final.part_for(shard.final, final)

    def state_bytes(self) -> tuple[int, int]:
        """As a stage's."""
        return self._own.state_bytes()
