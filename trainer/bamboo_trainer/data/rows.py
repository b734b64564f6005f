"""Samples by number or by columns: a user's own list-like object, and Hugging Face datasets."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from bamboo_trainer.data.hub import nothing_there
from bamboo_trainer.task import Parts


class Indexable(Protocol):
    """Any object with a length that returns sample i for [i], as torch's map-style datasets do."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Indexed:
    """Samples of a list-like object, stacked.

    A sample is (inputs, targets), each of them a tensor, an array, a number or a tuple of these; or a mapping, from
    which `inputs` and `targets` name the entries to take. Whole numbers become int64, others float32. Raises ValueError
    if shapes differ.
    """

    def __init__(self, samples: Indexable, inputs: Sequence[str] = (), targets: Sequence[str] = ()) -> None:
        self._samples, self._inputs, self._targets = samples, tuple(inputs), tuple(targets)

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        pairs = [self._pair(index) for index in indices]
        return stacked([inputs for inputs, _ in pairs], indices), stacked([targets for _, targets in pairs], indices)

    def _pair(self, index: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        sample = self._samples[index]
        if isinstance(sample, Mapping):
            if not self._inputs or not self._targets:
                raise ValueError(
                    f"sample {index} is a mapping with {', '.join(map(str, sample))}: expected inputs and targets to "
                    "name which of these they are"
                )
            return tuple(_entry(sample, name, index) for name in self._inputs), tuple(
                _entry(sample, name, index) for name in self._targets
            )
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise ValueError(
                f"sample {index} is {_form(sample)}, expected (inputs, targets), or a mapping and the names of its "
                "entries that are inputs and targets"
            )
        inputs, targets = sample
        return _parts(inputs), _parts(targets)


class HuggingFaceDataset:
    """A dataset that `datasets` has saved in a folder of this machine (`save_to_disk`), by columns.

    split: of several. next_token: the one input column holds tokens; the targets are the same, one later. Rows must
    have equal lengths. Raises ValueError.
    """

    def __init__(
        self,
        path: str | Path,
        inputs: Sequence[str],
        targets: Sequence[str] = (),
        *,
        split: str | None = None,
        next_token: bool = False,
    ) -> None:
        if next_token and (targets or len(inputs) != 1):
            raise ValueError("nextToken: expected one column of inputs, and no targets")
        loaded = _loaded(Path(path), split)
        missing = [name for name in (*inputs, *targets) if name not in loaded.column_names]
        if missing:
            raise ValueError(f"{path} has the columns {', '.join(loaded.column_names)}, and no {missing[0]!r}")
        self._rows = loaded.with_format("numpy", columns=list(dict.fromkeys((*inputs, *targets))))
        self._inputs, self._targets, self._next_token = tuple(inputs), tuple(targets), next_token

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        rows = self._rows[list(indices)]
        inputs = tuple(stacked([(value,) for value in rows[name]], indices, name)[0] for name in self._inputs)
        if self._next_token:
            return (inputs[0][:, :-1].contiguous(),), (inputs[0][:, 1:].contiguous(),)
        return inputs, tuple(stacked([(value,) for value in rows[name]], indices, name)[0] for name in self._targets)


def _loaded(path: Path, split: str | None) -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError("the library datasets is not installed: pip install 'bamboo-trainer[datasets]'") from None
    if not path.exists():
        raise ValueError(nothing_there(path, "datasets.load_dataset(ID).save_to_disk(FOLDER)"))
    try:
        loaded = datasets.load_from_disk(str(path))
    except FileNotFoundError:
        raise ValueError(f"{path} is no folder that the library datasets has written with save_to_disk") from None
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise ValueError(f"{path} has the splits {', '.join(loaded)}; expected one of them as split")
        return loaded[split]
    if split is not None:
        raise ValueError(f"{path} has no splits, so there is no split {split!r}")
    return loaded


def stacked(samples: Sequence[tuple[Any, ...]], indices: Sequence[int], name: str = "") -> Parts:
    """Return the parts of several samples, each stacked along a new dimension 0. name: of the column, for messages."""
    lengths = {len(sample) for sample in samples}
    if len(lengths) != 1:
        raise ValueError(f"samples {list(indices)[:8]} have different numbers of parts: {sorted(lengths)}")
    parts = []
    for number in range(lengths.pop()):
        what = f"column {name!r}" if name else f"part {number}"
        tensors = [as_tensor(sample[number], what) for sample in samples]
        shapes = list(dict.fromkeys(tuple(tensor.shape) for tensor in tensors))
        if len(shapes) > 1:
            raise ValueError(
                f"samples {list(indices)[:8]} have different shapes in {what} ({shapes[0]} and {shapes[1]}): "
                "cut or pad them to one"
            )
        parts.append(torch.stack(tensors))
    return tuple(parts)


def as_tensor(value: Any, what: str) -> torch.Tensor:
    """Return whole numbers as int64, booleans unchanged, others as float32. Raises ValueError naming `what`."""
    try:
        tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
    except (TypeError, ValueError):
        raise ValueError(f"{what} is {_form(value)}, expected numbers, equally many in each row") from None
    if tensor.is_complex():
        raise ValueError(f"{what} has complex numbers, expected real ones (torch.view_as_real)")
    if tensor.dtype is torch.bool:
        return tensor.detach()
    return tensor.detach().to(torch.float32 if tensor.is_floating_point() else torch.int64)


def _parts(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple) else (value,)


def _entry(sample: Mapping[str, Any], name: str, index: int) -> Any:
    if name not in sample:
        raise ValueError(f"sample {index} has {', '.join(map(str, sample))}, and no {name!r}")
    return sample[name]


def _form(value: Any) -> str:
    return f"of type {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")
