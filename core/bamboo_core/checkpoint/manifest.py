"""A checkpoint's manifest: its files, and the state that they hold. Written last, it completes the checkpoint.

The file is JSON, {"format": 1, "sha256": of the manifest's bytes, "manifest": {...}}, so torn or changed files are
detected. Readers trust no part of it.

A data record holds properties of a job's dataset that are cheap to compute. A worker compares the checkpoint's record
with its own to detect another dataset. The digest of the job's numbers (`edits.numbers_digest`) covers the seed, the
batch sizes and the task's config, but not files that the config names.
"""

import hashlib
from datetime import datetime
from typing import Annotated, Any, Final

import msgspec

from bamboo_core.checkpoint.layout import ID_PATTERN, LARGEST_STEP, MOST_LAYERS, CheckpointId, part_name
from bamboo_core.storage.bounded import StorageError
from bamboo_core.text import count


class CheckpointError(StorageError):
    """Error of a checkpoint that cannot be written, found or read."""


class CheckpointDamaged(CheckpointError):
    """Error of a checkpoint with a missing, damaged or changed file."""


class CheckpointExists(CheckpointError):
    """Error of a commit of an attempt that was already committed with another manifest."""


MOST_LOOKED_AT: Final = 16
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Form = Annotated[str, msgspec.Meta(max_length=1000)]


class LookedAt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fingerprint of one sample of a dataset: types, shapes and a digest, to compare with the same sample later."""

    sample: _Number
    form: _Form  # the types and shapes of its parts
    # digest of its bits; empty if each reading gives other bits
    digest: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16})?$")] = ""


class DataRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fingerprint of a job's training dataset: the number and order of its samples, and fingerprints of some."""

    samples: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]  # number of samples
    order: _Digest  # a digest of the numbers of the first samples in training order
    looked_at: Annotated[tuple[LookedAt, ...], msgspec.Meta(max_length=MOST_LOOKED_AT)] = ()  # some samples


def difference(before: DataRecord, now: DataRecord) -> tuple[str, str] | None:
    """Return the first difference between two datasets as two texts, before and now; None if they may be equal."""
    if before.samples != now.samples:
        return count(before.samples, "sample"), count(now.samples, "sample")
    if before.order != now.order:
        return f"an order of samples of digest {before.order}", f"one of digest {now.order}"
    current = {one.sample: one for one in now.looked_at}
    for one in before.looked_at:
        other = current.get(one.sample)
        if other is None:
            continue
        if one.form != other.form:
            return f"{one.form} as sample {one.sample}", f"{other.form} as sample {one.sample}"
        if one.digest and other.digest and one.digest != other.digest:
            name = f"a sample {one.sample} of digest"
            return f"{name} {one.digest}", f"{name} {other.digest}"
    return None


FORMAT: Final = 1
MOST_BYTES: Final = 32 << 20  # of a manifest; MOST_LAYERS layers take less
LARGEST_PART: Final = 1 << 44

_Step = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_STEP)]
_Text = Annotated[str, msgspec.Meta(max_length=253)]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class CheckpointPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The manifest's entry for the file of one layer."""

    layer: Annotated[int, msgspec.Meta(ge=0, lt=MOST_LAYERS)]
    file: _Text
    bytes: Annotated[int, msgspec.Meta(ge=1, le=LARGEST_PART)]
    sha256: Sha256


class DataPosition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The position in the data: optimizer steps applied, and samples that these consumed."""

    step: _Step
    samples: Annotated[int, msgspec.Meta(ge=0)]


class Versions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The versions of the code that wrote a checkpoint, shown to the user; no reader refuses another version."""

    bamboo: _Text
    torch: _Text
    python: _Text


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint's manifest: its job, step and files, and the values that a resuming job checks or restores."""

    job: _Text
    step: _Step  # optimizer steps of the state
    attempt: Annotated[str, msgspec.Meta(pattern=ID_PATTERN)]
    layers: Annotated[tuple[CheckpointPart, ...], msgspec.Meta(min_length=1, max_length=MOST_LAYERS)]
    data: DataPosition
    seed: int
    # `edits.numbers_digest` of the job's spec, the same on every grid
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16,64}$")]
    versions: Versions
    created: Annotated[datetime, msgspec.Meta(tz=True)]
    of_data: DataRecord  # the training data
    # the score of the state's evaluation, the larger the better (`keepBest`); None if it has none
    score: float | None = None
    common: dict[str, Any] = {}  # the state that belongs to no layer, in the workers' form

    @property
    def place(self) -> CheckpointId:
        """The identity of the checkpoint that this manifest completes."""
        return CheckpointId(self.step, self.attempt)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.layers)


class _Envelope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int
    sha256: Sha256
    manifest: msgspec.Raw


_ENVELOPE_DECODER: Final = msgspec.json.Decoder(_Envelope)
_DECODER: Final = msgspec.json.Decoder(CheckpointManifest)


def encode(manifest: CheckpointManifest) -> bytes:
    """Encode a manifest as its file's bytes. Raises ValueError if `decode` would not return an equal manifest, for
    example because a layer is missing.
    """
    inner = msgspec.json.encode(manifest)
    digest = hashlib.sha256(inner).hexdigest()
    data = msgspec.json.encode(_Envelope(format=FORMAT, sha256=digest, manifest=msgspec.Raw(inner)))
    try:
        if decode(data) != manifest:
            raise CheckpointDamaged("it would be read as another one")
    except CheckpointDamaged as error:
        raise ValueError(f"no such manifest can be written: {error}") from None
    return data


def decode(data: bytes) -> CheckpointManifest:
    """Parse the bytes of a manifest's file. Raises CheckpointDamaged with the problem, without the file's name."""
    if len(data) > MOST_BYTES:
        raise CheckpointDamaged(f"the manifest has more than {MOST_BYTES >> 20} MiB")
    try:
        envelope = _ENVELOPE_DECODER.decode(data)
        if envelope.format != FORMAT:
            raise CheckpointDamaged(f"the manifest has format {envelope.format}, expected {FORMAT}")
        if hashlib.sha256(bytes(envelope.manifest)).hexdigest() != envelope.sha256:
            raise CheckpointDamaged("the manifest was changed: its checksum is another one")
        manifest = _DECODER.decode(envelope.manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointDamaged(f"the manifest cannot be read ({error})") from None
    if problem := _problem(manifest):
        raise CheckpointDamaged(f"the manifest {problem}")
    return manifest


def _problem(manifest: CheckpointManifest) -> str:
    for number, part in enumerate(manifest.layers):
        if part.layer != number:
            return f"names layer {part.layer} where layer {number} belongs"
        if part.file != part_name(number):
            return f"gives layer {number} a foreign file"
    if manifest.data.step != manifest.step:
        return f"is of step {manifest.step}, but its data are of step {manifest.data.step}"
    return ""
