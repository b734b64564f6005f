"""The shell of `bamboo bench`: makes a measurement, as a job of this machine or as a call of the trainer."""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import msgspec

from bamboo import loop_signals
from bamboo.bench.bench_measurements import (
    MANY_STEPS,
    CountWork,
    JobWork,
    PlainWork,
    PlannedMeasurement,
    ProfileWork,
)
from bamboo.bench.device_times import device_times, thread_times
from bamboo.bench.memory_sampler import MemorySampler, MemoryUnknown, sampled
from bamboo.bench.profiler_files import RecordingError, read_recordings
from bamboo.bench.report import BenchError, MachineFound, Measured, MemoryFound
from bamboo.bench.sizes import BenchSizes
from bamboo.bench.step_recorder import Enough, KillPlan, StepRecorder
from bamboo.local.fork_server import ForkServerError
from bamboo.local.runner import RunOptions, run_job
from bamboo.local.session import undisturbed_job
from bamboo.local.trace_summary import TraceError, read_trace, summarize_trace
from bamboo.local.trainer_calls.task_check import CHECK
from bamboo.local.trainer_calls.task_counts import COUNT, counts_of
from bamboo.local.trainer_calls.task_profile import MachineOverrides, measure_task
from bamboo.local.trainer_calls.trainer_process import ask_trainer, missing_packages
from bamboo.local.views.summary import Summary, compare
from bamboo.preemption.scheduling import parse
from bamboo_core.complaints import system_reason
from bamboo_core.coordinator.events import Outcome
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec
from bamboo_core.metrics.time_use import TimeUse
from bamboo_core.planning.profile import ModelProfile, ProfileError

FACTS: Final = "bamboo_trainer.machine_facts:machine_facts"
PLAIN: Final = "bamboo_trainer.plain_training:train_plainly"
FACTS_SECONDS: Final = 600.0
PROFILED: Final = 2  # the step after those of the warmup that torch.profiler records
REPEATS: Final = 10  # of each layer, for the profile
KILLING: Final = 0.35  # share of the time in which workers are killed; most of the rest is for the comparison
RESTART_SECONDS: Final = 20.0  # until a killed worker is replaced on a GPU; on a processor a quarter of it


class BenchInterrupted(Exception):
    """The user has stopped the run; what is measured is kept."""


class _Failed(RuntimeError):
    """A measurement could not be made; one sentence."""


def find_machine(*, quick: bool) -> MachineFound:
    """What this machine is. Raises BenchError."""
    if missing := missing_packages():
        raise BenchError(f"bamboo bench needs {missing}, not installed here")
    try:
        answer = ask_trainer(
            FACTS,
            {"quick": quick},
            (),
            seconds=FACTS_SECONDS,
            failed="the machine was not measured",
            most=FACTS_SECONDS,
        )
    except ForkServerError as error:
        raise BenchError(str(error)) from None
    if problem := answer.get("problem"):
        raise BenchError(str(problem))
    return msgspec.convert(answer, MachineFound)


def measure(
    one: PlannedMeasurement, machine: MachineFound, sizes: BenchSizes, seconds: float
) -> tuple[Measured, ModelProfile | None]:
    """What a measurement came to, and the profile if it is that. seconds: that it may take, by the clock. Raises
    BenchInterrupted; what else goes wrong is the result's `problem`.
    """
    began, profile = time.monotonic(), None
    found = Measured(key=one.key, part=one.part, group=one.group, side=one.side, round=one.round)
    try:
        if one.lacks:
            raise _Failed(one.lacks)
        match one.work:
            case PlainWork():
                found = _plain(found, one.work, sizes, seconds)
            case JobWork():
                found = _job(found, one.work, machine, sizes, seconds)
            case CountWork():
                found = _counted(found, one.work, seconds)
            case ProfileWork():
                profile = _profile(one.work, min(seconds / 4, 3 * sizes.seconds), seconds)
    except SystemExit:  # a signal
        raise BenchInterrupted from None
    except OSError as error:
        found = msgspec.structs.replace(found, problem=f"{error.filename or 'the system'}: {system_reason(error)}")
    except (_Failed, ForkServerError, ProfileError, TraceError, RecordingError, MemoryUnknown) as error:
        found = msgspec.structs.replace(found, problem=str(error))
    except TimeoutError:
        found = msgspec.structs.replace(found, problem=f"it was not done within {seconds:.0f} s")
    return msgspec.structs.replace(found, took=time.monotonic() - began), profile


