"""Figures of rented devices: a dated JSON table with a source for each.

Products are in floating point operations a second, memory and network in bytes a second. Each has the maker's figure
(peak) and what a program reaches, since their ratio differs between cards.
"""

from typing import Annotated, Final

import msgspec

from bamboo.profiles.versioned_json import decode_versioned
from bamboo_core.planning.profile import Bytes, Name, Network, ProfileError, Rate, Seconds, Text

FORMAT: Final = "bamboo-devices"
VERSION: Final = 1
MOST_DEVICES: Final = 256
FP32: Final = "fp32"  # of the products of every device


class _DevicePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Base of the table's parts."""


class Figure(_DevicePart, frozen=True, kw_only=True):
    """A figure of a device: published peak, and what programs reach."""

    peak: Rate
    reached: Rate
    source: Text  # of both, with its year; "assumed" where nobody has published what is reached


class Duration(_DevicePart, frozen=True, kw_only=True):
    """Seconds with a source."""

    seconds: Seconds
    source: Text


class Link(_DevicePart, frozen=True, kw_only=True):
    """The network of the most rented machine with one such device: see `planning.profile.Network`."""

    flow: Rate
    machine: Rate
    latency: Seconds
    source: Text

    @property
    def network(self) -> Network:
        return Network(flow=self.flow, machine=self.machine, latency=self.latency)


class Device(_DevicePart, frozen=True, kw_only=True):
    """A device that a model may be computed on."""

    device: Name
    memory: Bytes
    host_memory: Bytes
    # by the format of their numbers, fp32 at least; tf32 are those of convolutions in fp32, which cuDNN rounds where a
    # device can
    products: dict[Name, Figure]
    bandwidth: Figure  # of the device's memory
    network: Link


class DeviceTable(_DevicePart, frozen=True, kw_only=True):
    """The devices that a profile can be computed for."""

    format: str
    version: int
    date: Name  # when the figures were looked up
    launch: Duration  # of the shortest operation
    start: Duration  # of a node's worker
    devices: Annotated[dict[Name, Device], msgspec.Meta(min_length=1, max_length=MOST_DEVICES)]

    def named(self, name: str) -> Device:
        """Return the device of that name. Raises ProfileError with the known names."""
        if (found := self.devices.get(name.lower())) is None:
            raise ProfileError(f"no figures are known of the device {name[:60]!r}; known are {', '.join(self.devices)}")
        return found


_DECODER = msgspec.json.Decoder(DeviceTable, strict=True)


def parse_devices(path: str, text: bytes | str) -> DeviceTable:
    """Return the table of devices in a text. path: for messages. Raises ProfileError naming it and the expected
    value.
    """
    expected = FORMAT, VERSION
    table = decode_versioned(_DECODER, path, text, what="table of devices", expected=expected, error=ProfileError)
    for name, device in table.devices.items():
        products = {f"products.{number}": one for number, one in device.products.items()}
        figures = {**products, "bandwidth": device.bandwidth}
        for field, figure in figures.items():
            if figure.reached > figure.peak:
                raise ProfileError(f"{path}: devices.{name}.{field}: reached must be at most peak")
        if FP32 not in device.products:
            raise ProfileError(f"{path}: devices.{name}.products: expected {FP32}, since every job has some in it")
        if device.network.machine < device.network.flow:
            raise ProfileError(f"{path}: devices.{name}.network.machine: must be at least flow")
    return table
