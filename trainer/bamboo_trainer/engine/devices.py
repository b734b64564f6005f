"""The engine of a worker with several devices: it runs each stage as device stages, one on each device.

Only this module translates the coordinator's messages about stages into messages about device stages, and back.
`Folding` is pure, except that it keeps messages about device stages, to combine them into one about the stage.
See `bamboo_core.planning.splits.device_stages` and docs/design/devices.md.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from bamboo_core.control.digests import add_digests
from bamboo_core.control.protocol import (
    CellFinished,
    KeepLastState,
    LeftBehind,
    Message,
    PlanApplied,
    ReplicaSynced,
    Report,
    SpotCheckDiffers,
    StateSums,
    TakeCheckpoint,
    TakenOver,
)
from bamboo_core.planning.grid import grouped
from bamboo_core.planning.plan import Cell, Plan, WorkerId
from bamboo_core.planning.splits.device_stages import (
    cell_of,
    device_of,
    devices_of,
    expanded,
    folded,
    parts_of,
    stage_of,
)
from bamboo_core.planning.splits.speeds import StageTimes
from bamboo_trainer.engine.engine import Engine
from bamboo_trainer.engine.ports import Ports

Ranges = Sequence[tuple[int, int]]
Writers = tuple[tuple[WorkerId, ...], ...]
Part = TypeVar("Part", TakenOver, CellFinished, StateSums)


class Folding:
    """Translation between messages about device stages (a stage's parts, one on each device) and about stages.

    devices: number of the worker's devices; each of its stages runs as one device stage per device.
    """

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self._parts: dict[tuple[type, Cell | int, int], dict[int, Any]] = {}  # by kind, subject, version and device

    def forget(self) -> None:
        """Drop all kept messages, because their states are abandoned."""
        self._parts.clear()

    def keep(self, owned: Collection[Cell], held: Collection[int]) -> None:
        """Drop kept messages but those about cells of which `owned` has a part, or stages of which `held` has one."""
        kept = {*map(self._cell, owned), *(stage_of(part, self._devices) for part in held)}
        self._parts = {key: parts for key, parts in self._parts.items() if key[1] in kept}

    def fold(self, message: Message) -> Message | None:
        """Return the message in terms of stages; None while it needs messages about other device stages."""
        match message:
            case Report():
                return msgspec.structs.replace(message, held=self._held(message.held))
            case LeftBehind(cell=cell) | ReplicaSynced(cell=cell) | SpotCheckDiffers(cell=cell):
                return msgspec.structs.replace(message, cell=self._cell(cell))
            case TakenOver():
                return self._taken_over(message)
            case CellFinished(cell=cell):
                finished = self._together(message, self._cell(cell), cell.stage)
                digests = [part.digest for part in finished]
                return CellFinished(cell=self._cell(cell), digest=add_digests(digests)) if finished else None
            case StateSums():
                return self._state_sums(message)
            case _:
                return message

    def _held(self, held: Mapping[int, int]) -> dict[int, int]:
        """Return, for each stage whose device stages are all held, the oldest of their versions."""
        stages = dict.fromkeys(stage_of(part, self._devices) for part in held)
        parts = {stage: parts_of(stage, self._devices) for stage in stages}
        return {stage: min(held[i] for i in mine) for stage, mine in parts.items() if held.keys() >= set(mine)}

    def _taken_over(self, message: TakenOver) -> TakenOver | None:
        """Return the whole cell's message, with the maximum of each number; None while a part's message is missing."""
        cell = self._cell(message.cell)
        parts = self._together(message, cell, message.cell.stage)
        if not parts:
            return None
        del self._parts[TakenOver, cell, 0]
        return TakenOver(
            epoch=max(part.epoch for part in parts),
            cell=cell,
            step=max(part.step for part in parts),
            reform_ms=max(part.reform_ms for part in parts),
            recompute_ms=max(part.recompute_ms for part in parts),
            forwards=max(part.forwards for part in parts),
            backwards=max(part.backwards for part in parts),
        )

    def _state_sums(self, message: StateSums) -> StateSums | None:
        stage, version = stage_of(message.stage, self._devices), message.version
        parts = self._together(message, stage, message.stage, version)
        if not parts:
            return None
        for key in [key for key in self._parts if key[:2] == (StateSums, stage) and key[2] < version]:
            del self._parts[key]
        sums = {name: number for part in parts for name, number in part.sums.items()}
        return StateSums(stage=stage, version=version, sums=sums)

    def _together(self, message: Part, subject: Cell | int, part: int, version: int = 0) -> list[Part]:
        """Keep a message about a device stage. Return the messages about all device stages of the cell or stage
        `subject`, in order of the devices; empty until all have come.
        """
        by_device: dict[int, Part] = self._parts.setdefault((type(message), subject, version), {})
        by_device[device_of(part, self._devices)] = message
        return [by_device[device] for device in sorted(by_device)] if len(by_device) == self._devices else []

    def unfolded_writers(self, writers: Writers, stages: Ranges) -> Writers:
        """Return the workers that take turns in writing each device stage's layers to a checkpoint.

        Rotate each stage's `writers`, so that every layer keeps its writer. stages: the layers of device stages.
        """
        unfolded = []
        for stage, names in enumerate(writers):
            parts = self._layers(stage, stages)
            for begin, _ in parts:
                first = parts[0][0]
                turned = (begin - first) % max(1, len(names))
                unfolded.append((*names[turned:], *names[:turned]))
        return tuple(unfolded)

    def times(self, times: Sequence[StageTimes], stages: Ranges) -> tuple[StageTimes, ...]:
        """Return the times of each stage of which `times` covers all parts. stages: the layers of device stages."""
        known = {one.layers: one for one in times}
        found = []
        for index, layers in enumerate(grouped(stages, self._devices)):
            parts = [known.get(part) for part in self._layers(index, stages)]
            if all(parts):
                found.append(self._whole(layers, [part for part in parts if part]))
        return tuple(found)

    def _cell(self, part: Cell) -> Cell:
        return cell_of(part, self._devices)

    def _layers(self, stage: int, stages: Ranges) -> Ranges:
        """Return the layers of each part of a stage; empty if `stages` does not contain them."""
        parts = parts_of(stage, self._devices)
        return stages[parts.start : parts.stop]

    def _whole(self, layers: tuple[int, int], parts: Sequence[StageTimes]) -> StageTimes:
        run, by_layer = all(part.microbatches for part in parts), all(part.each for part in parts)
        return StageTimes(
            layers=layers,
            forward=sum(part.forward for part in parts) if run else 0.0,
            backward=sum(part.backward for part in parts) if run else 0.0,
            each=tuple(seconds for part in parts for seconds in part.each) if by_layer else (),
            microbatches=min(part.microbatches for part in parts),
        )


def make_engine(ports: Ports, devices: int) -> Engine:
    """Create the engine of a worker with this number of devices."""
    return Engine(ports) if devices == 1 else DividedEngine(ports, devices)


class DividedEngine(Engine):
    """An engine of device stages that exchanges messages about whole stages with the coordinator."""

    def __init__(self, ports: Ports, devices: int) -> None:
        self._devices, self._folding, self._coordinator = devices, Folding(devices), ports.coordinator
        super().__init__(replace(ports, coordinator=self, devices=devices))

    # from the coordinator

    def obey(self, plan: Plan, arrived: float | None = None) -> None:
        assert devices_of(plan) == self._devices, f"a plan for workers with {devices_of(plan)} devices"
        super().obey(expanded(plan), arrived)

    def forget(self) -> None:
        self._folding.forget()
        super().forget()

    def take_checkpoint(self, wanted: TakeCheckpoint) -> None:
        super().take_checkpoint(msgspec.structs.replace(wanted, writers=self._writers(wanted.writers)))

    def keep_last_state(self, wanted: KeepLastState) -> None:
        super().keep_last_state(msgspec.structs.replace(wanted, writers=self._writers(wanted.writers)))

    def _writers(self, writers: Writers) -> Writers:
        """Return each device stage's writers (`Folding.unfolded_writers`); () while no plan is in force here."""
        if self.components is None:
            return ()
        return self._folding.unfolded_writers(writers, self.components.plan.current.stages)

    # to the coordinator

    def tell(self, message: Message) -> None:
        """Fold the engine's message (`Folding.fold`), and send the result, if any, to the coordinator."""
        parts = self.components
        if isinstance(message, PlanApplied) and parts:
            self._folding.keep(parts.plan.current.owned_by(parts.plan.worker), list(parts.states))
        if (folded := self._folding.fold(message)) is not None:
            self._coordinator.tell(folded)

    @property
    def reported_plan(self) -> Plan | None:
        newest = self.newest_plan
        return folded(newest, self._devices) if newest else None

    # queries

    def times_due(self, now: float) -> tuple[StageTimes, ...] | None:
        due = super().times_due(now)
        return None if due is None else self._folding.times(due, self.timer.stages) or None

    def owned_times(self) -> list[tuple[int, StageTimes]]:
        stages, latest = self.timer.stages, [times for _, times in super().owned_times()]
        known = {times.layers[0]: times for times in self._folding.times(latest, stages)}
        firsts = [first for first, _ in stages[:: self._devices]]
        return [(index, known[first]) for index, first in enumerate(firsts) if first in known]

    def compile_seconds(self) -> dict[int, float]:
        found: dict[int, float] = {}
        for part, seconds in super().compile_seconds().items():
            stage = stage_of(part, self._devices)
            found[stage] = found.get(stage, 0.0) + seconds
        return found
