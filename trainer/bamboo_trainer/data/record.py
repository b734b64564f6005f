"""A worker's record of its data, so that other data cannot replace them unnoticed: see `checkpoint.data_record`."""

import hashlib
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from bamboo_core.checkpoint.data_record import DataRecord, LookedAt
from bamboo_trainer.data.order import pure_seed, sample_numbers
from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.user_code import dataset_length, load_batch

OTHERS: Final = 6  # samples that are read in addition to the first and the last one
IN_ORDER: Final = 64  # samples of the order


def record_of(task: Task, seed: int) -> DataRecord:
    """Return a record from a few samples, each read alone and twice. seed: of the job. Raises TaskError.

    Torch's generator has the same state before each reading, as a dataset may draw from it, and is restored afterwards.
    """
    length = dataset_length(task)
    numbers = {0, length - 1, *(pure_seed("look", place) % length for place in range(OTHERS))}
    return DataRecord(
        samples=length,
        order=_digest([repr(sample_numbers(seed, 0, min(IN_ORDER, length), length)).encode()]),
        looked_at=tuple(_look(task, number) for number in sorted(numbers)),
    )


def _look(task: Task, number: int) -> LookedAt:
    first, second = (_read(task, number) for _ in range(2))
    forms, found = _form(first), _bits(first)
    return LookedAt(sample=number, form=forms, digest=found if found == _bits(second) else "")


def _read(task: Task, number: int) -> list[Tensor]:
    before = torch.default_generator.get_state()
    try:
        torch.default_generator.manual_seed(number)
        inputs, targets = load_batch(task, [number])
    finally:
        torch.default_generator.set_state(before)
    return [*inputs, *targets]


def _form(parts: Parts | Sequence[Tensor]) -> str:
    shown = (f"{str(p.dtype).removeprefix('torch.')} {list(p.shape[1:])}" for p in parts)
    text = ", ".join(shown)
    return text if len(text) <= 1000 else f"{text[:950]}… ({_digest([text.encode()])})"


def _bits(parts: Sequence[Tensor]) -> str:
    plain = (part.detach().cpu().contiguous().reshape(-1) for part in parts)
    return _digest([part.view(torch.uint8).numpy().tobytes() for part in plain])


def _digest(texts: Sequence[bytes]) -> str:
    found = hashlib.sha256()
    for text in texts:
        found.update(len(text).to_bytes(8, "little") + text)
    return found.hexdigest()[:16]
