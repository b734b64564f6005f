"""A loaded job: its manifest, and the task that the task's code builds from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bamboo_core.checkpoint.data_record import DataRecord
from bamboo_core.control.protocol import Profile, WorkerReady
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec
from bamboo_core.planning.splits.devices import device_of
from bamboo_trainer.data.record import record_of
from bamboo_trainer.initial.first_task import FirstTask
from bamboo_trainer.loading import settled_task
from bamboo_trainer.loggers.from_manifest import loggers_of
from bamboo_trainer.loggers.interface import MakeLogger
from bamboo_trainer.memory.estimate import measure
from bamboo_trainer.memory.host_copies import HostCopies
from bamboo_trainer.stage.stage import Stage, build_stage
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.evaluation import EvaluationSchedule, evaluation_schedule
from bamboo_trainer.tasks.inspection.costs import profile
from bamboo_trainer.tasks.reading.batch_reader import BatchReader
from bamboo_trainer.training import TrainingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedJob:
    """A job that this worker has loaded. spec: with the number of steps that the data allow. evaluations: None without
    any. loggers: by name, not made yet.
    """

    spec: JobSpec
    task: Task
    config: TrainingConfig
    reader: BatchReader
    evaluations: EvaluationSchedule | None
    loggers: Mapping[str, MakeLogger]
    data: DataRecord

    def profile(self, memory: int) -> Profile:
        """Measure each layer's cost by building and running it. memory: bytes of the worker's device; 0: unknown."""
        costs, chosen = profile(self.task, self.spec), self.spec.elastic is not None
        layers = tuple(size.bytes for size in measure(self.task, self.spec)) if chosen else ()
        return Profile(costs=costs, layers=layers, memory=memory if chosen else 0)

    def ready(self) -> WorkerReady:
        return WorkerReady(samples=self.data.samples, steps=self.spec.training.steps, data=self.data)


@dataclass(frozen=True, slots=True)
class StagesOfJob:
    """Builds the stages of a job on this worker's devices, in turn. See `StageBuilder`. first: the task with its
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
    """Load a job. Raises TaskError for mistakes of the task, and any error of its own code."""
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
