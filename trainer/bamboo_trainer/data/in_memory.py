"""Datasets that are held in memory."""

import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from bamboo_core.complaints import said_by, system_reason
from bamboo_trainer.data.rows import as_tensor
from bamboo_trainer.task import Parts

STDLIB_BYTES = 4_000_000


def stdlib_text() -> bytes:
    """Return the sources of this Python's standard library (top level, by name): real text on every machine."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= STDLIB_BYTES:
            break
    return bytes(text[:STDLIB_BYTES])


def text_bytes(path: str) -> bytes:
    """Return the content of a file, or for "stdlib" `stdlib_text`. Raises ValueError."""
    if path == "stdlib":
        return stdlib_text()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"path must be stdlib or a readable file, got {path!r} ({system_reason(error)})") from None


class TextDataset:
    """A text in memory: sample i is window i of `context` tokens and, as targets, the same shifted by one.

    text: bytes, each of which is a token, or the ids of its tokens.
    """

    def __init__(self, text: bytes | torch.Tensor, context: int) -> None:
        if context < 1:
            raise ValueError(f"context must be at least 1, got {context}")
        if len(text) <= context:
            unit = "bytes" if isinstance(text, bytes) else "tokens"
            raise ValueError(f"the text has {len(text)} {unit}, fewer than context + 1 = {context + 1}")
        self.context = self.tokens_per_sample = context
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8) if isinstance(text, bytes) else text

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        """Return inputs and targets, both int64 [samples, context]."""
        width = self.context
        windows = torch.stack([self.tokens[i * width : (i + 1) * width + 1] for i in indices]).long()
        return (windows[:, :-1].contiguous(),), (windows[:, 1:].contiguous(),)


class TensorDataset:
    """Inputs and targets held in memory; dimension 0 numbers the samples."""

    def __init__(self, inputs: Parts, targets: Parts) -> None:
        lengths = {len(part) for part in (*inputs, *targets)}
        if len(lengths) != 1:
            raise ValueError(f"all tensors must have the same number of samples, got {sorted(lengths)}")
        self._inputs, self._targets = inputs, targets
        self._length = lengths.pop()

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        chosen = torch.tensor(indices, dtype=torch.int64)
        return tuple(p[chosen] for p in self._inputs), tuple(p[chosen] for p in self._targets)


class NpzDataset(TensorDataset):
    """Arrays of an .npz file, held in memory. inputs, targets: their names, in order.

    Whole numbers become int64, floating-point ones float32. Raises ValueError.
    """

    def __init__(self, path: str | Path, inputs: Sequence[str], targets: Sequence[str]) -> None:
        try:
            loaded = np.load(path, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array")
            with loaded as file:
                missing = [name for name in (*inputs, *targets) if name not in file.files]
                if missing:
                    raise ValueError(f"it has {', '.join(file.files)}, and no array {missing[0]!r}")
                arrays = {name: _rows(file, name) for name in dict.fromkeys((*inputs, *targets))}
        except OSError as error:
            raise ValueError(f"cannot read {path}: {system_reason(error)}") from None
        except (ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} cannot be used as an .npz file of samples: {error}") from None
        super().__init__(tuple(arrays[name] for name in inputs), tuple(arrays[name] for name in targets))


def _rows(file: "np.lib.npyio.NpzFile", name: str) -> torch.Tensor:
    """Return one of its arrays. Raises ValueError, OSError."""
    try:
        array = file[name]
    except OSError:
        raise
    except Exception as error:  # of a damaged one: zlib's, zipfile's, tokenize's, struct's and others
        raise ValueError(f"array {name!r} cannot be read: {said_by(error)}") from None
    if not array.ndim:
        raise ValueError(f"array {name!r} is a single value, expected a row for each sample")
    return as_tensor(array, f"array {name!r}")
