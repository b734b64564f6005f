"""Datasets: tensors, arrays and text in memory, map-style, Hugging Face, mixtures, and prefetched datasets."""

import sys
import sysconfig
import zipfile
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import lcm
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from bamboo_core.complaints import said_by, system_reason
from bamboo_trainer.task import Dataset, Parts


class Indexed:
    """A dataset that stacks the samples of a list-like object with a length and `[i]`, such as a map-style dataset of
    torch.

    A sample is a pair (inputs, targets) of tensors, arrays, numbers, lists of numbers, or tuples of these; or a
    mapping, in which `inputs` and `targets` name the entries to take. For dtypes, see `as_tensor`. `batch` raises
    ValueError for samples of another form, and if samples of a batch have different shapes.
    """

    def __init__(self, samples: Any, inputs: Sequence[str] = (), targets: Sequence[str] = ()) -> None:
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
    """A dataset in a folder that the library `datasets` has written with `save_to_disk`.

    inputs, targets: names of columns with numbers, of equal shapes in all rows. split: name of the split, if the folder
    has splits. Raises ValueError.
    """

    def __init__(
        self, path: str | Path, inputs: Sequence[str], targets: Sequence[str] = (), *, split: str | None = None
    ) -> None:
        loaded = _loaded(Path(path), split)
        missing = [name for name in (*inputs, *targets) if name not in loaded.column_names]
        if missing:
            raise ValueError(f"{path} has the columns {', '.join(loaded.column_names)}, and no {missing[0]!r}")
        self._rows = loaded.with_format("numpy", columns=list(dict.fromkeys((*inputs, *targets))))
        self._inputs, self._targets = tuple(inputs), tuple(targets)

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        rows = self._rows[list(indices)]

        def columns(names: Sequence[str]) -> Parts:
            return tuple(stacked([(value,) for value in rows[name]], indices, name)[0] for name in names)

        return columns(self._inputs), columns(self._targets)


def _loaded(path: Path, split: str | None) -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError("the library datasets is not installed: pip install 'bamboo-trainer[datasets]'") from None
    if not path.exists():
        raise ValueError(f"there is no folder {path}")
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
    """Stack each part of several samples along a new dimension 0. indices, name: the samples' numbers and the column's
    name, for messages. Raises ValueError like `as_tensor`, and if samples differ in the number or shapes of parts.
    """
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
    """Return a tensor of the values: whole numbers as int64, booleans unchanged, others as float32. Raises ValueError,
    naming `what`, for complex numbers, rows of different lengths, and values that are neither numbers nor booleans.
    """
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


STDLIB_BYTES = 4_000_000


def stdlib_text() -> bytes:
    """Return the top-level source files of Python's standard library as one text, cut to STDLIB_BYTES."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= STDLIB_BYTES:
            break
    return bytes(text[:STDLIB_BYTES])


def text_bytes(path: str, key: str = "path") -> bytes:
    """Return a file's content, or `stdlib_text` for the path "stdlib". Raises ValueError, naming the config's key."""
    if path == "stdlib":
        return stdlib_text()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{key} must be stdlib or a readable file, got {path!r} ({system_reason(error)})") from None


class TextDataset:
    """A dataset of a text in memory. The inputs of sample i are the i-th window of `context` tokens, without overlap;
    its targets are the window that begins one token later.

    text: bytes, each of which is a token, or a tensor of token ids. Raises ValueError if it has fewer than context + 1
    tokens, or if context is less than 1.
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
        """Return inputs and targets, each as one int64 tensor [samples, context] in a tuple."""
        width = self.context
        windows = torch.stack([self.tokens[i * width : (i + 1) * width + 1] for i in indices]).long()
        return (windows[:, :-1].contiguous(),), (windows[:, 1:].contiguous(),)


