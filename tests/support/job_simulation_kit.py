"""Jobs in virtual time."""

from typing import Any

import msgspec
from test_step_times import manifest, profile

from bamboo.job.manifest import parse_manifest
from bamboo.profiles.profile import Network
from bamboo.simulation.job.job_record import JobResult
from bamboo.simulation.job.job_run import JobRun, simulate_job
from bamboo.traces.trace import Change, NodeChange, Trace, make_trace

HOUR = 3600.0


NETWORK = Network(flow=1e6, machine=2e6, latency=0.001)


def job(stages: int = 3, pipelines: int = 1, **more: Any) -> JobRun:
    """Layers of 10 and 20 ms; a step of three stages takes 0.24 s for 6 microbatches."""
    document = manifest(stages, pipelines, 6, **more)
    model = profile(stages, NETWORK, forward=0.01, backward=0.02)
    times = msgspec.structs.replace(model.times, start=10.0, detection=1.0)
    model = msgspec.structs.replace(model, times=times)
    return JobRun(spec=parse_manifest(document), manifest=document, profile=model, trace=make_trace())


def nodes(count: int, *changes: tuple[float, str, str], duration: float = HOUR, notice: float | None = None) -> Trace:
    """Nodes n0, n1 ... from the beginning on; changes: (second, "add" or "remove", node)."""
    first = [NodeChange(at=0.0, change=Change.ADD, node=f"n{i}") for i in range(count)]
    later = [NodeChange(at=at, change=Change(what), node=node, notice=notice) for at, what, node in changes]
    return make_trace([*first, *later], duration=duration)


def run(one: JobRun, trace: Trace, **more: Any) -> JobResult:
    told: list[str] = more.pop("told", [])
    wanted = JobRun(spec=one.spec, manifest=one.manifest, profile=one.profile, trace=trace, **more)
    return simulate_job(wanted, told.append)
