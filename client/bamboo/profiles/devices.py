"""Figures of rentable GPUs: a dated JSON table with a source for each rate.

Products (matrix products) are in floating point operations a second, bandwidth and network in bytes a second. Products
and bandwidth have the maker's figure (peak) and the rate that programs reach, since their ratio differs between cards.
"""

from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from bamboo_core.planning.profile import Network, ProfileError

TABLE: Final = Path(__file__).parent / "devices.json"
FP32: Final = "fp32"  # a number format that the table has for every device


class Figure(msgspec.Struct, frozen=True):
    """A rate of a device: the published peak, and the rate that programs reach."""

    peak: float
    reached: float
    source: str  # of both rates, with its year; "assumed" if the reached rate is not published


class Duration(msgspec.Struct, frozen=True):
    """A number of seconds with its source."""

    seconds: float
    source: str


class Link(msgspec.Struct, frozen=True):
    """The network of the most commonly rented machine with one such device; fields as in `planning.profile.Network`."""

    flow: float
    machine: float
    latency: float
    source: str

    @property
    def network(self) -> Network:
        return Network(flow=self.flow, machine=self.machine, latency=self.latency)


class Device(msgspec.Struct, frozen=True, rename="camel"):
    """The figures of a device, from which a profile is computed. memory, host_memory: bytes."""

    device: str
    memory: int
    host_memory: int
    # by number format, at least fp32. tf32: convolutions in fp32, which cuDNN computes in TF32 on devices that have it
    products: dict[str, Figure]
    bandwidth: Figure  # of the device's memory
    network: Link


class DeviceTable(msgspec.Struct, frozen=True):
    """The table of devices for which profiles can be computed."""

    date: str  # when the figures were looked up
    launch: Duration  # of the shortest operation
    start: Duration  # of a worker, from its node's start until it is ready
    devices: dict[str, Device]

    def named(self, name: str) -> Device:
        """Return the device of this name, in upper or lower case. Raises ProfileError with the known names."""
        if (found := self.devices.get(name.lower())) is None:
            raise ProfileError(f"no figures are known of the device {name[:60]!r}; known are {', '.join(self.devices)}")
        return found


@cache
def device_table() -> DeviceTable:
    """Return the table of devices that comes with Bamboo, read once."""
    return msgspec.json.decode(TABLE.read_bytes(), type=DeviceTable)
