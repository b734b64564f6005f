"""Profiles in files, and those that come with Bamboo. The only I/O of this package."""

from pathlib import Path

from bamboo.profiles.analytic import analytic_profile
from bamboo.profiles.devices import DeviceTable, parse_devices
from bamboo.profiles.layer_counts import TaskCounts, parse_counts
from bamboo_core.complaints import system_reason
from bamboo_core.planning.profile import ModelProfile, ProfileError, parse_profile

MOST_BYTES = 64 * 2**20
FOLDER = Path(__file__).parent / "shipped"
COUNTS = Path(__file__).parent / "counts"
DEVICES = Path(__file__).parent / "devices.json"
AT = "@"  # between a model and a device; without a model it is the job's own


def shipped_names() -> tuple[str, ...]:
    """Return the names of the profiles that come with Bamboo: published models on the machines of their publication."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def counted_names() -> tuple[str, ...]:
    """Return the models with counted layers, each of which is a profile with @DEVICE behind it."""
    return tuple(sorted(path.stem for path in COUNTS.glob("*.json")))


def read_devices(path: str | None = None) -> DeviceTable:
    """Return the devices of a file, or of Bamboo's table. Raises ProfileError naming it."""
    found = DEVICES if path is None else Path(path)
    return parse_devices(str(found), _content(found, "the table of devices"))


def read_profile(name: str) -> ModelProfile:
    """Return the profile of a file, one of Bamboo's by its name, or MODEL@DEVICE, computed from the model's layers and
    the device's figures. Raises ProfileError naming it.
    """
    if name in shipped_names():
        return _read(FOLDER / f"{name}.json")
    if AT in name and not Path(name).exists():
        model, device = name.rsplit(AT, 1)
        return analytic_profile(_counts(model), read_devices(), device)
    return _read(Path(name))


def _counts(model: str) -> TaskCounts:
    """Return the counts of a model; the hyphen of gpt-2 may be left out."""
    known = {name.replace("-", ""): name for name in counted_names()}
    if (name := known.get(model.lower().replace("-", ""))) is None:
        raise ProfileError(
            f"the layers of {model[:60]!r} are not counted; those of {', '.join(counted_names())} are, and bamboo"
            " profile JOB.yaml --device counts your own"
        )
    path = COUNTS / f"{name}.json"
    return parse_counts(str(path), _content(path, "the counts"))


def _read(path: Path) -> ModelProfile:
    return parse_profile(str(path), _content(path, "the profile"))


def _content(path: Path, what: str) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        known = ", ".join(shipped_names())
        computed = f", or {', '.join(counted_names())} with {AT} and a device"
        hint = f"; without a file, a name may be one of {known}{computed}"
        hint = hint if isinstance(error, FileNotFoundError) and what == "the profile" else ""
        raise ProfileError(f"cannot read {what} {path}: {system_reason(error)}{hint}") from None
    if len(content) > MOST_BYTES:
        raise ProfileError(f"cannot read {what} {path}: it has more than {MOST_BYTES // 2**20} MiB")
    return content