class TensorDataset:
    """A dataset of tensors in memory. Dimension 0 counts the samples. Raises ValueError if tensors' counts differ."""

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
    """A dataset of arrays in an .npz file, held in memory. inputs, targets: the arrays' names, in order.

    For dtypes, see `as_tensor`. Raises ValueError.
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
    """Read an array of an .npz file as a tensor, with a row for each sample. Raises ValueError, OSError."""
    try:
        array = file[name]
    except OSError:
        raise
    except Exception as error:  # a damaged array raises errors of zlib, zipfile, tokenize, struct and others
        raise ValueError(f"array {name!r} cannot be read: {said_by(error)}") from None
    if not array.ndim:
        raise ValueError(f"array {name!r} is a single value, expected a row for each sample")
    return as_tensor(array, f"array {name!r}")


MOST_SHARES: Final = 1000  # weights without a simple ratio are rounded to this many parts


class Mixture:
    """Several datasets as one, with their samples interleaved by weight.

    sources: pairs (weight, dataset). All samples must have inputs and targets of the same dtypes and shapes.

    Sample i is always the same sample of the same source. In each round, every source contributes its share of samples,
    spread evenly. A source continues in its own order from round to round, and begins again after its end. The mixture
    has enough rounds to visit all samples of each source. Raises ValueError.
    """

    def __init__(self, sources: Sequence[tuple[float, Dataset]]) -> None:
        if len(sources) < 2:
            raise ValueError(f"a mixture must have at least two sources, got {len(sources)}")
        for number, (weight, dataset) in enumerate(sources):
            if isinstance(weight, bool) or not 0 < weight <= sys.float_info.max:
                raise ValueError(f"the weight of source {number} must be a positive number, got {weight!r}")
            if len(dataset) < 1:
                raise ValueError(f"source {number} has no samples")
        self._sources = [dataset for _, dataset in sources]
        self._shares = _shares([weight for weight, _ in sources])
        self._round = _dealt(self._shares)
        rounds = max(-(-len(one) // share) for one, share in zip(self._sources, self._shares, strict=True))
        self._length = rounds * len(self._round)
        tokens = {getattr(dataset, "tokens_per_sample", None) for dataset in self._sources}
        self.tokens_per_sample: int | None = tokens.pop() if len(tokens) == 1 else None
        with torch.random.fork_rng(devices=[]):
            self.batch([self._round.index((source, 0)) for source in range(len(sources))])  # must fit together

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        chosen = [self._place(index) for index in indices]
        found: dict[int, tuple[Parts, Parts]] = {}
        places: list[int] = []
        for source, dataset in enumerate(self._sources):
            here = [place for place, (owner, _) in enumerate(chosen) if owner == source]
            if here:
                found[source] = dataset.batch([chosen[place][1] for place in here])
                places += here
        _check(found)
        back = torch.tensor(places).argsort()
        inputs, targets = zip(*found.values(), strict=True)
        return _joined(inputs, back), _joined(targets, back)

    def _place(self, index: int) -> tuple[int, int]:
        """Return the number of a sample's source, and the sample's number in that source."""
        rounds, place = divmod(index, len(self._round))
        source, number = self._round[place]
        return source, (rounds * self._shares[source] + number) % len(self._sources[source])


def _shares(weights: Sequence[float]) -> list[int]:
    """Return the number of each source's samples in a round, at least 1: in the exact ratio of the weights if a round
    of at most MOST_SHARES samples allows it, else rounded.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    parts = [weight / sum(exact) for weight in exact]
    whole = min(MOST_SHARES, lcm(*(part.denominator for part in parts)))
    return [max(1, round(part * whole)) for part in parts]


def _dealt(shares: Sequence[int]) -> list[tuple[int, int]]:
    """Return a round's samples as (source, sample's number in the source's share), with each source spread evenly."""
    places = [((2 * n + 1) / (2 * share), source, n) for source, share in enumerate(shares) for n in range(share)]
    return [(source, number) for _, source, number in sorted(places)]


def _check(found: dict[int, tuple[Parts, Parts]]) -> None:
    """Raise ValueError if samples of different sources differ in the number, dtypes or shapes of inputs or targets."""
    forms = {source: f"{_mixed_form(inputs)} and {_mixed_form(targets)}" for source, (inputs, targets) in found.items()}
    first = min(forms)
    for source, form in forms.items():
        if form != forms[first]:
            raise ValueError(
                f"the sources of a mixture must have inputs and targets of one form, got {forms[first]} of source "
                f"{first}, {form} of source {source}"
            )


def _joined(found: Sequence[Parts], back: torch.Tensor) -> Parts:
    return tuple(torch.cat(parts)[back] for parts in zip(*found, strict=True))


def _mixed_form(parts: Parts) -> str:
    return ", ".join(f"{str(part.dtype).removeprefix('torch.')} {list(part.shape[1:])}" for part in parts) or "nothing"


MOST_READERS = 64
MOST_AHEAD = 256


def readers_of(dataset: object) -> "Prefetched | None":
    """Return a dataset's `Prefetched`: the dataset itself or its attribute `prefetched`; None if neither is one."""
    found = dataset if isinstance(dataset, Prefetched) else getattr(dataset, "prefetched", None)
    return found if isinstance(found, Prefetched) else None


class Prefetched:
    """A dataset that workers read ahead of time in separate processes, unless it draws from torch's global generator.

    readers: number of processes of each worker. ahead: number of the next microbatches of a stage that are read before
    they are needed, by default two for each reader.

    Reader processes are forked from the worker after it has read a first batch itself, and end with the worker. They
    must not use a GPU. `batch` reads in the calling process. Raises ValueError if a number is out of range.
    """

    def __init__(self, dataset: Dataset, readers: int = 2, ahead: int | None = None) -> None:
        if not 1 <= readers <= MOST_READERS:
            raise ValueError(f"readers must be from 1 to {MOST_READERS}, got {readers}")
        if ahead is not None and not 1 <= ahead <= MOST_AHEAD:
            raise ValueError(f"readAhead must be from 1 to {MOST_AHEAD}, got {ahead}")
        self.dataset, self.readers = dataset, readers
        self.ahead = ahead or 2 * readers
        self.tokens_per_sample = getattr(dataset, "tokens_per_sample", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        return self.dataset.batch(indices)
