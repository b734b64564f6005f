"""The engine of a worker with several devices: it runs each stage as device stages, one on each device.

Only this module translates the coordinator's messages about stages into messages about device stages, and back. See
docs/design/devices.md.
"""

from dataclasses import replace

import msgspec

from bamboo_core.control.protocol import KeepLastState, Message, PlanApplied, TakeCheckpoint
from bamboo_core.planning.plan import Plan
from bamboo_core.planning.splits.devices import devices_of, expanded, folded, stage_of
from bamboo_core.planning.splits.stage_times import StageTimes
from bamboo_trainer.engine.engine import Engine
from bamboo_trainer.engine.folding import Folding, Writers
from bamboo_trainer.engine.ports import Ports


def make_engine(ports: Ports, devices: int) -> Engine:
    """Return the engine of a worker with this number of devices."""
    return Engine(ports) if devices == 1 else DividedEngine(ports, devices)


class DividedEngine(Engine):
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
        """Return the writers of each device stage. Without states here there are none."""
        if self.components is None:
            return ()
        return self._folding.unfolded_writers(writers, self.components.plan.current.stages)

    # to the coordinator

    def tell(self, message: Message) -> None:
        """Pass on the engine's messages about device stages; see `Coordinator`."""
        parts = self.components
        if isinstance(message, PlanApplied) and parts:
            self._folding.keep(parts.plan.current.owned_by(parts.plan.worker), list(parts.states))
        if (folded := self._folding.fold(message)) is not None:
            self._coordinator.tell(folded)

    @property
    def plan_told(self) -> Plan | None:
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

    def held(self) -> dict[int, bool]:
        return {stage_of(part, self._devices): owned for part, owned in super().held().items()}

    def compile_seconds(self) -> dict[int, float]:
        found: dict[int, float] = {}
        for part, seconds in super().compile_seconds().items():
            stage = stage_of(part, self._devices)
            found[stage] = found.get(stage, 0.0) + seconds
        return found
