"""The tensors that a frame or a layer's file may hold: dtype names, limits, bytes."""

from typing import Final

import torch

MAX_BODY: Final = 1 << 40  # a stage's whole state: 12 bytes per parameter with AdamW
MAX_DIMENSIONS: Final = 16

DTYPES: Final = {  # by the names that safetensors files give them; those have no C128
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "C128": torch.complex128,
}
DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the storage of a contiguous CPU tensor of any dtype and shape as writable bytes."""
    if tensor.dtype is torch.float32 and tensor.numel():
        return tensor.numpy().data.cast("B")  # the most common dtype; twice as fast
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def unsendable(tensor: torch.Tensor, *, real: bool = False) -> str:
    """Return why a tensor cannot be sent; "" if it can. real: complex numbers are refused."""
    allowed = [dtype for dtype in DTYPE_NAMES if not (real and dtype.is_complex)]
    if tensor.dtype not in allowed:
        return f"{tensor.dtype}, expected one of {', '.join(sorted(str(d).removeprefix('torch.') for d in allowed))}"
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout}, expected torch.strided"
    return f"{tensor.dim()} dimensions, expected at most {MAX_DIMENSIONS}" if tensor.dim() > MAX_DIMENSIONS else ""
