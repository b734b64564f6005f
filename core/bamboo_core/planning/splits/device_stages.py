"""Workers with several devices: the division of each stage into device stages, one for each device. Pure.

The coordinator plans for workers: a stage of its plan is what one worker runs. A worker expands each plan that it gets:
every stage becomes one device stage for each device, with the same holders. So the engine has a pipeline of device
stages, several of which this worker owns. See docs/design/devices.md.
"""

from collections.abc import Iterable, Sequence

import msgspec

from bamboo_core.job.spec import JobSpec
from bamboo_core.planning.grid import Roles, grouped, split_layers
from bamboo_core.planning.plan import Cell, Plan

Ranges = tuple[tuple[int, int], ...]


def device_layers(spec: JobSpec, stages: Ranges, costs: Sequence[float] | None) -> Ranges:
    """Return the layers of each device stage, in order, minimising the costliest device stage of each stage.

    Empty if workers have one device. costs: the cost of each layer; None if unknown.
    """
    devices, layers = spec.worker.devices, stages[-1][1]
    if devices == 1:
        return ()
    known = costs if costs is not None and len(costs) == layers else (1.0,) * layers
    ranges: list[tuple[int, int]] = []
    for first, end in stages:
        ranges += ((first + a, first + b) for a, b in split_layers(known[first:end], devices))
    return tuple(ranges)


def devices_of(plan: Plan) -> int:
    """Return the number of devices of each worker."""
    return len(plan.device_layers) // len(plan.stages) if plan.device_layers else 1


def stage_of(part: int, devices: int) -> int:
    """Return the stage that contains a device stage."""
    return part // devices


def device_of(part: int, devices: int) -> int:
    """Return the device that runs a device stage, as an index into its worker's devices."""
    return part % devices


def parts_of(stage: int, devices: int) -> range:
    """Return the device stages of a stage, in the order of the devices."""
    return range(stage * devices, (stage + 1) * devices)


def cell_of(part: Cell, devices: int) -> Cell:
    """Return the cell that contains a device stage's cell."""
    return Cell(part.pipeline, stage_of(part.stage, devices))


def cell_parts(cell: Cell, devices: int) -> list[Cell]:
    """Return the cells of the cell's device stages, in the order of the devices."""
    return [Cell(cell.pipeline, part) for part in parts_of(cell.stage, devices)]


def expanded(plan: Plan) -> Plan:
    """Return the plan with its stages divided into device stages; the same plan if workers have one device."""
    if not plan.device_layers:
        return plan
    devices = range(devices_of(plan))
    rows = tuple(tuple(assignment for assignment in row for _ in devices) for row in plan.pipelines)
    return msgspec.structs.replace(plan, stages=plan.device_layers, pipelines=rows, device_layers=())


def folded(plan: Plan, devices: int) -> Plan:
    """Return the plan with device stages merged into stages, the inverse of `expanded`. devices: of each worker."""
    if devices == 1:
        return plan
    rows = tuple(row[::devices] for row in plan.pipelines)
    stages = grouped(plan.stages, devices)
    return msgspec.structs.replace(plan, stages=stages, pipelines=rows, device_layers=plan.stages)


def device_roles(roles: Roles, number: int, devices: int) -> Roles:
    """Return the roles of one device of a worker, in device stages. number: the device's index."""

    def parts(stages: Iterable[int]) -> tuple[int, ...]:
        return tuple(parts_of(stage, devices)[number] for stage in stages)

    return Roles(
        stage=None if roles.stage is None else parts_of(roles.stage, devices)[number],
        owned=parts(roles.owned),
        kept=parts(roles.kept),
        taken_over=parts(roles.taken_over),
    )
