"""Workers with several devices: each stage is run in as many parts, one on each device. Pure.

The coordinator plans for workers: a stage of its plan is what one worker runs. A worker expands each plan that it gets:
every stage becomes as many device stages as a worker has devices, with the same holders, so that the engine has a
pipeline of device stages, of which this worker owns several. See docs/design/devices.md.
"""

from collections.abc import Iterable, Sequence

import msgspec

from bamboo_core.job.spec import JobSpec
from bamboo_core.planning.grid import Roles, grouped, split_layers
from bamboo_core.planning.plan import Cell, Plan

Ranges = tuple[tuple[int, int], ...]


def device_layers(spec: JobSpec, stages: Ranges, costs: Sequence[float] | None) -> Ranges:
    """The layers of each device stage, in order: so that the costliest one of each stage costs least.

    Empty if workers have one device. costs: of each layer; None if they are not known. Raises ValueError if a stage has
    fewer layers than a worker has devices.
    """
    devices, layers = spec.worker.devices, stages[-1][1]
    if devices == 1:
        return ()
    known = costs if costs is not None and len(costs) == layers else (1.0,) * layers
    found: list[tuple[int, int]] = []
    for first, end in stages:
        found += ((first + a, first + b) for a, b in split_layers(known[first:end], devices))
    return tuple(found)


def devices_of(plan: Plan) -> int:
    """How many each worker has."""
    return len(plan.device_layers) // len(plan.stages) if plan.device_layers else 1


def stage_of(part: int, devices: int) -> int:
    """The stage that a device stage is a part of."""
    return part // devices


def device_of(part: int, devices: int) -> int:
    """The number of the device that runs a device stage, among its worker's."""
    return part % devices


def parts_of(stage: int, devices: int) -> range:
    """The device stages of a stage, in the order of the devices."""
    return range(stage * devices, (stage + 1) * devices)


def cell_of(part: Cell, devices: int) -> Cell:
    """The cell that a cell of a device stage is a part of."""
    return Cell(part.pipeline, stage_of(part.stage, devices))


def cell_parts(cell: Cell, devices: int) -> list[Cell]:
    """The cells of its device stages, in the order of the devices."""
    return [Cell(cell.pipeline, part) for part in parts_of(cell.stage, devices)]


def expanded(plan: Plan) -> Plan:
    """The plan with a stage for each device; it is the same one if workers have one device."""
    if not plan.device_layers:
        return plan
    devices = range(devices_of(plan))
    rows = tuple(tuple(assignment for assignment in row for _ in devices) for row in plan.pipelines)
    return msgspec.structs.replace(plan, stages=plan.device_layers, pipelines=rows, device_layers=())


def folded(plan: Plan, devices: int) -> Plan:
    """The plan that is expanded to this one. devices: of each worker."""
    if devices == 1:
        return plan
    rows = tuple(row[::devices] for row in plan.pipelines)
    stages = grouped(plan.stages, devices)
    return msgspec.structs.replace(plan, stages=stages, pipelines=rows, device_layers=plan.stages)


def device_roles(roles: Roles, number: int, devices: int) -> Roles:
    """What the device of that number holds of what its worker does, in stages of devices."""

    def parts(stages: Iterable[int]) -> tuple[int, ...]:
        return tuple(parts_of(stage, devices)[number] for stage in stages)

    return Roles(
        stage=None if roles.stage is None else parts_of(roles.stage, devices)[number],
        owned=parts(roles.owned),
        kept=parts(roles.kept),
        taken_over=parts(roles.taken_over),
    )
