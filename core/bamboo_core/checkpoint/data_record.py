"""What of a job's data decides its bits, as far as it is cheap to read: what a checkpoint says of the data that it was
trained with, and a worker of those that it has.

The seed and the sizes of batches are in the digest of the job's numbers (`edits.numbers_digest`), and so is the task's
config, but not what is in the files that it names.
"""

from typing import Annotated, Final

import msgspec

from bamboo_core.text import count

MOST_LOOKED_AT: Final = 16
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Form = Annotated[str, msgspec.Meta(max_length=1000)]


class LookedAt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sample."""

    sample: _Number
    form: _Form  # the types and shapes of its parts
    # of its bits; empty if it is another one each time that it is read
    digest: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16})?$")] = ""


class DataRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint knows of the dataset that it was trained on."""

    samples: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]  # how many there are
    order: _Digest  # a digest of the first ones that are trained on
    looked_at: Annotated[tuple[LookedAt, ...], msgspec.Meta(max_length=MOST_LOOKED_AT)] = ()  # some of them


def difference(before: DataRecord, now: DataRecord) -> tuple[str, str] | None:
    """The first one that matters, as what the one has and what the other; None if these may be the same data."""
    if before.samples != now.samples:
        return count(before.samples, "sample"), count(now.samples, "sample")
    if before.order != now.order:
        return f"an order of samples of digest {before.order}", f"one of digest {now.order}"
    there = {one.sample: one for one in now.looked_at}
    for one in before.looked_at:
        other = there.get(one.sample)
        if other is None:
            continue
        if one.form != other.form:
            return f"{one.form} as sample {one.sample}", f"{other.form} as sample {one.sample}"
        if one.digest and other.digest and one.digest != other.digest:
            name = f"a sample {one.sample} of digest"
            return f"{name} {one.digest}", f"{name} {other.digest}"
    return None
