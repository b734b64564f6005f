"""The tensors that a frame or a layer's file may hold: dtype names, limits, bytes."""

from collections.abc import Collection
from typing import Final

import torch

MAX_BODY: Final = 1 << 40  # a stage's whole state: 12 bytes per parameter with AdamW
MAX_DIMENSIONS: Final = 16

DTYPES: Final = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c64": torch.complex64,
    "c128": torch.complex128,
}


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the storage of a contiguous CPU tensor of any dtype and shape as writable bytes."""
    if tensor.dtype is torch.float32 and tensor.numel():
        return tensor.numpy().data.cast("B")  # the most common dtype; twice as fast
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def unsendable(tensor: torch.Tensor, dtypes: Collection[torch.dtype]) -> str:
    """Return why a tensor cannot be sent; "" if it can. dtypes: the allowed ones."""
    if tensor.dtype not in dtypes:
        return f"{tensor.dtype}, expected one of {', '.join(sorted(str(d).removeprefix('torch.') for d in dtypes))}"
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout}, expected torch.strided"
    return f"{tensor.dim()} dimensions, expected at most {MAX_DIMENSIONS}" if tensor.dim() > MAX_DIMENSIONS else ""
