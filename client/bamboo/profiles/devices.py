"""Figures of rented devices: a dated JSON table with a source for each.

Products are in floating point operations a second, memory and network in bytes a second. Each has the maker's figure
(peak) and what a program reaches, since their ratio differs between cards.
"""

from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from bamboo_core.planning.profile import Network, ProfileError

TABLE: Final = Path(__file__).parent / "devices.json"
FP32: Final = "fp32"  # of the products of every device


class Figure(msgspec.Struct, frozen=True):
    """A rate of a device: the published peak, and the rate that programs reach."""

    peak: float
    reached: float
    source: str  # of both rates, with its year; "assumed" if the reached rate is not published


class Duration(msgspec.Struct, frozen=True):
    """Seconds with a source."""

    seconds: float
    source: str


class Link(msgspec.Struct, frozen=True):
    """The network of the most rented machine with one such device: see `planning.profile.Network`."""

    flow: float
    machine: float
    latency: float
    source: str

    @property
    def network(self) -> Network:
        return Network(flow=self.flow, machine=self.machine, latency=self.latency)


class Device(msgspec.Struct, frozen=True, rename="camel"):
    """The figures of a device, from which a profile is computed."""

    device: str
    memory: int
    host_memory: int
    # by the format of their numbers, fp32 at least; tf32 are those of convolutions in fp32, which cuDNN rounds where a
    # device can
    products: dict[str, Figure]
    bandwidth: Figure  # of the device's memory
    network: Link


class DeviceTable(msgspec.Struct, frozen=True):
    """The devices that a profile can be computed for."""

    date: str  # when the figures were looked up
    launch: Duration  # of the shortest operation
    start: Duration  # of a node's worker
    devices: dict[str, Device]

    def named(self, name: str) -> Device:
        """Return the device of that name. Raises ProfileError with the known names."""
        if (found := self.devices.get(name.lower())) is None:
            raise ProfileError(f"no figures are known of the device {name[:60]!r}; known are {', '.join(self.devices)}")
        return found


@cache
def device_table() -> DeviceTable:
    """Read the table of devices that comes with Bamboo."""
    return msgspec.json.decode(TABLE.read_bytes(), type=DeviceTable)