def _plain(found: Measured, work: PlainWork, sizes: BenchSizes, seconds: float) -> Measured:
    spec = parse_manifest(dict(work.job))
    enough = _enough(spec, sizes)
    arguments = {
        "manifest": _with_steps(work.job, enough.warmup + enough.most),
        "warmup": enough.warmup,
        "least": enough.least,
        "seconds": enough.seconds,
    }
    answer = _asked(PLAIN, arguments, seconds, "plain training failed")
    return msgspec.structs.replace(
        found,
        steps=tuple(answer["steps"]),
        losses=tuple(answer["losses"]),
        flops=answer["flops"],
        samples=spec.training.global_batch_size,
        precision=spec.training.precision.value,
    )


def _counted(found: Measured, work: CountWork, seconds: float) -> Measured:
    """With the operations of a sample, which are those that plain training counts, and why there is no more."""
    manifest = _with_steps(work.job, 1)
    counts = counts_of(parse_manifest(manifest), _asked(COUNT, {"manifest": manifest}, seconds, "no layer was counted"))
    flops = sum(
        layer.times * operations * often
        for layer in counts.layers
        for _, operations, _, often in (*layer.forward, *layer.backward)
    )
    return msgspec.structs.replace(found, flops=flops / counts.samples, problem=work.why)


def _enough(spec: JobSpec, sizes: BenchSizes) -> Enough:
    """A job of few steps runs all of them."""
    steps = spec.training.steps
    if steps < MANY_STEPS:
        return Enough(warmup=1, least=steps - 1, most=steps - 1, seconds=0.0)
    return Enough(warmup=sizes.warmup, least=sizes.least, most=sizes.most, seconds=sizes.seconds)


def _with_steps(job: Mapping[str, Any], steps: int) -> dict[str, Any]:
    spec = {**job["spec"], "training": {**job["spec"]["training"], "steps": steps}}
    return {**job, "spec": spec}


def _profiled(job: Mapping[str, Any], step: int, folder: Path) -> dict[str, Any]:
    """The job in which torch.profiler records that step of all workers. It ends the step's recording in the next one,
    which it holds up: of several in a row only the first one would say how long things take.
    """
    training = {**job["spec"]["training"], "profiler": {"firstStep": step, "lastStep": step, "to": folder.as_uri()}}
    return {**job, "spec": {**job["spec"], "training": training}}


def _asked(function: str, arguments: dict[str, Any], seconds: float, failed: str) -> dict[str, Any]:
    """What the trainer answers. Raises _Failed or ForkServerError."""
    answer = ask_trainer(function, arguments, (), seconds=seconds, failed=failed, most=seconds)
    if problem := answer.get("problem"):
        raise _Failed(str(problem))
    return answer


def _profile(work: ProfileWork, seconds: float, most: float) -> ModelProfile:
    """seconds: for measuring again what is not steady; most: for all. Raises ProfileError."""
    manifest = _with_steps(work.job, 1)
    return measure_task(parse_manifest(manifest), manifest, (), REPEATS, MachineOverrides(), seconds, most)


