"""Preparation of a job for a run on this machine: options, checks of the task, and the store of checkpoints."""

import copy
import math
import os
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from bamboo.job_source import JobSource
from bamboo.jobs.errors import BambooError, InvalidRequest
from bamboo.local.run_options import LocalRunOptions
from bamboo.local.runner import RunOptions
from bamboo.local.scheduling import check as check_schedule
from bamboo.local.scheduling import parse as parse_schedule
from bamboo.local.trainer_calls.task_check import check_task
from bamboo.local.trainer_calls.trainer_process import TrainerError
from bamboo_core.checkpoint.selection import choose
from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_core.job.budget_reach import past
from bamboo_core.job.edits import numbers_digest
from bamboo_core.job.manifest import ManifestError, parse_manifest
from bamboo_core.job.manifest_warnings import warnings as manifest_warnings
from bamboo_core.job.pod_templates import asking_for_gpus
from bamboo_core.job.spec import JobSpec, RedundancyMode, whole_workers
from bamboo_core.names import ENV_DEVICE
from bamboo_core.storage.bounded import StorageError, StoreLimits
from bamboo_core.storage.url import parse_url

_LOOK_SECONDS: Final = 20.0  # limit for each access to the store before the start


@dataclass(frozen=True, slots=True)
class Validation:
    """The result of a validation. warnings: settings that may be unintended. told: lines about the task, if loaded."""

    warnings: tuple[str, ...]
    told: tuple[str, ...]


def validated(job: JobSource, *, load: bool) -> Validation:
    """Return warnings about the job. load: also build and describe its task; raises BambooError if that fails."""
    warnings = tuple(filter(None, (*manifest_warnings(job.spec), past(job.spec, datetime.now(UTC)))))
    try:
        return Validation(warnings, check_task(job.document, job.folders) if load else ())
    except TrainerError as error:
        raise BambooError(f"{job.name}: {error}") from None


def changed(job: JobSource, flag: str, **parts: Any) -> JobSource:
    """Return the job with some sections of its spec replaced; None removes a section.

    parts: the new sections, by name. flag: the user's flag, for the error. Raises InvalidRequest.
    """
    document = copy.deepcopy(job.document)
    document["spec"] |= parts
    try:
        return replace(job, spec=parse_manifest(document), document=document)
    except ManifestError as error:
        raise InvalidRequest("\n".join(f"{flag}: {problem}" for problem in error.problems)) from None


def prepared(job: JobSource, options: LocalRunOptions) -> tuple[JobSource, RunOptions, list[str]]:
    """Prepare a job to run on this machine, and probe its checkpoint store. Return the job, options and warnings.

    Raises ValueError with a sentence for the user, which names the wrong flag or field if there is one.
    """
    job, warnings = on_this_machine(_sized(job, options), checkpoints=options.checkpoints, resume=options.resume)
    schedule = parse_schedule(options.preempt or [], seed=options.seed)
    check_schedule(schedule, job.spec)
    if not math.isfinite(options.heartbeat_timeout):
        raise InvalidRequest(f"--heartbeat-timeout {options.heartbeat_timeout}: expected a number of seconds")
    output, trace = (None if path is None else path.absolute() for path in (options.output, options.trace))
    trouble = store_trouble(job.spec, resume=options.resume)
    run = RunOptions(
        preempt=schedule,
        output=output,
        trace=trace,
        heartbeat_timeout=options.heartbeat_timeout,
        replace_after=options.replace_after,
        store_writable=not trouble,
    )
    return job, run, [*warnings, *filter(None, [trouble])]


