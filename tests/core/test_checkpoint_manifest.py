"""Manifests of checkpoints: encoding, and refusal of damaged ones. `difference` says how two datasets differ."""

import hashlib
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bamboo_core.checkpoint.layout import CheckpointId, checkpoint_in, new_checkpoint
from bamboo_core.checkpoint.manifest import (
    MOST_BYTES,
    CheckpointDamaged,
    DataRecord,
    LookedAt,
    decode,
    difference,
    encode,
)
from checkpoint_kit import made_up_parts, make_manifest

MANIFEST = make_manifest(CheckpointId(200, "5f0c"))


def sealed(document: dict, form: int = 1) -> bytes:
    """Return the bytes of a manifest file with a correct checksum. form: the format number in the file."""
    inner = json.dumps(document).encode()
    head = json.dumps({"format": form, "sha256": hashlib.sha256(inner).hexdigest()})
    return head[:-1].encode() + b', "manifest": ' + inner + b"}"


def document(**changes) -> dict:
    return {**json.loads(msgspec.json.encode(MANIFEST)), **changes}


def test_a_manifest_survives_its_file():
    assert decode(encode(MANIFEST)) == MANIFEST == decode(sealed(document()))
    assert MANIFEST.place.folder == "step-000000200-5f0c"
    assert MANIFEST.bytes == sum(part.bytes for part in made_up_parts(200))
    with pytest.raises(ValueError, match="be read as another one"):
        encode(replace(MANIFEST, score=float("nan")))


def test_every_torn_or_changed_manifest_is_found():
    data = encode(MANIFEST)
    for length in range(len(data)):
        with pytest.raises(CheckpointDamaged):
            decode(data[:length])
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1
        with pytest.raises(CheckpointDamaged):
            decode(bytes(changed))


@given(
    st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["format", "sha256", "manifest", "layers"]), inner, max_size=4)
            ),
            max_leaves=8,
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_anything_else_is_damaged_and_nothing_worse(data):
    with pytest.raises(CheckpointDamaged):
        decode(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (sealed(document(), form=2), "format 2, expected 1"),
        (sealed(document(layers=document()["layers"][::-1])), "names layer 1 where layer 0 belongs"),
        (sealed(document(layers=[])), "cannot be read"),
        (sealed(document(layers=[{**document()["layers"][0], "file": "../../etc/passwd"}])), "a foreign file"),
        (sealed(document(layers=[{**document()["layers"][0], "bytes": -1}])), "cannot be read"),
        (sealed(document(attempt="../x")), "cannot be read"),
        (sealed(document(data={"step": 199, "samples": 1})), "of step 200, but its data are of step 199"),
        (sealed(document(created="2026-01-01T00:00:00")), "cannot be read"),
        (sealed(document(more=1)), "unknown field `more`"),
        (b"[" * 100_000, "cannot be read"),
        (b" " * (MOST_BYTES + 1), "more than 32 MiB"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(data, message):
    with pytest.raises(CheckpointDamaged, match=message):
        decode(data)


def test_a_folder_is_that_of_one_attempt():
    for attempt in (
        CheckpointId(0, "a"),
        CheckpointId(200, "5f0c2a9b71d4"),
        CheckpointId(10**12, "z" * 32),
        new_checkpoint(7),
    ):
        assert checkpoint_in(attempt.folder) == attempt
    for name in (
        "step-200-a",
        "step-000000200",
        "step-000000200-A",
        "step-0000000200-a",
        "xstep-000000200-a",
        "step-000000200-a/b",
        f"step-000000200-{'a' * 33}",
        "step-9999999999999-a",
    ):
        assert checkpoint_in(name) is None
    for step, id in ((-1, "a"), (1, ""), (1, "A"), (1, "a/b"), (10**12 + 1, "a")):
        with pytest.raises(msgspec.ValidationError, match="Expected"):
            msgspec.convert({"step": step, "id": id}, CheckpointId)
    assert len({new_checkpoint(1) for _ in range(100)}) == 100


FIRST = LookedAt(sample=0, form="int64 [8], int64 [8]", digest="a" * 16)
LAST = LookedAt(sample=399, form="int64 [8], int64 [8]", digest="b" * 16)
DATA = DataRecord(samples=400, order="0" * 16, looked_at=(FIRST, LAST))


@pytest.mark.parametrize(
    ("now", "sentence"),
    [
        (DATA, None),
        (replace(DATA, samples=401, looked_at=(FIRST,)), ("400 samples", "401 samples")),
        (replace(DATA, samples=1, looked_at=(FIRST,)), ("400 samples", "1 sample")),
        (
            replace(DATA, order="1" * 16),
            ("an order of samples of digest 0000000000000000", "one of digest 1111111111111111"),
        ),
        (
            replace(DATA, looked_at=(FIRST, replace(LAST, form="int64 [9]"))),
            ("int64 [8], int64 [8] as sample 399", "int64 [9] as sample 399"),
        ),
        (
            replace(DATA, looked_at=(replace(FIRST, digest="c" * 16), LAST)),
            ("a sample 0 of digest aaaaaaaaaaaaaaaa", "a sample 0 of digest cccccccccccccccc"),
        ),
        (replace(DATA, looked_at=(replace(FIRST, digest=""), LAST)), None),
        (replace(DATA, looked_at=(LAST,)), None),
        (replace(DATA, looked_at=()), None),
    ],
)
def test_the_first_difference_is_told_with_both_sides(now: DataRecord, sentence: tuple[str, str] | None) -> None:
    assert difference(DATA, now) == sentence
