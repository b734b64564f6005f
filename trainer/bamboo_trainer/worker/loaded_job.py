"""A loaded job: its spec, the task that its entrypoint builds, and a fingerprint of the task's dataset."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from bamboo_core.checkpoint.manifest import DataRecord, LookedAt
from bamboo_core.control.protocol import Profile, WorkerReady
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec, heeds_memory
from bamboo_core.planning.splits.device_stages import device_of
from bamboo_trainer.checkpoint.initial import FirstTask
from bamboo_trainer.data.order import pure_seed, sample_numbers
from bamboo_trainer.loading import settled_task
from bamboo_trainer.loggers import MakeLogger
from bamboo_trainer.memory.estimate import measure
from bamboo_trainer.memory.host_copies import HostCopies
from bamboo_trainer.stage.stage import Stage, build_stage
from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.evaluation import EvaluationSchedule, evaluation_schedule
from bamboo_trainer.tasks.inspection import split_costs
from bamboo_trainer.tasks.readers import BatchReader
from bamboo_trainer.tasks.user_code import dataset_length, load_batch
from bamboo_trainer.training import TrainingConfig
from bamboo_trainer.worker.loggers import loggers_of

OTHERS: Final = 6  # samples that are read in addition to the first and the last one
IN_ORDER: Final = 64  # the first samples of the shuffled order


def record_of(task: Task, seed: int) -> DataRecord:
    """Return a fingerprint of the dataset: its length, and digests of its shuffled order and a few samples. Read each
    sample alone, twice; its digest is "" if the two results differ. seed: the job's seed. Raises TaskError.

    A dataset may draw from torch's CPU generator: seed it by the sample's number for each reading, then restore it.
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
    digest = _bits(first)
    return LookedAt(sample=number, form=_form(first), digest=digest if digest == _bits(second) else "")


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
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedJob:
    """A job that this worker has loaded. spec: with the number of steps that follows from the data. evaluations: None
    if there are none. loggers: functions that make them, by name.
    """

    spec: JobSpec
    task: Task
    config: TrainingConfig
    reader: BatchReader
    evaluations: EvaluationSchedule | None
    loggers: Mapping[str, MakeLogger]
    data: DataRecord

    def profile(self, memory: int) -> Profile:
        """Return each layer's cost and, if the coordinator heeds memory, each layer's bytes and the device's memory.

        memory: bytes that stages may use on the device; 0 if unknown.
        """
        costs, heeds = split_costs(self.task, self.spec), heeds_memory(self.spec)
        layers = tuple(size.bytes for size in measure(self.task, self.spec)) if heeds else ()
        return Profile(costs=costs, layers=layers, memory=memory if heeds else 0)

    def ready(self) -> WorkerReady:
        return WorkerReady(samples=self.data.samples, steps=self.spec.training.steps, data=self.data)


@dataclass(frozen=True, slots=True)
class StagesOfJob:
    """The `StageBuilder` of a job, which distributes the stages over this worker's devices. first: the task with its
    initial weights.
    """

    job: LoadedJob
    first: FirstTask
    devices: Sequence[torch.device]
    copies: Mapping[torch.device, HostCopies]

    def stage(self, index: int, stages: Sequence[tuple[int, int]], *, begins: bool = False) -> Stage:
        job, device = self.job, self.devices[device_of(index, len(self.devices))]
        task = self.first.get() if begins else job.task
        return build_stage(task, index, stages, job.config, device, job.reader, self.copies[device])


def load_job(manifest: Mapping[str, Any]) -> LoadedJob:
    """Load a manifest's job and task; fingerprint the data. Raises ManifestError, TaskError, TaskOutOfMemory."""
    task, spec = settled_task(parse_manifest(manifest))
    config = TrainingConfig.of(spec.training)
    return LoadedJob(
        spec=spec,
        task=task,
        config=config,
        evaluations=evaluation_schedule(task, spec.training),
        loggers=loggers_of(task, spec.training),
        reader=BatchReader(task, config.samples),
        data=record_of(task, config.seed),
    )
