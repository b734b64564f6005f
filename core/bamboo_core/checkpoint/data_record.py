"""Data records: the properties of a job's data that decide its bits, as far as they are cheap to read.

A checkpoint records the data it was trained with, and a worker compares its own. The seed and the batch sizes are in
the digest of the job's numbers (`edits.numbers_digest`), as is the task's config, but not the content of files that it
names.
"""

from typing import Annotated, Final

import msgspec

from bamboo_core.text import count

MOST_LOOKED_AT: Final = 16
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Form = Annotated[str, msgspec.Meta(max_length=1000)]


class LookedAt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sample of the dataset."""

    sample: _Number
    form: _Form  # the types and shapes of its parts
    # of its bits; empty if each reading gives other bits
    digest: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16})?$")] = ""


class DataRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint's record of the dataset that it was trained on."""

    samples: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]  # how many there are
    order: _Digest  # a digest of the first samples in training order
    looked_at: Annotated[tuple[LookedAt, ...], msgspec.Meta(max_length=MOST_LOOKED_AT)] = ()  # some samples


def difference(before: DataRecord, now: DataRecord) -> tuple[str, str] | None:
    """Return the first difference that matters, as each side's value; None if both may be the same data."""
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
