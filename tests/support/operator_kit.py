"""Builders of jobs, pods, nodes and coordinators' statuses for the tests of the operator's decisions."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

from kubernetes_validate import utils
from referencing import Registry, Resource

from bamboo_core.coordinator.events import (
    CheckpointCounts,
    CheckpointSummary,
    RestoreCause,
    Status,
    Takeover,
    WorkerState,
)
from bamboo_core.job.api_object import Metadata
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.placement_spec import Capacity, NodePool, Preset
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.status import BambooJobStatus
from bamboo_core.view.job_view import JobView
from bamboo_operator.manifests.worker_pod import WorkerPodSettings, worker_pod
from manifest_kit import bamboojob, minimal

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


def at(seconds: float) -> str:
    """Return the time `seconds` after NOW in the API's form."""
    return (NOW + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def job(name: str = "tiny", **spec: Any) -> JobSpec:
    """Return the job of the smallest manifest, with these fields of its spec added or replaced."""
    return parse_manifest(bamboojob(name, **(minimal()["spec"] | spec)))


def node(
    *,
    taints: Mapping[str, str] | None = None,
    conditions: tuple[dict[str, str], ...] = (),
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    deleted: str | None = None,
    effect: str = "NoSchedule",
) -> dict[str, Any]:
    metadata = {"name": "n1", "labels": dict(labels or {}), "annotations": dict(annotations or {})}
    if deleted:
        metadata["deletionTimestamp"] = deleted
    keys = [{"key": key, "value": value, "effect": effect} for key, value in (taints or {}).items()]
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "kubelet is posting ready status"}
    if not any(c["type"] == "Ready" for c in conditions):
        conditions = (ready, *conditions)
    return {"metadata": metadata, "spec": {"taints": keys or None}, "status": {"conditions": list(conditions)}}


def pod(
    *,
    phase: str = "Running",
    deleted: str | None = None,
    grace: int = 30,
    target: str | None = None,
    target_at: str | None = None,
    condition: str = "DisruptionTarget",
    ended: Mapping[str, Any] | None = None,
    init: Mapping[str, Any] | None = None,
    **status: Any,
) -> dict[str, Any]:
    """Return a worker's pod. target: the reason of `condition`, if it holds. ended, init: how the containers ended."""
    metadata: dict[str, Any] = {"name": "tiny-w3"}
    if deleted:
        metadata |= {"deletionTimestamp": deleted, "deletionGracePeriodSeconds": grace}
    status["phase"] = phase
    if target:
        found = {"type": condition, "status": "True", "reason": target, "lastTransitionTime": target_at}
        status["conditions"] = [{"type": "Ready", "status": "True"}, found]
    state = {"terminated": dict(ended)} if ended else {"running": {"startedAt": at(-60)}}
    if phase == "Running" or ended:
        sidecar = {"name": "sidecar", "state": {"running": {}}}
        status["containerStatuses"] = [sidecar, {"name": "trainer", "state": state}]
    if init:
        status["initContainerStatuses"] = [{"name": "prepare", "state": {"terminated": dict(init)}}]
    return {"metadata": metadata, "spec": {"terminationGracePeriodSeconds": 30}, "status": status}


def said(*, grid: Any = None, workers: Any = None, **values: Any) -> Status:
    """Return a coordinator's status; by default two protected stages run in one pipeline."""
    grid = ((("w0", True), ("w1", True)),) if grid is None else grid
    if workers is None:
        workers = tuple((owner, WorkerState.TRAINING) for row in grid for owner, _ in row)
    usual: dict[str, Any] = {
        "phase": "Running",
        "epoch": 1,
        "step": 3,
        "steps": 10,
        "first_loss": 5.0,
        "loss": 4.0,
        "losses": (5.0, 4.0),
        "lost_samples": 0,
        "step_seconds": 0.5,
        "samples_per_second": 16.0,
        "eta_seconds": 3.5,
        "preemptions": 0,
        "notices": 0,
        "takeovers": (),
        "digests": (),
        "replicas": int(all(held for row in grid for _, held in row)),
        "wanted": 2,
        "ready": sum(state is not WorkerState.STARTING for _, state in workers),
    }
    return Status(grid=grid, workers=workers, **{**usual, **values})


def takeover(**facts: Any) -> Takeover:
    """Return a takeover; by default, of stage 1 of the job "tiny", in 100 ms and without notice."""
    usual: dict[str, Any] = {
        "epoch": 2,
        "victim": "tiny-w1",
        "worker": "tiny-w0",
        "pipeline": 0,
        "stage": 1,
        "step": 7,
        "notice": False,
        "decide_ms": 1.0,
        "reform_ms": 20.0,
        "recompute_ms": 79.0,
        "forwards": 2,
        "backwards": 3,
    }
    return Takeover(**{**usual, **facts})