def _sized(job: JobSource, options: LocalRunOptions) -> JobSource:
    """Return the job with the options' numbers of workers, standbys and workers per node. Raises InvalidRequest."""
    given, stages = job.document["spec"], job.spec.topology.stages
    if options.workers is not None:
        flag = f"--workers {options.workers}"
        if job.spec.elastic:
            job = changed(job, flag, elastic={**given["elastic"], "maxWorkers": options.workers})
        elif options.workers % stages:
            raise InvalidRequest(f"{flag}: expected a multiple of the job's {stages} stages")
        else:
            job = changed(job, flag, topology={**given["topology"], "pipelines": options.workers // stages})
    for flag, part, field, number in (
        ("--standby", "standby", "workers", options.standby),
        ("--workers-per-node", "spread", "workersPerNode", options.workers_per_node),
    ):
        if number is not None:
            job = changed(job, f"{flag} {number}", **{part: {**(given.get(part) or {}), field: number}})
    return job


def on_this_machine(job: JobSource, *, checkpoints: str | None, resume: bool) -> tuple[JobSource, list[str]]:
    """Adapt the job to this machine, and return it with warnings. Raises InvalidRequest, also for a suspended job.

    checkpoints: folder or URL that replaces the job's store. resume: refuse a job without a store. A volume claim does
    not exist here: without `checkpoints`, a job with a claim keeps no checkpoints on this machine.
    """
    spec, warnings = job.spec, list[str]()
    if spec.suspend:
        raise InvalidRequest("spec.suspend: the job is suspended; set it to false to run the job")
    if spec.budget is not None and spec.budget.money is not None:
        warnings.append("spec.budget.money has no effect here: nobody is paid for workers on this machine")
    if text := past(spec, datetime.now(UTC)):
        warnings.append(text)
    asks = asking_for_gpus(spec)
    if asks and not os.environ.get(ENV_DEVICE) and not _torch_may_use_gpus():
        warnings.append(f"{asks} for GPUs, and torch can use none on this machine: the workers train on the CPU")
    claimed = spec.checkpoint is not None and spec.checkpoint.claim is not None
    if checkpoints is None and not resume and not claimed:
        return job, warnings
    part = dict(job.document["spec"].get("checkpoint") or {})
    if checkpoints is not None:
        part["storage"] = storage_url(checkpoints)
    elif claimed:
        warnings.append("the job's volume claim is not here: no checkpoints are kept (--checkpoints)")
        part = {}
    if resume and not part:
        raise InvalidRequest("--resume: the job keeps no checkpoints; --checkpoints URL says where they are")
    return changed(job, "--checkpoints", checkpoint=part or None), warnings


def _torch_may_use_gpus() -> bool:
    """Return whether this machine has GPU devices, and a torch build other than +cpu. It does not import torch."""
    devices = Path("/dev")
    present = any(devices.glob("nvidia[0-9]*")) or any((devices / name).exists() for name in ("kfd", "dxg"))
    try:
        return present and not version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


def storage_url(place: str) -> str:
    """Return the URL of a checkpoint store. place: a URL, or a folder of this machine."""
    return place if "://" in place else Path(place).absolute().as_uri()


def store_trouble(spec: JobSpec, *, resume: bool) -> str:
    """Probe the checkpoint store. Return why checkpoints cannot be written now; "" if they can, or none are kept.

    A failing store may recover, so it raises InvalidRequest only for a job without replicas or further pipelines. It
    also raises it if a file is in place of the folder, or if `resume` is set and no existing checkpoint fits the job.
    """
    url = spec.checkpoint.url if spec.checkpoint is not None else None
    if url is None:
        return ""
    if file := _file_in_the_way(url):
        raise InvalidRequest(f"spec.checkpoint.storage: {file} is a file, expected a folder")
    try:
        store = CheckpointStore(url, StoreLimits(seconds=_LOOK_SECONDS, tries=1))
        if resume:
            _check_resumption(store, spec)
        store.probe()
    except StorageError as error:
        if not _survives_losses(spec):
            problem = f"no checkpoint can be kept, and nothing else could save this job: {error}"
            raise InvalidRequest(problem) from None
        return f"no checkpoint can be kept, or looked for, as long as this lasts: {error}"
    return ""


def _file_in_the_way(url: str) -> str:
    """Return the file that is in the place of the store's folder or of a parent folder; "" if there is none."""
    place = parse_url(url)
    if place.protocol != "file":
        return ""
    folder = Path(place.path)
    return next((str(one) for one in (folder, *folder.parents) if os.path.exists(one) and not os.path.isdir(one)), "")


def _check_resumption(store: CheckpointStore, spec: JobSpec) -> None:
    """Raise InvalidRequest if there are checkpoints and none fits the job. Raises StorageError if the store fails."""
    steps = None if spec.training.counts_data else spec.training.steps
    choice = choose(store.list(), numbers_digest(spec), steps=steps)
    if choice.manifest is None and choice.passed:
        attempt, reason = choice.passed[0]
        why = f"that of step {attempt.step} cannot be used: {reason}"
        raise InvalidRequest(
            f"--resume: {store.shown} has no checkpoint of this job; {why}; without --resume it begins at step 0"
        )


def _survives_losses(spec: JobSpec) -> bool:
    """Return whether replicas or other pipelines hold a copy of each stage's state."""
    redundant = spec.redundancy.mode is not RedundancyMode.NONE
    several = whole_workers(spec) > 1 if spec.elastic else spec.topology.stages > 1
    return (redundant and several) or spec.topology.pipelines > 1
