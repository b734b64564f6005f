"""A job as it runs on this machine: where its checkpoints are kept, and whether they can be."""

import copy
import os
import re
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from bamboo.jobs.errors import InvalidRequest
from bamboo.local.job_source import JobSource
from bamboo_core.checkpoint.resume import choose
from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_core.job.budget_reach import past
from bamboo_core.job.edits import numbers_digest
from bamboo_core.job.manifest import ManifestError, parse_manifest
from bamboo_core.job.node_placement import asking_for_gpus
from bamboo_core.job.spec import JobSpec, RedundancyMode, whole_workers
from bamboo_core.names import ENV_DEVICE
from bamboo_core.storage.bounded import StoreLimits
from bamboo_core.storage.errors import StorageError
from bamboo_core.storage.url import parse_url

_PROFILE: Final = re.compile(r"([1-9][0-9]{0,8})(?::([1-9][0-9]{0,8}))?")
MOST_PROFILED: Final = 20  # steps
_LOOK_SECONDS: Final = 20.0  # for each look into the store before anything is started


def changed(job: JobSource, flag: str, **parts: Any) -> JobSource:
    """The job with other parts of its spec; None removes one. flag: what a mistake is blamed on. Raises
    InvalidRequest.
    """
    document = copy.deepcopy(job.document)
    document["spec"] |= parts
    try:
        return replace(job, spec=parse_manifest(document), document=document)
    except ManifestError as error:
        raise InvalidRequest("\n".join(f"{flag}: {problem}" for problem in error.problems)) from None


def profiled_steps(text: str, spec: JobSpec, output: Path | None) -> tuple[int, int]:
    """The steps FIRST:LAST in which torch.profiler runs, both included. Raises InvalidRequest."""
    flag, found = f"--profile {text}", _PROFILE.fullmatch(text.strip())
    if found is None:
        raise InvalidRequest(f"{flag}: expected FIRST:LAST, such as 20:25")
    first, last = int(found[1]), int(found[2] or found[1])
    if not first <= last < first + MOST_PROFILED:
        raise InvalidRequest(f"{flag}: expected at most {MOST_PROFILED} steps, the last one not before the first")
    if not spec.training.counts_data and last > spec.training.steps:
        raise InvalidRequest(f"{flag}: the job has steps 1 to {spec.training.steps}")
    if output is None:
        raise InvalidRequest(f"{flag}: --output DIR says where the files go")
    return first, last


def on_this_machine(job: JobSource, *, checkpoints: str | None, resume: bool) -> tuple[JobSource, list[str]]:
    """The job to run here, and warnings. Raises InvalidRequest.

    checkpoints: the folder or URL of its checkpoints, if not as the job says. resume: it must go on from them.
    A volume claim is not here: without a URL of its own such a job keeps no checkpoints on this machine.
    """
    spec, warnings = job.spec, list[str]()
    if spec.suspend:
        raise InvalidRequest("spec.suspend: the job is suspended; set it to false to run the job")
    if spec.budget is not None and spec.budget.money is not None:
        warnings.append("spec.budget.money has no effect here: nobody is paid for workers on this machine")
    if told := past(spec, datetime.now(UTC)):
        warnings.append(told)
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
    """Return whether there are GPUs and a torch for them, as far as that can be found out without importing torch."""
    devices = Path("/dev")
    there = any(devices.glob("nvidia[0-9]*")) or any((devices / name).exists() for name in ("kfd", "dxg"))
    try:
        return there and not version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


def storage_url(place: str) -> str:
    """The URL of a store that is named by one, or by a folder."""
    return place if "://" in place else Path(place).absolute().as_uri()


def store_trouble(spec: JobSpec, *, resume: bool) -> str:
    """Why checkpoints cannot be written, as far as that can be told now; "" if they can.

    That they cannot is no mistake, for the store may come back, unless nothing but them could save the job: then
    InvalidRequest is raised. So it is if a file is where a folder should be, and with resume, of which the user does
    not want to begin at step 0, if nothing that is there fits the job any more.
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
            told = f"no checkpoint can be kept, and nothing else could save this job: {error}"
            raise InvalidRequest(told) from None
        return f"no checkpoint can be kept, or looked for, as long as this lasts: {error}"
    return ""


def _file_in_the_way(url: str) -> str:
    """What is no folder, of the store's folder and those above it; "" if nothing is, or it is no folder's URL."""
    place = parse_url(url)
    if place.protocol != "file":
        return ""
    folder = Path(place.path)
    return next((str(one) for one in (folder, *folder.parents) if os.path.exists(one) and not os.path.isdir(one)), "")


def _check_resumption(store: CheckpointStore, spec: JobSpec) -> None:
    """Raises StorageError: the job waits for a store that does not answer, and says why."""
    steps = None if spec.training.counts_data else spec.training.steps
    choice = choose(store.list(), numbers_digest(spec), steps=steps)
    if choice.manifest is None and choice.passed:
        attempt, reason = choice.passed[0]
        told = f"that of step {attempt.step} cannot be used: {reason}"
        raise InvalidRequest(
            f"--resume: {store.shown} has no checkpoint of this job; {told}; without --resume it begins at step 0"
        )


def _survives_losses(spec: JobSpec) -> bool:
    """Is there anybody else who holds the state of a stage: a replica, or another pipeline?"""
    redundant = spec.redundancy.mode is not RedundancyMode.NONE
    several = whole_workers(spec) > 1 if spec.elastic else spec.topology.stages > 1
    return (redundant and several) or spec.topology.pipelines > 1
