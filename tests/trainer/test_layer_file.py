"""Layers as safetensors files: bit-exact round trips, reads by the safetensors library, refusal of damaged files."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.torch import load

from bamboo_core.checkpoint import manifest as manifests
from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.checkpoint.manifest import CheckpointDamaged
from bamboo_trainer.checkpoint.layer_file import decode, encode, header_size, read_header
from bamboo_trainer.checkpoint.worker_checkpoints import versions
from bamboo_trainer.frames import DTYPES, byte_view
from bamboo_trainer.stage.layer_state import LayerState
from checkpoint_kit import make_manifest


def state_with(tensors=None, scalars=None, names=None) -> LayerState:
    return LayerState(layer=3, version=200, tensors=tensors or {}, scalars=scalars or {}, names=names or {})


def written(state: LayerState) -> bytes:
    return b"".join(encode(state))


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(byte_view(tensor.contiguous())) if tensor.numel() else b""


def same(one: LayerState, other: LayerState) -> bool:
    return (
        (one.layer, one.version, one.names) == (other.layer, other.version, other.names)
        and repr(sorted(one.scalars.items())) == repr(sorted(other.scalars.items()))
        and one.tensors.keys() == other.tensors.keys()
        and all(
            (a.dtype, a.shape, bits(a)) == (b.dtype, b.shape, bits(b))
            for a, b in ((one.tensors[name], other.tensors[name]) for name in one.tensors)
        )
    )


SHAPES = {"scalar": (), "empty": (0,), "empty inside": (3, 0, 2), "vector": (7,), "matrix": (3, 5)}


def test_every_dtype_and_shape_comes_back_bit_by_bit():
    tensors = {}
    for name, dtype in DTYPES.items():
        for kind, shape in SHAPES.items():
            size = math.prod(shape) * dtype.itemsize
            raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8)
            tensors[f"constant:3.{name} {kind}"] = (
                raw.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
            )
    matrix = torch.randn(4, 6)
    tensors["parameter:3.transposed"] = matrix.t()
    tensors["parameter:3.strided"] = matrix[::2, 1::3]
    tensors["parameter:3.expanded"] = torch.randn(1, 5).expand(4, 5)
    tensors["parameter:3.conjugate"] = torch.randn(3, dtype=torch.complex64).conj()
    tensors["parameter:3.tied"] = tensors["parameter:3.part"] = matrix[1:3]
    state = state_with(tensors)
    expected = state_with({n: t.resolve_conj() for n, t in tensors.items()})
    data = written(state)
    assert same(decode(data), expected)
    plain = load(data)  # by the library alone
    assert torch.equal(plain["parameter:3.strided"], matrix[::2, 1::3])
    assert torch.equal(torch.view_as_complex(plain["parameter:3.conjugate"]), tensors["parameter:3.conjugate"])
    header, entries = read_header(data[: header_size(data)])
    assert (header.layer, header.version) == (3, 200)
    assert entries.keys() == tensors.keys()
    for entry in entries.values():  # in place for whoever maps the file
        start = header_size(data) + entry.data_offsets[0]
        assert start % {"F64": 8, "I64": 8, "F32": 4, "I32": 4}.get(entry.dtype, 1) == 0


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).map("state:3.weight:{}".format),
        st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(),
        max_size=5,
    ),
    st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=4),
)
def test_numbers_and_names_come_back_exactly(scalars, names):
    state = state_with({"parameter:3.weight": torch.ones(2)}, scalars, names)
    back = decode(written(state))
    assert same(back, state)
    assert {n: type(v) for n, v in back.scalars.items()} == {n: type(v) for n, v in scalars.items()}


def test_a_layer_without_anything_is_a_file_too():
    assert same(decode(written(state_with())), state_with())


def test_a_tensor_that_no_file_can_hold_is_named():
    with pytest.raises(ValueError, match=r"layer 3 has tensors of torch.float8_e5m2, which no checkpoint can hold"):
        encode(state_with({"constant:3.x": torch.zeros(2).to(torch.float8_e5m2)}))


def changed_header(data: bytes, change) -> bytes:
    size = header_size(data)
    header = json.loads(data[8:size])
    own = json.loads(header["__metadata__"]["bamboo"])
    change(header, own)
    if "__metadata__" in header and "bamboo" in header["__metadata__"]:
        header["__metadata__"]["bamboo"] = json.dumps(own)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[size:]


@pytest.mark.parametrize(
    "change",
    [
        lambda header, own: header.pop("__metadata__"),
        lambda header, own: header["__metadata__"].pop("bamboo"),
        lambda header, own: own.pop("layer"),
        lambda header, own: own.update(layer=-1),
        lambda header, own: own.update(more=1),
        lambda header, own: own.update(format=2),
        lambda header, own: own.update(scalars={"state:3.weight:x": "1"}),
        lambda header, own: (
            own.update(complex=["parameter:3.weight"]),
            header["parameter:3.weight"].update(shape=[2, 1]),
        ),
        lambda header, own: own.update(complex=["parameter:3.bias"]),
        lambda header, own: header["parameter:3.weight"].update(data_offsets=[0, 4]),
        lambda header, own: header["parameter:3.weight"].update(data_offsets=[0, 1 << 40], shape=[1 << 38]),
        lambda header, own: header["parameter:3.weight"].update(shape=[3]),
        lambda header, own: header["parameter:3.weight"].update(dtype="F31"),
        lambda header, own: header.update(more=1),
    ],
)
def test_a_foreign_file_is_damaged_and_nothing_worse(change):
    data = written(state_with({"parameter:3.weight": torch.ones(2)}))
    with pytest.raises(CheckpointDamaged):
        decode(changed_header(data, change))


def test_a_manifest_can_say_which_versions_wrote_it():
    manifest = replace(make_manifest(CheckpointId(1, "a")), versions=versions())
    assert manifests.decode(manifests.encode(manifest)).versions.torch == str(torch.__version__)


def test_a_torn_file_is_damaged():
    data = written(state_with({"parameter:3.weight": torch.ones(2)}))
    for length in range(len(data)):
        with pytest.raises(CheckpointDamaged):
            decode(data[:length])
    for start in (b"\xff" * 8, b"", b"\xff\xff\xff\xff\0\0\0\0{}"):
        with pytest.raises(CheckpointDamaged):
            header_size(start)


@given(st.binary(max_size=100), st.booleans())
def test_any_bytes_are_a_layer_or_damaged(data, framed):
    with pytest.raises(CheckpointDamaged):
        decode(len(data).to_bytes(8, "little") + data if framed else data)


def test_nothing_large_is_copied_to_write_a_layer():
    weight = torch.zeros(1000)
    pieces = encode(state_with({"parameter:3.weight": weight}))
    weight.fill_(1.0)
    assert bytes(pieces[1]) == bits(torch.ones(1000))
