"""Measurement of a job's layers on this machine, by the trainer in its own process, as a profile."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from bamboo.local.fork_server import ForkServerError
from bamboo.local.trainer_calls.trainer_process import ask_trainer, missing_packages
from bamboo.simulation.profile_match import task_of
from bamboo_core.job.spec import JobSpec
from bamboo_core.names import HEARTBEAT_TIMEOUT_SECONDS
from bamboo_core.planning.profile import Layer, Machine, ModelProfile, Network, ProfileError, Source, Storage, Times

PROFILE: Final = "bamboo_trainer.profiling:profile"
REPEAT_SECONDS: Final = 60.0  # for measuring again what is not steady
SHOWN_LAYERS: Final = 5
BUSY: Final = 0.05  # share of the time without a processor, from which on measured seconds are only an estimate
DISK_RATE: Final = 100e6  # bytes a second, if nobody says what the store does


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOverrides:
    """Figures of a machine that cannot be measured on it, or should differ; None: as here."""

    # flow, machine, storage_write, storage_read: bytes a second
    flow: float | None = None
    machine: float | None = None
    # latency, start, detection: seconds
    latency: float = 0.0
    storage_write: float | None = None
    storage_read: float | None = None
    start: float | None = None
    detection: float | None = None


def measure_task(
    spec: JobSpec,
    manifest: dict[str, Any],
    folders: Sequence[Path],
    repeats: int,
    around: MachineOverrides,
    seconds: float = REPEAT_SECONDS,
) -> ModelProfile:
    """Return the measured profile of a task. folders: of the task's modules. repeats: microbatches whose median counts,
    and as many again while that is not steady; seconds: limit for that. Raises ProfileError.
    """
    if missing := missing_packages():
        raise ProfileError(f"bamboo profile needs {missing}, not installed here")
    arguments = {"manifest": manifest, "repeats": repeats, "seconds": seconds}
    try:
        answer = ask_trainer(PROFILE, arguments, folders, failed="the task could not be measured")
    except ForkServerError as error:
        raise ProfileError(str(error)) from None
    if problem := answer.get("problem"):
        raise ProfileError(str(problem))
    return profile_of(spec, answer, repeats, around)


def profile_of(spec: JobSpec, answer: dict[str, Any], repeats: int, around: MachineOverrides) -> ModelProfile:
    """Return the profile of the trainer's answer. answer: of `bamboo_trainer.profiling.profile`."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device = answer["device"] if answer["device"] != "cpu" else f"processor of {os.uname().machine}"
    flow = around.flow or answer["loopback"]
    layers = [Layer(**layer) for layer in answer["layers"]]
    samples = spec.training.micro_batch_size
    often = f"{repeats} to {answer['repeats']}" if answer["repeats"] > repeats else f"{repeats}"
    measured = f"median of {often} microbatches of {samples} on {device}, layer by layer"
    return ModelProfile(
        name=spec.name,
        device=device,
        samples=samples,
        layers=tuple(layers),
        network=Network(flow=flow, machine=max(flow, around.machine or flow), latency=around.latency),
        storage=Storage(write=around.storage_write or DISK_RATE, read=around.storage_read or DISK_RATE),
        times=Times(
            start=answer["load"] if around.start is None else around.start,
            detection=HEARTBEAT_TIMEOUT_SECONDS if around.detection is None else around.detection,
        ),
        machine=Machine(memory=answer["memory"] or host, host_memory=host),
        task=task_of(spec),
        sources={
            "layers.seconds": _seconds(measured, answer),
            "layers.update": Source(text=f"median of optimizer steps on {device}, layer by layer"),
            "layers.bytes": Source(text="counted from the layers, on tensors without data where that is possible"),
            "network": _network(around),
            "storage": _storage(around),
            "times": _times(around),
            "memory": Source(text="of this machine"),
        },
    )


def surrounded(profile: ModelProfile, around: MachineOverrides) -> ModelProfile:
    """Return a computed profile with the user's figures of the machine in place of assumed ones."""
    was, replace = profile, msgspec.structs.replace
    flow = around.flow or was.network.flow
    machine = max(flow, around.machine or was.network.machine)
    network = replace(was.network, flow=flow, machine=machine, latency=around.latency or was.network.latency)
    storage = replace(
        was.storage, write=around.storage_write or was.storage.write, read=around.storage_read or was.storage.read
    )
    times = replace(
        was.times,
        start=was.times.start if around.start is None else around.start,
        detection=was.times.detection if around.detection is None else around.detection,
    )
    given = {
        "network": around.flow is not None,
        "storage": None not in (around.storage_write, around.storage_read),
        "times": None not in (around.start, around.detection),
    }
    sources = {**was.sources, **{name: Source(text="given by flags") for name, known in given.items() if known}}
    return replace(was, network=network, storage=storage, times=times, sources=sources)


def _seconds(measured: str, answer: dict[str, Any]) -> Source:
    """Return a measurement, or an estimate with its reason if it is not steady."""
    waited, unsteady = answer["waited"], answer["unsteady"]
    told = []
    if waited >= BUSY:
        busy = f"the machine was busy: {100 * waited:.0f} % of the time no processor was free, which is not counted"
        told.append(f"{busy}, but slows what is")
    if unsteady:
        layers = ", ".join(map(str, unsteady[:SHOWN_LAYERS])) + (" and others" if len(unsteady) > SHOWN_LAYERS else "")
        told.append(
            f"not steady: of {len(unsteady)} of {len(answer['layers'])} layers ({layers}) the median is known within"
            f" {100 * answer['spread']:.0f} % and not {100 * answer['bound']:.0f} %"
        )
    if told:
        return Source(text="; ".join([measured, *told]), estimated=True)
    return Source(text=f"{measured}, each known within {100 * answer['bound']:.0f} %")


def _network(around: MachineOverrides) -> Source:
    if around.flow is not None:
        return Source(text="given by flags")
    return Source(text="one connection within this machine; between machines it is slower (--flow)", estimated=True)


def _storage(around: MachineOverrides) -> Source:
    if None not in (around.storage_write, around.storage_read):
        return Source(text="given by flags")
    return Source(
        text="assumed: 100 MB/s where no flag says otherwise (--storage-write, --storage-read)", estimated=True
    )


def _times(around: MachineOverrides) -> Source:
    given = None not in (around.start, around.detection)
    if given:
        return Source(text="given by flags")
    return Source(
        text="start: loading the task on this machine, without the node, its image and Python's start (--start);"
        " detection: the heartbeat timeout, as of a machine that vanishes (--detection)",
        estimated=True,
    )
