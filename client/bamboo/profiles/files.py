"""Lookup of profiles by name: files, profiles that come with Bamboo, and profiles computed for a device."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from bamboo.profiles.analytic import TaskCounts, analytic_profile
from bamboo.profiles.devices import device_table
from bamboo_core.complaints import system_reason
from bamboo_core.planning.profile import ModelProfile, ProfileError, parse_profile

MOST_BYTES = 64 * 2**20
FOLDER = Path(__file__).parent / "shipped"
COUNTS = Path(__file__).parent / "counts"
AT = "@"  # between a model and a device; without a model it is the job's own


def shipped_names() -> tuple[str, ...]:
    """Return the names of the profiles that come with Bamboo: published models on the machines of their publication."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def counted_names() -> tuple[str, ...]:
    """Return the models whose layer counts come with Bamboo, as MODEL in the profile name MODEL@DEVICE."""
    return tuple(sorted(path.stem for path in COUNTS.glob("*.json")))


def read_profile(name: str, count: Callable[[], TaskCounts] | None = None) -> ModelProfile:
    """Read a profile that comes with Bamboo, else a file, or compute one for MODEL@DEVICE or @DEVICE.

    count: counts the job's own layers, for @DEVICE. Raises ProfileError, which names the profile, model or device.
    """
    if name in shipped_names():
        return _read(FOLDER / f"{name}.json")
    if AT not in name or Path(name).exists():
        return _read(Path(name))
    model, device = name.rsplit(AT, 1)
    device_table().named(device)  # raises for an unknown device before counting
    counts = count() if count is not None and not model else _counts(model)
    return analytic_profile(counts, device)


def _counts(model: str) -> TaskCounts:
    """Return a model's layer counts; the case and hyphens of its name do not matter. Raises ProfileError if unknown."""
    known = {name.replace("-", ""): name for name in counted_names()}
    if (name := known.get(model.lower().replace("-", ""))) is None:
        raise ProfileError(
            f"the layers of {model[:60]!r} are not counted; those of {', '.join(counted_names())} are, and bamboo"
            " profile JOB.yaml --device counts your own"
        )
    return msgspec.json.decode((COUNTS / f"{name}.json").read_bytes(), type=TaskCounts)


def _read(path: Path) -> ModelProfile:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        hint = ""
        if isinstance(error, FileNotFoundError):
            computed = f"{', '.join(counted_names())} with {AT} and a device"
            hint = f"; without a file, a name may be one of {', '.join(shipped_names())}, or {computed}"
        raise ProfileError(f"cannot read the profile {path}: {system_reason(error)}{hint}") from None
    if len(content) > MOST_BYTES:
        raise ProfileError(f"cannot read the profile {path}: it has more than {MOST_BYTES // 2**20} MiB")
    return parse_profile(str(path), content)
