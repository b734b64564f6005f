"""Checkpoints as a person or a program reads them. Pure."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from bamboo_core.checkpoint.found import Found, FoundState
from bamboo_core.text import duration, printable, size

UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "m"))


def table(found: Sequence[Found], now: float) -> Table:
    """A line each. now: seconds since 1970."""
    shown = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("STEP", "AGE", "SIZE", "LAYERS", "STATE", "JOB", "FOLDER"):
        shown.add_column(name, justify="right" if name in ("STEP", "AGE", "SIZE", "LAYERS") else "left")
    for one in found:
        manifest = one.manifest
        state = one.state.value if one.state is FoundState.COMPLETE else f"{one.state.value}: {printable(one.reason)}"
        shown.add_row(
            str(one.attempt.step),
            "" if one.written is None else age(now - one.written),
            size(one.bytes),
            str(len(manifest.layers)) if manifest else "",
            state,
            manifest.job if manifest else "",
            one.attempt.folder,
        )
    return shown


def age(seconds: float) -> str:
    """12s, 5m, 3h, 2d."""
    for unit, name in UNITS:
        if seconds >= unit:
            return f"{seconds // unit:.0f}{name}"
    return duration(max(0.0, seconds))


def document(one: Found) -> dict[str, Any]:
    """A checkpoint as JSON values, for programs."""
    known: dict[str, Any] = {
        "folder": one.attempt.folder,
        "step": one.attempt.step,
        "attempt": one.attempt.id,
        "state": one.state.value,
        "reason": one.reason,
        "bytes": one.bytes,
        "written": one.written,
    }
    if (manifest := one.manifest) is not None:
        known |= {
            "job": manifest.job,
            "layers": len(manifest.layers),
            "samples": manifest.data.samples,
            "seed": manifest.seed,
            "digest": manifest.digest,
            "versions": {
                "bamboo": manifest.versions.bamboo,
                "torch": manifest.versions.torch,
                "python": manifest.versions.python,
            },
        }
    return known