def _job(found: Measured, work: JobWork, machine: MachineFound, sizes: BenchSizes, seconds: float) -> Measured:
    manifest, until = dict(work.job), time.monotonic() + seconds
    if work.kills:
        manifest = _with_steps(manifest, _steps_for_kills(manifest, machine, sizes, seconds))
    estimated = _estimate(manifest, until - time.monotonic()) if work.sampled else 0
    with tempfile.TemporaryDirectory(prefix="bamboo-bench-") as name:
        folder = Path(name)
        if work.traced:
            manifest = _profiled(manifest, sizes.warmup + PROFILED, folder)
        spec = parse_manifest(manifest)
        kills = KillPlan(number=work.kills, calm=sizes.calm) if work.kills else None
        recorder = StepRecorder(spec, _enough(spec, sizes), kills)
        trace = folder / "trace.json" if work.traced else None
        options = RunOptions(preempt=parse(work.preempt), trace=trace)
        with sampled(gpu=machine.is_gpu) if work.sampled else nullcontext() as sampler:
            summary = _run(spec, manifest, options, recorder, until)
        shares = _shares(trace) if trace is not None else {}
        recordings = read_recordings(folder, gpu=machine.is_gpu)
    disturbed = bool(work.kills or work.preempt)
    return msgspec.structs.replace(
        found,
        steps=() if disturbed else recorder.steps,
        samples=spec.training.global_batch_size,
        devices=work.devices,
        precision=spec.training.precision.value,
        losses=() if work.kills else tuple(recorder.losses),
        bits_equal=_equal(spec, manifest, summary, sizes, until) if disturbed else None,
        kills=recorder.kills(),
        shares=shares,
        device_times=device_times(recordings),
        thread_times=thread_times(recordings),
        memory=None if sampler is None else _memory(sampler, summary, spec, machine, estimated),
    )


def _steps_for_kills(manifest: dict[str, Any], machine: MachineFound, sizes: BenchSizes, seconds: float) -> int:
    """As many steps as it takes to kill all workers one after the other, by the time of a calm step, which a short run
    measures; or as many as there is time for.
    """
    began, spec = time.monotonic(), parse_manifest(manifest)
    calm = StepRecorder(spec, _enough(spec, sizes), None)
    _run(spec, manifest, RunOptions(), calm, began + seconds)
    each = statistics.fmean(calm.steps)
    restart = RESTART_SECONDS if machine.is_gpu else RESTART_SECONDS / 4
    wanted = sizes.warmup + (sizes.kills + 2) * sizes.calm + int((sizes.kills - 1) * restart / each)
    return max(sizes.warmup + 3 * sizes.calm, min(wanted, int(KILLING * seconds / each)))


def _run(spec: JobSpec, manifest: dict[str, Any], options: RunOptions, view: StepRecorder, until: float) -> Summary:
    """The run to its end. Raises TimeoutError after that moment, BenchInterrupted, _Failed, and ForkServerError."""

    async def run() -> Summary:
        async with asyncio.timeout(max(1.0, until - time.monotonic())):
            return await run_job(spec, manifest, options, view)

    summary = loop_signals.run(run)
    if summary.outcome is Outcome.INTERRUPTED and not view.stopped:
        raise BenchInterrupted
    if summary.outcome not in (Outcome.COMPLETE, Outcome.INTERRUPTED):
        raise _Failed(f"the job ended as {summary.outcome}, {summary.reason}: {summary.message}")
    return summary


def _equal(spec: JobSpec, manifest: dict[str, Any], ran: Summary, sizes: BenchSizes, until: float) -> bool:
    """Are the bits those of the same job on another grid, undisturbed?"""
    calm, document = undisturbed_job(spec, manifest, ran)
    view = StepRecorder(calm, _enough(calm, sizes), None)
    return compare(ran.digests, _run(calm, document, RunOptions(undisturbed=True), view, until).digests)


def _shares(trace: Path) -> dict[str, float]:
    """What the workers' time went to; `other` is what lies between the spans."""
    overall = summarize_trace(read_trace(trace)).overall
    shares = {str(kind): overall.share(kind) or 0.0 for kind in TimeUse}
    return {**shares, "other": overall.other or 0.0}


def _estimate(manifest: dict[str, Any], seconds: float) -> int:
    """The bytes of the worker that needs most, as `bamboo validate --load` estimates them."""
    answer = _asked(CHECK, {"manifest": manifest}, seconds, "the memory was not estimated")
    return int(sum(answer["calm"]["memory"].values()))


def _memory(
    sampler: MemorySampler, summary: Summary, spec: JobSpec, machine: MachineFound, estimated: int
) -> MemoryFound:
    if sampler.problem:
        raise MemoryUnknown(sampler.problem)
    workers = spec.topology.stages * spec.topology.pipelines
    sharing = -(-workers // len(machine.devices)) if machine.is_gpu else 1
    accounted = max((memory.peak for _, memory in summary.memory), default=0)
    return MemoryFound(estimated=estimated, accounted=accounted, measured=sampler.highest, sharing=sharing)
