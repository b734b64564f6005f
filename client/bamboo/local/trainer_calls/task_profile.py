"""Profiles of a job's own layers: the trainer, in its process, times them or counts their work for another device."""

import json
import os
from typing import Any, Final

import msgspec

from bamboo.job_source import JobSource
from bamboo.local.trainer_calls.trainer_process import TrainerError, ask_trainer
from bamboo.profiles.analytic import LayerCount, TaskCounts
from bamboo_core.job.spec import JobSpec
from bamboo_core.names import HEARTBEAT_TIMEOUT_SECONDS
from bamboo_core.planning.profile import (
    Layer,
    Machine,
    ModelProfile,
    Network,
    ProfiledTask,
    ProfileError,
    Source,
    Storage,
    Times,
)

PROFILE: Final = "bamboo_trainer.profiling:profile"
COUNT: Final = "bamboo_trainer.profiling:count"
SHOWN_LAYERS: Final = 5
BUSY: Final = 0.05  # share of the time without a processor above which measured seconds are an estimate
DISK_RATE: Final = 100e6  # bytes a second, assumed of a store
DETECTION: Final = "detection: the heartbeat timeout, as of a machine that vanishes"


def measure_task(job: JobSource, repeats: int, seconds: float) -> ModelProfile:
    """Measure a task's layers on this machine's device, and return their profile. Raises ProfileError.

    repeats: microbatches per layer, whose median counts. seconds: limit in seconds, for all layers together, for more
    rounds of `repeats` while a median is not steady.
    """
    answer = _answer(PROFILE, job, "the task could not be measured", repeats=repeats, seconds=seconds)
    return profile_of(job.spec, answer, repeats)


def count_task(job: JobSource) -> TaskCounts:
    """Count the operations and bytes of a task's layers, for a computed profile. Raises ProfileError."""
    return counts_of(job.spec, _answer(COUNT, job, "the layers could not be counted"))


def _answer(function: str, job: JobSource, failed: str, **arguments: float) -> dict[str, Any]:
    """Call a function of the trainer on a job's task; return its answer, as `ask_trainer` does. Raises ProfileError."""
    try:
        return ask_trainer(function, {"manifest": job.document, **arguments}, job.folders, failed=failed)
    except TrainerError as error:
        raise ProfileError(str(error)) from None


def task_of(spec: JobSpec) -> ProfiledTask:
    """Return the job's task as its profiles record it."""
    training = spec.training
    config: dict[str, Any] = json.loads(json.dumps(spec.task.config))
    return ProfiledTask(
        entrypoint=spec.task.entrypoint,
        config=config,
        precision=training.precision.value,
        parameter_precision=training.parameter_precision.value,
        boundary_precision=training.boundary_precision.value,
    )


def counts_of(spec: JobSpec, answer: dict[str, Any]) -> TaskCounts:
    """Convert the trainer's counts. answer: the result of `bamboo_trainer.profiling.count`."""
    return TaskCounts(
        name=spec.name,
        samples=spec.training.micro_batch_size,
        layers=msgspec.convert(answer["layers"], tuple[LayerCount, ...]),
        task=task_of(spec),
        source="counted from the layers with torch's counter, on tensors without data where that is possible",
    )


def profile_of(spec: JobSpec, answer: dict[str, Any], repeats: int) -> ModelProfile:
    """Convert the trainer's result of `bamboo_trainer.profiling.profile`. repeats: as in `measure_task`."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device = answer["device"] if answer["device"] != "cpu" else f"processor of {os.uname().machine}"
    samples = spec.training.micro_batch_size
    often = f"{repeats} to {answer['repeats']}" if answer["repeats"] > repeats else f"{repeats}"
    measured = f"median of {often} microbatches of {samples} on {device}, layer by layer"
    return ModelProfile(
        name=spec.name,
        device=device,
        samples=samples,
        layers=tuple(Layer(**layer) for layer in answer["layers"]),
        network=Network(flow=answer["loopback"], machine=answer["loopback"]),
        storage=Storage(write=DISK_RATE, read=DISK_RATE),
        times=Times(start=answer["load"], detection=HEARTBEAT_TIMEOUT_SECONDS),
        machine=Machine(memory=answer["memory"] or host, host_memory=host),
        task=task_of(spec),
        sources={
            "layers.seconds": _seconds(measured, answer),
            "layers.update": Source(text=f"median of optimizer steps on {device}, layer by layer"),
            "layers.bytes": Source(text="counted from the layers, on tensors without data where that is possible"),
            "network": Source(
                text="one connection within this machine; between machines it is slower (--flow)", estimated=True
            ),
            "storage": Source(text="assumed: 100 MB/s", estimated=True),
            "times": Source(
                text="start: loading the task on this machine, without the node, its image and Python's start"
                f" (--start); {DETECTION}",
                estimated=True,
            ),
            "memory": Source(text="of this machine"),
        },
    )


def surrounded(
    profile: ModelProfile, *, flow: float | None, machine: float | None, start: float | None
) -> ModelProfile:
    """Return the profile with the network rates and the start time from flags; None keeps the profile's value.

    flow: bytes/s of a connection. machine: bytes/s of a machine, raised to flow if less; if only flow is given, the
    machine's rate is set to flow. start: seconds until a worker is ready.
    """
    replace, sources = msgspec.structs.replace, dict(profile.sources)
    network, times = profile.network, profile.times
    if flow is not None or machine is not None:
        one = flow or network.flow
        network = replace(network, flow=one, machine=max(one, machine or one))
    if flow is not None:
        sources["network"] = Source(text="given by flags")
    if start is not None:
        times = replace(times, start=start)
        sources["times"] = Source(text=f"start: given by --start; {DETECTION}")
    return replace(profile, network=network, times=times, sources=sources)


def _seconds(measured: str, answer: dict[str, Any]) -> Source:
    """Return the source of the layers' times, marked as estimated if the machine was busy or medians are unsteady."""
    waited, unsteady = answer["waited"], answer["unsteady"]
    doubts = []
    if waited >= BUSY:
        busy = f"the machine was busy: {100 * waited:.0f} % of the time no processor was free, which is not counted"
        doubts.append(f"{busy}, but slows what is")
    if unsteady:
        layers = ", ".join(map(str, unsteady[:SHOWN_LAYERS])) + (" and others" if len(unsteady) > SHOWN_LAYERS else "")
        doubts.append(
            f"not steady: of {len(unsteady)} of {len(answer['layers'])} layers ({layers}) the median is known within"
            f" {100 * answer['spread']:.0f} % and not {100 * answer['bound']:.0f} %"
        )
    if doubts:
        return Source(text="; ".join([measured, *doubts]), estimated=True)
    return Source(text=f"{measured}, each known within {100 * answer['bound']:.0f} %")
