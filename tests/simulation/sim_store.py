"""A simulated store of checkpoints that may be slow, refuse or damage files.

A part becomes durable some time after its worker has given it, if the worker still lives then. Commits are checked
against the oracle, and reads return what was written, unless it was damaged or, by chance, cannot be read.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from bamboo_core.checkpoint.layout import CheckpointId, part_name
from bamboo_core.checkpoint.manifest import CheckpointPart
from bamboo_core.control import protocol
from bamboo_core.control.protocol import Message
from bamboo_trainer.checkpoint.layer_file import RestoreError
from bamboo_trainer.stage.layer_state import LayerState
from sim_arithmetic import Oracle
from sim_clock import Clock
from sim_stage import Violation, state_of

SHA = "0" * 64
FROZEN_SECONDS = 0.1


class Writer(Protocol):
    """The part of a worker that the store uses."""

    alive: bool
    frozen: bool

    def tell(self, message: Message) -> None: ...


@dataclass
class SimStore:
    clock: Clock
    oracle: Oracle
    rng: random.Random
    trouble: float = 0.0  # how often something goes wrong, from 0 to 1
    seconds: float = 0.02  # that a request takes, about
    parts: dict[CheckpointId, dict[int, LayerState]] = field(default_factory=dict)
    committed: list[CheckpointId] = field(default_factory=list)
    damaged: set[CheckpointId] = field(default_factory=set)

    def new_id(self) -> str:
        return f"{self.rng.getrandbits(48):012x}"

    def keep(self, writer: Writer, checkpoint: CheckpointId, states: Mapping[int, LayerState]) -> None:
        self._later(writer, partial(self._write, writer, checkpoint, states))

    def _write(self, writer: Writer, checkpoint: CheckpointId, states: Mapping[int, LayerState]) -> None:
        if self.rng.random() < self.trouble:
            writer.tell(protocol.CheckpointFailed(checkpoint=checkpoint, message="no space left on device"))
            return
        self.parts.setdefault(checkpoint, {}).update(states)
        parts = tuple(CheckpointPart(layer=layer, file=part_name(layer), bytes=8, sha256=SHA) for layer in states)
        writer.tell(protocol.PartsWritten(checkpoint=checkpoint, parts=parts))

    def commit(self, writer: Writer, request: protocol.CommitCheckpoint) -> None:
        self._later(writer, partial(self._commit, writer, request))

    def _commit(self, writer: Writer, request: protocol.CommitCheckpoint) -> None:
        checkpoint, there = request.checkpoint, self.parts.get(request.checkpoint, {})
        if {part.layer for part in request.parts} != set(range(self.oracle.arithmetic.layers)):
            raise Violation(f"{checkpoint} is committed with the layers {[part.layer for part in request.parts]}")
        for layer, kept in there.items():
            expected = self.oracle.states[checkpoint.step][layer]
            if (kept.version, state_of(kept)) != (checkpoint.step, expected):
                raise Violation(f"layer {layer} of {checkpoint} has state {kept}, not {expected}")
        if len(there) != len(request.parts):
            raise Violation(f"{checkpoint} is committed, and only the layers {sorted(there)} are written")
        if checkpoint not in self.committed:
            self.committed.append(checkpoint)
            if self.rng.random() < self.trouble / 2:
                self.damaged.add(checkpoint)
        writer.tell(protocol.CheckpointCommitted(checkpoint=checkpoint))
        tidied = protocol.CheckpointCommitted(checkpoint=checkpoint, tidied=True)
        self._later(writer, partial(writer.tell, tidied))

    def find(self, writer: Writer, request: protocol.FindCheckpoint) -> None:
        self._later(writer, partial(self._find, writer, request))

    def _find(self, writer: Writer, request: protocol.FindCheckpoint) -> None:
        if self.rng.random() < self.trouble:
            writer.tell(protocol.CheckpointFound(number=request.number, problem="the store does not answer"))
            return
        usable = [one for one in self.committed if one not in request.bad]
        writer.tell(protocol.CheckpointFound(number=request.number, checkpoint=max(usable, default=None)))

    def read(self, checkpoint: CheckpointId, layers: Iterable[int]) -> dict[int, LayerState]:
        """Read a checkpoint's states. Raises RestoreError if it is damaged or unreadable; Violation if uncommitted."""
        if checkpoint not in self.committed:
            raise Violation(f"{checkpoint} is read, which was never committed")
        if checkpoint in self.damaged:
            raise RestoreError(checkpoint, f"step {checkpoint.step}", damaged=True)
        if self.rng.random() < self.trouble / 4:
            raise RestoreError(checkpoint, f"step {checkpoint.step}", damaged=False)
        return {layer: self.parts[checkpoint][layer] for layer in layers}

    def _later(self, writer: Writer, action: Callable[[], None]) -> None:
        """Call `action` after the store's delay, if the worker still lives then; for a frozen worker, once it has
        thawed.
        """

        def due() -> None:
            if writer.alive and writer.frozen:
                self.clock.after(FROZEN_SECONDS, due)
            elif writer.alive:
                action()

        self.clock.after(self.seconds * self.rng.uniform(0.1, 3.0), due)