def viewed(spec: JobSpec, status: BambooJobStatus | None = None, live: Status | None = None) -> JobView:
    """Return the view of a job on a cluster. status: its status in the API. live: the coordinator's, if one runs."""
    metadata = Metadata(name=spec.name, namespace=spec.namespace)
    return JobView(metadata=metadata, spec=spec, status=status or BambooJobStatus(), live=live)


def checkpoints(
    *,
    step: int | None,
    age: float | None = None,
    restores: int = 0,
    repeated: int = 0,
    repeated_seconds: float = 0.0,
    **values: Any,
) -> CheckpointSummary:
    """Return a summary of checkpoints. step, age (seconds): of the newest. restores: the number after lost stages."""
    counts = CheckpointCounts(
        restores={RestoreCause.STAGE_LOST: restores}, repeated=repeated, repeated_seconds=repeated_seconds
    )
    return CheckpointSummary(step=step, age=age, **{"seconds": 1.0, "bytes": 8, "counts": counts, **values})


@cache
def pod_validator(version: str) -> Any:
    """Return a JSON Schema validator of pods for a Kubernetes version, such as "1.37". It refuses unknown fields."""
    import jsonschema

    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    schema = utils.schema_contents(f"{folder}/pod-v1.json", version)
    definitions = utils.schema_contents(f"{folder}/_definitions.json", version)
    registry: Any = Resource.from_contents(definitions) @ (Resource.from_contents(schema) @ Registry())
    return jsonschema.validators.Draft202012Validator(schema, registry=registry)


def check_pod(rendered: Mapping[str, Any], version: str = "1.37") -> None:
    """Validate a pod. Raises jsonschema's ValidationError if it is invalid or has unknown fields."""
    pod_validator(version).validate(rendered)


# Pods as the operator renders them

JOB_UID = "0b5f1f0e-1111-4222-8333-444455556666"
SETTINGS = WorkerPodSettings(coordinator_url="ws://bamboo.bamboo-system:8090/v1/workers", image="trainer:1")
GPU = {"limits": {"nvidia.com/gpu": 1, "memory": "16Gi"}}
OWN_ENV = ["BAMBOO_WORKER", "BAMBOO_COORDINATOR", "BAMBOO_TOKEN_FILE", "POD_IP", "BAMBOO_GRACE_SECONDS"]
TEMPLATE = {
    "metadata": {"labels": {"team": "a"}, "annotations": {"note": "x"}},
    "spec": {
        "schedulerName": "volcano",
        "priorityClassName": "high",
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "team", "operator": "Exists"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "a", "operator": "Exists"}]},
                        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]},
                    ]
                }
            }
        },
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "d"}}],
        "initContainers": [{"name": "fetch", "image": "f:1"}],
        "containers": [
            {
                "name": "trainer",
                "env": [{"name": "A", "value": "1"}],
                "volumeMounts": [{"name": "data", "mountPath": "/var/run/secrets/bamboo.dev-data"}],
            },
            {"name": "side", "image": "s:1"},
        ],
    },
}


def pool(preset="None", capacity="Spot", name="p", **more):
    return NodePool(name=name, preset=Preset(preset), capacity=Capacity(capacity), **more)


def render(spec=None, number=3, where=None, settings=SETTINGS, **worker):
    return worker_pod(job(**(spec or {}), worker=worker), JOB_UID, number, where, settings)


def stored(
    number: int = 0, *, node: str = "", phase: str = "Running", where: NodePool | None = None, **metadata: Any
) -> dict[str, Any]:
    """Return worker `number`'s pod as an API server stores it. metadata: more fields; `uid` is p<number> by default."""
    made: dict[str, Any] = render(number=number, where=where)
    made["metadata"] |= {"uid": f"p{number}", **metadata}
    made["spec"] |= {"nodeName": node} if node else {}
    return {**made, "status": {"phase": phase}}


def trainer(pod):
    return next(c for c in pod["spec"]["containers"] if c["name"] == "trainer")


POOLS = [None, *(pool(preset, capacity) for preset in Preset for capacity in Capacity)]


class Heard:
    """A listener that records the changes of a job's pods, and the deletions of their nodes, as (change, pod name)."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    def pod_changed(self, name: str) -> None:
        self.said.append(("changed", name))

    def pod_deleted(self, pod: dict[str, Any]) -> None:
        self.said.append(("deleted", pod["metadata"]["name"]))

    def node_deleted(self, pod: str, node: str) -> None:
        self.said.append((f"without {node}", pod))
