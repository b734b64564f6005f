"""What frames of each kind carry besides their address: which meta, and which tensors.

What arrives is checked here, once, before anybody uses it. A peer knows the job's secret and is believed in what it
says; that it says it in the right form is not.
"""

from dataclasses import replace
from typing import Any, Final, NamedTuple

import msgspec
import torch

from bamboo.plan import Cell
from bamboo_trainer.commit.commit_log import Commit, Ready
from bamboo_trainer.transport.frames import Again, Frame, Kind

Commits = list[tuple[int, Commit]]  # by step
Since = list[tuple[Cell, int]]  # the first step in a worker's log, by cell of its own


class Refused(ValueError):
    """A frame is not what its kind must be. It is dropped, and the link stays: what follows it can be read."""


class Announce(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which version a replica holds, and which it can reach alone; its digest, if that is the first one."""

    version: int
    secured: int
    digest: str


class State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stage's state is, as `snapshot` has it; the layout's generation at its version; the newest commits."""

    state: dict[str, Any]
    generation: int
    commits: Commits


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sums of a stage's tensors, 8 bytes each."""

    sums: bytes


class Form(NamedTuple):
    """meta: its type. flat: the tensors are pieces of a stage's gradient."""

    meta: Any
    fewest: int = 0
    most: float = 0
    flat: bool = False


_FORMS: Final = {
    Kind.ACTIVATION: Form(Again | None, 1, torch.inf),
    Kind.GRADIENT: Form(Again | None, 0, torch.inf),  # integers have none
    Kind.CONTRIBUTION: Form(Again | None, 1, 1, flat=True),
    Kind.RESULT: Form(Again | None, 1, 1, flat=True),
    Kind.TIED: Form(Again | None, 1, torch.inf, flat=True),
    Kind.READY: Form(Ready),
    Kind.COMMIT: Form(Commit),
    Kind.SYNC: Form(Commits, 1, 1, flat=True),
    Kind.STATE: Form(State, 0, torch.inf),
    Kind.ANNOUNCE: Form(Announce),
    Kind.HEARD: Form(Commits),
    Kind.ASK: Form(None),
    Kind.LOGGED: Form(Since),
    Kind.LOGGED_BULK: Form(Since),
    Kind.LOGGED_STATE: Form(Since),
    Kind.CHECK: Form(Check),
}


def read(frame: Frame) -> Frame:
    """The same frame, its meta in the form that its kind has. Raises Refused."""
    form, count = _FORMS[frame.address.kind], len(frame.tensors)
    if not form.fewest <= count <= form.most:
        raise Refused(f"{count} tensors")
    for tensor in frame.tensors:
        if form.flat and (tensor.dtype != torch.float32 or tensor.dim() != 1):
            raise Refused(f"a gradient of {tensor.dtype} {list(tensor.shape)}")
    try:
        meta = msgspec.convert(frame.meta, form.meta)
    except msgspec.ValidationError as error:
        raise Refused(f"meta: {error}") from error
    if isinstance(meta, Check) and len(meta.sums) % 8:
        raise Refused(f"sums of {len(meta.sums)} bytes")
    if isinstance(meta, State) and meta.state.get("version") != frame.address.step:
        raise Refused(f"a state of version {meta.state.get('version')!r}")
    return frame if meta is frame.meta else replace(frame, meta=meta)
