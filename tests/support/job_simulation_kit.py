"""Manifests, profiles, plans and node traces of small jobs, and their simulation in virtual time."""

import json
from typing import Any

import msgspec

from bamboo.simulation.job.job_record import JobResult
from bamboo.simulation.job.job_run import JobRun, simulate_job
from bamboo.traces.trace import Change, NodeChange, Trace, make_trace
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec
from bamboo_core.planning.grid import initial_plan
from bamboo_core.planning.plan import Peer, Plan
from bamboo_core.planning.profile import SOURCES, Layer, ModelProfile, Network, parse_profile
from bamboo_core.planning.splits.device_stages import device_layers
from manifest_kit import bamboojob, training

HOUR = 3600.0
NETWORK = Network(flow=1e6, machine=2e6, latency=0.001)
FAST = Network(flow=1e15, machine=1e15, latency=0.0)


def spec(stages: int, pipelines: int, microbatches: int, mode: str = "Replicas", devices: int = 1) -> JobSpec:
    return parse_manifest(manifest(stages, pipelines, microbatches, mode, worker={"devices": devices}))


def manifest(
    stages: int | None, pipelines: int | None, microbatches: int, mode: str = "Replicas", **more: Any
) -> dict[str, Any]:
    """Return a job's manifest. stages, pipelines: None if the coordinator chooses."""
    usual = {
        "task": {"entrypoint": "a:build"},
        "training": training(100_000, 4 * microbatches, 4),
        "topology": {"stages": stages, "pipelines": pipelines},
        "redundancy": {"mode": mode},
    }
    return bamboojob("sim", **(usual | more))


def profile_document(**changes: Any) -> dict[str, Any]:
    layer = {"forward": 0.01, "backward": 0.02, "parameters": 400, "optimizer": 800, "gradients": 400, "boundary": 64}
    return {
        "format": "bamboo-profile",
        "version": 1,
        "name": "tiny",
        "device": "a processor",
        "samples": 4,
        "layers": [dict(layer, activations=100) for _ in range(3)],
        "network": {"flow": 1e9, "machine": 2e9, "latency": 0.001},
        "storage": {"write": 1e8, "read": 2e8},
        "times": {"start": 3.0, "detection": 0.5},
        "machine": {"memory": 1 << 30, "hostMemory": 1 << 31},
        "task": {"entrypoint": "a:build"},
        "sources": {name: {"text": "measured"} for name in SOURCES},
        **changes,
    }


def parsed(**changes: Any) -> ModelProfile:
    return parse_profile("p.json", json.dumps(profile_document(**changes)))


def profile(layers: int, network: Network = FAST, **changes: Any) -> ModelProfile:
    layer = Layer(forward=1.0, backward=2.0, parameters=100, optimizer=200, gradients=100, boundary=0)
    made = msgspec.structs.replace(layer, **changes)
    return msgspec.structs.replace(parsed(), layers=(made,) * layers, network=network)


def plan_of(job: JobSpec, layers: int) -> Plan:
    stages, width = job.topology.stages, layers // job.topology.stages
    peers = [Peer(worker=f"w{i}", host="", port=0) for i in range(stages * job.topology.pipelines)]
    ranges = tuple((s * width, (s + 1) * width) for s in range(stages))
    plan = initial_plan(peers, ranges, job.topology.pipelines, job.training, job.redundancy)
    return msgspec.structs.replace(plan, device_layers=device_layers(job, ranges, None))


def job(stages: int = 3, pipelines: int | None = 1, devices: int = 1, **more: Any) -> JobRun:
    """Return a job to simulate, in which each device of a pipeline runs one layer: 10 ms forward and 20 ms backward per
    microbatch. By default a step takes 0.247 s. pipelines: None if the coordinator chooses.
    """
    document = manifest(stages, pipelines, 6, worker={"devices": devices}, **more)
    model = profile(stages * devices, NETWORK, forward=0.01, backward=0.02)
    times = msgspec.structs.replace(model.times, start=10.0, detection=1.0)
    model = msgspec.structs.replace(model, times=times)
    return JobRun(spec=parse_manifest(document), manifest=document, profile=model, trace=make_trace())


def nodes(count: int, *changes: tuple[float, str, str], duration: float = HOUR, notice: float | None = None) -> Trace:
    """Return a trace with nodes n0, n1 and so on. changes: (second, "add" or "remove", node). notice: seconds."""
    first = [NodeChange(at=0.0, change=Change.ADD, node=f"n{i}") for i in range(count)]
    later = [NodeChange(at=at, change=Change(what), node=node, notice=notice) for at, what, node in changes]
    return make_trace([*first, *later], duration=duration)


def run(one: JobRun, trace: Trace, **more: Any) -> JobResult:
    told: list[str] = more.pop("told", [])
    wanted = JobRun(spec=one.spec, manifest=one.manifest, profile=one.profile, trace=trace, **more)
    return simulate_job(wanted, told.append)
