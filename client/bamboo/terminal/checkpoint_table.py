"""Checkpoints as a table and as JSON. Pure."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from bamboo.terminal.phrases import short_age
from bamboo.terminal.tables import plain_table
from bamboo_core.checkpoint.selection import ListedCheckpoint, ListedState
from bamboo_core.text import printable, size


def table(found: Sequence[ListedCheckpoint], now: float) -> Table:
    """Return a table with one line per checkpoint. now: seconds since 1970."""
    shown = plain_table(">STEP", ">AGE", ">SIZE", ">LAYERS", "STATE", "JOB", "FOLDER")
    for one in found:
        manifest = one.manifest
        state = one.state.value if one.state is ListedState.COMPLETE else f"{one.state.value}: {printable(one.reason)}"
        shown.add_row(
            str(one.attempt.step),
            "" if one.written is None else short_age(now - one.written),
            size(one.bytes),
            str(len(manifest.layers)) if manifest else "",
            state,
            manifest.job if manifest else "",
            one.attempt.folder,
        )
    return shown


def document(one: ListedCheckpoint) -> dict[str, Any]:
    """Return a checkpoint as JSON values; details from its manifest only if the manifest is sound."""
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
