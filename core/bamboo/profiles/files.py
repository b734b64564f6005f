"""Profiles in files, and those that come with Bamboo. The only I/O of this package."""

from pathlib import Path

from bamboo.complaints import system_reason
from bamboo.profiles.profile import ModelProfile, ProfileError, parse_profile

MOST_BYTES = 64 * 2**20
FOLDER = Path(__file__).parent / "shipped"


def shipped_names() -> tuple[str, ...]:
    """Of the profiles that come with Bamboo: the published models on the machines that they were published with."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def read_profile(name: str) -> ModelProfile:
    """Of a file, or one that comes with Bamboo by its name. Raises ProfileError naming it."""
    if name in shipped_names():
        return _read(FOLDER / f"{name}.json")
    return _read(Path(name))


def _read(path: Path) -> ModelProfile:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        known = ", ".join(shipped_names())
        hint = f"; without a file, a name may be one of {known}" if isinstance(error, FileNotFoundError) else ""
        raise ProfileError(f"cannot read the profile {path}: {system_reason(error)}{hint}") from None
    if len(content) > MOST_BYTES:
        raise ProfileError(f"cannot read the profile {path}: it has more than {MOST_BYTES // 2**20} MiB")
    return parse_profile(str(path), content)
