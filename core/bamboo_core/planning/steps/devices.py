"""Workers with several devices in virtual time: plans in which each device is a worker of its own. Pure."""

from collections.abc import Iterable

import msgspec

from bamboo_core.planning.plan import Assignment, Plan, WorkerId
from bamboo_core.planning.splits.devices import device_of, devices_of, expanded

_BETWEEN = "/"  # between a worker's name and its device's number; no worker's name has it


def on_devices(plan: Plan) -> Plan:
    """Return the plan with a stage for each device, run and kept by devices; the same one if workers have one
    device.
    """
    devices = devices_of(plan)
    if devices == 1:
        return plan
    whole = expanded(plan)
    rows = tuple(tuple(_on(held, device_of(s, devices)) for s, held in enumerate(row)) for row in whole.pipelines)
    return msgspec.structs.replace(whole, pipelines=rows)


def _on(held: Assignment, number: int) -> Assignment:
    replicas = tuple(f"{worker}{_BETWEEN}{number}" for worker in held.replicas)
    return Assignment(owner=f"{held.owner}{_BETWEEN}{number}", replicas=replicas)


def devices_of_workers(workers: Iterable[WorkerId], devices: int) -> Iterable[tuple[WorkerId, WorkerId]]:
    """Yield the devices of all workers, each with its worker."""
    for worker in workers:
        for number in range(devices):
            yield (f"{worker}{_BETWEEN}{number}" if devices > 1 else worker), worker


def machine(device: WorkerId) -> str:
    """Return the machine of a device: all devices of a worker share its connections, and need none between each
    other.
    """
    return device.partition(_BETWEEN)[0]
