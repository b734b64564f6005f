"""Formats of messages and frames between processes, which change only with their version numbers."""

import hashlib
import json
from typing import Any

import msgspec

from bamboo_core.control import protocol
from bamboo_core.names import DATA_PLANE_VERSION, PROTOCOL_VERSION
from bamboo_trainer import frames
from bamboo_trainer.frames import NO_CELL, Address, FrameKind
from bamboo_trainer.transport import wire

# Of each version, a digest of the forms. Never change the one of a version that has been released: raise the number.
CONTROL = {4: "4f3a4b9771b8d25b"}
DATA_PLANE = {6: "365634fcf1fa7acb"}


def bare(schema: Any) -> Any:
    """Return a JSON schema without titles and descriptions, which come from docstrings."""
    if isinstance(schema, dict):
        return {key: bare(value) for key, value in schema.items() if key not in ("description", "title")}
    return [bare(item) for item in schema] if isinstance(schema, list | tuple) else schema


def digest(forms: Any) -> str:
    return hashlib.sha256(json.dumps(bare(forms), sort_keys=True).encode()).hexdigest()[:16]


def schemas(*types: Any) -> Any:
    return msgspec.json.schema_components(types)


def control() -> str:
    forms = schemas(protocol.ToCoordinator, protocol.ToWorker)
    del forms[1]["Hello"]["properties"]["version"]["default"]
    return digest(forms)


def lanes(kind: FrameKind) -> list[str]:
    """Return the names of a frame kind's lanes: first for a frame with a cell, then for a frame without one."""
    return [wire.lane_of(Address(kind, pipeline, 0, 0)).name for pipeline in (0, NO_CELL)]


def data_plane() -> str:
    forms = [
        (kind.value, kind.name, schemas(form.payload), form.fewest, str(form.most), form.flat, lanes(kind))
        for kind, form in sorted(frames.FORMS.items())
    ]
    assert [kind.name for kind in FrameKind] == [form[1] for form in forms]
    return digest([forms, wire.NUMBER.format, wire.HEADER.format, schemas(wire.LinkHello)])


MESSAGE = (
    "the form of what travels has changed: raise {} in bamboo_core/names.py (and in docs/upgrade.md and the changelog) "
    "if that version has been released, and record the digest here"
)


def test_control_messages_have_the_form_of_their_version() -> None:
    assert control() == CONTROL.get(PROTOCOL_VERSION), MESSAGE.format("PROTOCOL_VERSION")


def test_frames_have_the_form_of_their_version() -> None:
    assert data_plane() == DATA_PLANE.get(DATA_PLANE_VERSION), MESSAGE.format("DATA_PLANE_VERSION")
