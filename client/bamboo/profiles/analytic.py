"""Profiles computed for a device without measuring on it (roofline model), by the rates in devices.json.

An operation takes the longest of three times: of its arithmetic, of its memory traffic, and of a kernel launch.
The trainer counts the operations and bytes of a model's layers. Profiles use the rates that programs reach, not
the makers' peak rates.
The times leave out losses of small kernels, gains of a cache, and copies between host and device.
"""

from typing import Final

import msgspec

from bamboo.profiles.devices import FP32, Device, DeviceTable, Figure, device_table
from bamboo_core.names import HEARTBEAT_TIMEOUT_SECONDS
from bamboo_core.planning.profile import Layer, Machine, ModelProfile, ProfiledTask, Source, Storage, Times

# (number format, floating point operations, bytes read and written, number of runs)
Operation = tuple[str, int, int, int]

# An optimizer's step reads weights, gradients and its own state, and writes weights and state.
READ_AND_WRITTEN: Final = 2


class LayerCount(msgspec.Struct, frozen=True, kw_only=True):
    """Operations and bytes of one layer. times: number of equal layers in a row."""

    # forward, backward: of one microbatch. The rest as in `bamboo_core.planning.profile.Layer`
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    parameters: int
    optimizer: int
    gradients: int
    activations: int
    boundary: int
    cost: float
    times: int = 1


class TaskCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Operations and bytes of all layers of a task."""

    name: str
    samples: int  # of a microbatch
    layers: tuple[LayerCount, ...]
    task: ProfiledTask
    source: str  # how the operations and bytes were counted


def analytic_profile(counts: TaskCounts, name: str) -> ModelProfile:
    """Compute a profile from the counts of a task's layers. name: the device. Raises ProfileError if it is unknown."""
    table = device_table()
    device = table.named(name)
    launch = table.launch.seconds
    layers = tuple(_layer(one, device, launch) for one in counts.layers for _ in range(one.times))
    link = device.network
    return ModelProfile(
        name=f"{counts.name}@{name.lower()}",
        device=device.device,
        samples=counts.samples,
        layers=layers,
        network=link.network,
        storage=Storage(write=link.flow, read=link.flow, latency=link.latency),
        times=Times(start=table.start.seconds, detection=HEARTBEAT_TIMEOUT_SECONDS),
        machine=Machine(memory=device.memory, host_memory=device.host_memory),
        task=counts.task,
        sources=_sources(counts, table, device),
    )


def operation_seconds(operation: Operation, device: Device, launch: float) -> float:
    """Return the seconds of all runs of the operation. launch: seconds of the shortest possible operation."""
    number, flops, size, times = operation
    longest = max(flops / _products(device, number).reached, size / device.bandwidth.reached, launch)
    return times * longest


def _products(device: Device, number: str) -> Figure:
    return device.products.get(number) or device.products[FP32]


def _layer(count: LayerCount, device: Device, launch: float) -> Layer:
    forward, backward = (
        sum(operation_seconds(one, device, launch) for one in operations)
        for operations in (count.forward, count.backward)
    )
    trained = min(count.parameters, count.gradients)
    update = READ_AND_WRITTEN * (trained + count.optimizer) + count.gradients if trained else 0
    return Layer(
        forward=_rounded(forward),
        backward=_rounded(backward),
        update=_rounded(update / device.bandwidth.reached),
        parameters=count.parameters,
        optimizer=count.optimizer,
        gradients=count.gradients,
        activations=count.activations,
        boundary=count.boundary,
        cost=count.cost,
    )


def _sources(counts: TaskCounts, table: DeviceTable, device: Device) -> dict[str, Source]:
    used = dict.fromkeys(op[0] for layer in counts.layers for op in (*layer.forward, *layer.backward) if op[1])
    figures = {number: _products(device, number) for number in used}
    products = "; ".join(
        f"{number} {one.reached / 1e12:.3g} of {one.peak / 1e12:.3g} TFLOPS ({one.source})"
        for number, one in figures.items()
    )
    memory = device.bandwidth
    bandwidth = f"memory {memory.reached / 1e9:.0f} of {memory.peak / 1e9:.0f} GB/s ({memory.source})"
    seconds = (
        f"computed, not measured: operations counted from the layers, each as long as its products or its bytes take,"
        f" by figures of {table.date}: {products}; {bandwidth}; no operation shorter than"
        f" {table.launch.seconds * 1e6:.3g} us ({table.launch.source})"
    )
    return {
        "layers.seconds": Source(text=seconds[:2000], estimated=True),
        "layers.update": Source(text=f"bytes that an optimizer's step moves, by {bandwidth}"[:2000], estimated=True),
        "layers.bytes": Source(text=counts.source),
        "network": Source(text=device.network.source, estimated=True),
        "storage": Source(text="assumed to be as fast as one connection", estimated=True),
        "times": Source(
            text=f"start: {table.start.source}; detection: the heartbeat timeout, as of a machine that vanishes",
            estimated=True,
        ),
        "memory": Source(text="of the device by its data sheet; of the host as of a machine with one such device"),
    }


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.6g}")
