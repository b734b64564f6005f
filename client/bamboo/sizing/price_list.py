"""Price lists of machines and of traffic between zones: a user's file, or a list that comes with Bamboo."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Final

import msgspec

from bamboo.simulation.job.zone_traffic import ZONE_TRAFFIC_PRICE
from bamboo_core.job.fields import ManifestError
from bamboo_core.job.yaml_file import load_document
from bamboo_core.text import printable

FORMAT: Final = "bamboo-prices"
VERSION: Final = 1
MOST_MACHINES: Final = 64
FOLDER: Final = Path(__file__).parent / "prices"

Usd = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
Text = Annotated[str, msgspec.Meta(max_length=2000)]


class PriceError(ValueError):
    """A mistake in a price file, as one sentence with the file's name."""


class _PricePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Base class of a price file's sections, which refuses unknown fields."""


class MachinePrice(_PricePart, frozen=True, kw_only=True):
    """The prices of one kind of machine, in USD per machine and hour."""

    spot: Usd
    # the model's profile on it: a file, relative to the price file's folder; the name of a profile that comes with
    # Bamboo; or @ and a device, for a profile computed from the job's own layers
    profile: Annotated[str, msgspec.Meta(max_length=4096)] | None = None
    on_demand: Usd | None = None  # None if the machine is not offered on demand
    source: Text = ""  # where this machine's prices come from


class NetworkPrice(_PricePart, frozen=True, kw_only=True):
    """The price in USD of a GB (10^9 bytes) that crosses zones, billed to the sender and again to the receiver."""

    between_zones: Usd = ZONE_TRAFFIC_PRICE


class PriceList(_PricePart, frozen=True, kw_only=True):
    """The content of a price file: prices of machines by name, and of traffic between zones."""

    format: str
    version: int
    source: Text  # where and when the numbers were looked up
    machines: Annotated[dict[Name, MachinePrice], msgspec.Meta(min_length=1, max_length=MOST_MACHINES)]
    network: NetworkPrice = NetworkPrice()


def shipped_prices() -> tuple[str, ...]:
    """Return the names of the price lists that come with Bamboo, months such as 2026-11, the newest last."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def of_devices(path: str, prices: PriceList, devices: Collection[str]) -> PriceList:
    """Return the price list with only the machines whose profile is computed for one of these devices.

    Raises PriceError if a device has no such machine. path: the price file, for the error.
    """
    wanted = {f"@{device.lower()}" for device in devices}
    found = {name: one for name, one in prices.machines.items() if (one.profile or "").lower() in wanted}
    known = {(one.profile or "").lower() for one in prices.machines.values()}
    if missing := sorted(wanted - known):
        devices_known = ", ".join(sorted(name[1:] for name in known if name.startswith("@"))) or "none"
        raise PriceError(
            f"{path}: no machine has the profile {missing[0][:60]!r}; devices with prices are {devices_known}"
        )
    return msgspec.structs.replace(prices, machines=found)


def read_prices(path: str) -> PriceList:
    """Read a price list: a YAML or JSON file, or the name of one that comes with Bamboo. Raises PriceError.

    Relative paths of profiles are resolved against the file's folder. The error names the file.
    """
    if path in shipped_prices():
        path = str(FOLDER / f"{path}.yaml")
    try:
        document = load_document(path)
    except ManifestError as error:
        raise PriceError("; ".join(map(str, error.problems))) from None
    prices = parse_prices(path, document)
    folder = Path(path).parent
    machines = {
        name: msgspec.structs.replace(machine, profile=_from_folder(folder, machine.profile))
        for name, machine in prices.machines.items()
    }
    return msgspec.structs.replace(prices, machines=machines)


def parse_prices(path: str, document: object) -> PriceList:
    """Return the prices in a document. Raises PriceError, which names the path, the field and the expected value."""
    try:
        prices = msgspec.convert(document, PriceList, strict=True)
    except msgspec.ValidationError as error:
        raise PriceError(f"{path}: not a price file: {_wrong_machine(document) or _sentence(error)}") from None
    if prices.format != FORMAT or prices.version != VERSION:
        found = f"{prices.format!r} version {prices.version}"[:60]
        raise PriceError(f"{path}: expected format {FORMAT!r} version {VERSION}; found {found}")
    return prices


def _from_folder(folder: Path, profile: str | None) -> str | None:
    """Return a profile's path resolved against the folder. None and names (no dot or slash) are returned as is."""
    return str(folder / profile) if profile is not None and ("." in profile or "/" in profile) else profile


def _wrong_machine(document: object) -> str:
    """Return the mistake in the first wrong machine, with its name; "" if the mistake is elsewhere."""
    machines = document.get("machines") if isinstance(document, dict) else None
    for name, machine in machines.items() if isinstance(machines, dict) else ():
        try:
            msgspec.convert(machine, MachinePrice, strict=True)
        except msgspec.ValidationError as error:
            return f"machines.{printable(str(name))[:60]}: {_sentence(error)}"
    return ""


def _sentence(error: msgspec.ValidationError) -> str:
    text = str(error)
    return text[:1].lower() + text[1:]
