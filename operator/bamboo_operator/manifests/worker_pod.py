"""The manifest of a worker's pod, and of its job's network policy. Equal arguments give equal manifests."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from hashlib import sha256
from typing import Any

from bamboo_core import names
from bamboo_core.job.placement_spec import NodePool
from bamboo_core.job.pod_templates import NodePlacement, merge, placement
from bamboo_core.job.spec import JobSpec
from bamboo_core.names import LABEL_JOB_UID, METRICS_PORT, worker_name
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.manifests.spread import spread, spread_labels
from bamboo_operator.manifests.template import TOKEN_VOLUME, read_templates


def place(spec: dict[str, Any], where: NodePlacement) -> None:
    """Add the constraints in `where` to a pod's spec, in place; a selector key in `where` overrides the spec's."""
    if where.selector:
        spec["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **where.selector}
    asked = list(spec.get("tolerations") or ())
    if tolerations := [*asked, *(dict(t) for t in where.tolerations if t not in asked)]:
        spec["tolerations"] = tolerations
    if where.expressions:
        affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
        required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
        terms = required.get("nodeSelectorTerms") or [{}]  # the terms are alternatives
        ours = [dict(e) for e in where.expressions]
        required["nodeSelectorTerms"] = [
            {**term, "matchExpressions": [*(term.get("matchExpressions") or ()), *ours]} for term in terms
        ]


Json = dict[str, Any]

MANAGED_BY = "bamboo-operator"
STORAGE_VOLUME = "bamboo-storage"
METRICS = "metrics"  # the port's name
TOKEN_FILE = f"{names.TOKEN_FOLDER}/token"
HOST_NETWORK = (
    "spec.hostNetwork: takes effect, but most network plugins treat such workers as their nodes: the"
    " operator's network policy has to let these addresses in (networkPolicy.workersFrom of the chart), and the job's"
    " own does not protect its workers"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPodSettings:
    """The operator's settings for all workers' pods."""

    coordinator_url: str  # the address that workers connect to: ws://HOST:PORT/PATH, or wss: with TLS
    image: str  # for jobs that name no image
    run_as_user: int | None = 65532  # not root; None leaves it to the image or the platform
    # PEM of the authority that signed the coordinator's certificate; "" if workers trust the authorities in their image
    authority: str = ""
    network_policy: bool = True  # only workers of the same job may connect to a worker, except to read metrics
    disruption_budgets: bool = True  # a job's workers are evicted one at a time


def worker_number(pod: Mapping[str, Any]) -> int | None:
    """Return the number in a worker pod's label; None for other pods."""
    text = str(((pod.get("metadata") or {}).get("labels") or {}).get(names.LABEL_WORKER_INDEX, ""))
    return int(text) if text.isdecimal() else None


def worker_pool(pod: Mapping[str, Any]) -> str | None:
    """Return the name of the node pool that a worker's pod was created for; None if its job has no pools."""
    found: str | None = ((pod.get("metadata") or {}).get("labels") or {}).get(names.LABEL_NODE_POOL)
    return found


def template_problems(job: JobSpec) -> list[str]:
    """Return a sentence for each ignored field of the job's templates, and for each template with hostNetwork."""
    found: list[str] = []
    for reading in read_templates(job, job.node_pools):
        found += reading.problems
        if reading.template["spec"].get("hostNetwork"):
            found.append(f"{reading.path}.{HOST_NETWORK}")
    return found


def worker_pod(
    job: JobSpec, uid: str, number: int, pool: NodePool | None, settings: WorkerPodSettings, group: int = 0
) -> Json:
    """Return the pod of the worker with this number, for nodes of the pool (None: any node).

    uid: the owning BambooJob's. group: pods of a group are in the same zone if the spread requires it.
    """
    pod = _rendered(job, uid, (number, group), pool, settings)
    pod["metadata"]["labels"][names.LABEL_WORKER_REVISION] = worker_revision(job, uid, pool, settings)
    return pod


def worker_revision(job: JobSpec, uid: str, pool: NodePool | None, settings: WorkerPodSettings) -> str:
    """Return a digest of everything that the pods of a pool's workers have in common."""
    rendered = json.dumps(_rendered(job, uid, (0, 0), pool, settings), sort_keys=True)
    return sha256(rendered.encode()).hexdigest()[:10]


def _rendered(
    job: JobSpec, uid: str, which: tuple[int, int], pool: NodePool | None, settings: WorkerPodSettings
) -> Json:
    """Return the pod of a worker, without its revision label. which: the worker's number and group."""
    number, group = which
    name, where = worker_name(job.name, number), placement(job, pool)
    rendered = {
        "metadata": {"labels": _common_labels(job), "annotations": dict(where.annotations)},
        "spec": _spec(job, uid, group, settings),
    }
    templates = [reading.template for reading in read_templates(job, [pool] if pool else [])]
    asked = [template["spec"]["hostNetwork"] for template in templates if "hostNetwork" in template["spec"]]
    if asked and asked[-1]:
        rendered["spec"]["dnsPolicy"] = "ClusterFirstWithHostNet"  # otherwise the pod cannot resolve names of Services
    pod: Json = reduce(merge, templates, rendered)
    own = _own_labels(job, uid, number, pool) | spread_labels(job, group)
    pod["metadata"]["labels"] = {**(pod["metadata"].get("labels") or {}), **own}
    _own(pod["spec"], _own_env(name, pod["spec"], settings))
    place(pod["spec"], where)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": job.namespace,
            **pod["metadata"],
            "ownerReferences": [owner(job.name, uid)],
        },
        "spec": pod["spec"],
    }


def claim_name(job: JobSpec) -> str | None:
    """Return the name of the PersistentVolumeClaim for the job's checkpoints; None if the job uses none."""
    return job.checkpoint.claim if job.checkpoint else None


def _common_labels(job: JobSpec) -> Json:
    return {
        "app.kubernetes.io/name": "bamboo-worker",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/component": "worker",
        "app.kubernetes.io/part-of": "bamboo",
        "app.kubernetes.io/managed-by": MANAGED_BY,
    }


def _own_labels(job: JobSpec, uid: str, number: int, pool: NodePool | None) -> Json:
    labels = {
        names.LABEL_JOB_NAME: job.name,
        names.LABEL_JOB_UID: uid,
        names.LABEL_WORKER_INDEX: str(number),
    }
    if job.queue:
        labels[names.LABEL_QUEUE] = job.queue.name
    if job.queue and job.queue.priority_class:
        labels[names.LABEL_QUEUE_PRIORITY] = job.queue.priority_class
    if pool:
        labels |= {names.LABEL_CAPACITY_TYPE: pool.capacity.value, names.LABEL_NODE_POOL: pool.name}
    return labels


def owner(job: str, uid: str) -> Json:
    """Return the owner reference that lets Kubernetes delete an object with its BambooJob. job: the job's name."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": job,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def about_workers(job: JobSpec, uid: str) -> Json:
    """Return the metadata of a NetworkPolicy or PodDisruptionBudget for the workers of the job with this UID."""
    return {
        "name": f"bamboo-{uid}",
        "namespace": job.namespace,
        "labels": {"app.kubernetes.io/managed-by": MANAGED_BY, "app.kubernetes.io/instance": job.name},
        "ownerReferences": [owner(job.name, uid)],
    }


def _spec(job: JobSpec, uid: str, group: int, settings: WorkerPodSettings) -> Json:
    """Return the part of the pod's spec that the template may change."""
    user = {} if settings.run_as_user is None else {"runAsUser": settings.run_as_user}
    spec: Json = {
        "containers": [_container(job, settings)],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "terminationGracePeriodSeconds": names.GRACE_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, **user, "seccompProfile": {"type": "RuntimeDefault"}},
    }
    if (claim := claim_name(job)) is not None:
        spec["volumes"].append({"name": STORAGE_VOLUME, "persistentVolumeClaim": {"claimName": claim}})
        spec["securityContext"] |= {} if settings.run_as_user is None else {"fsGroup": settings.run_as_user}
    return spec | spread(job, uid, group)


def _container(job: JobSpec, settings: WorkerPodSettings) -> Json:
    env = {"HOME": "/tmp", "USER": "bamboo"}  # the user has no entry in /etc/passwd
    env[names.ENV_METRICS_PORT] = str(names.METRICS_PORT)
    storage = [{"name": STORAGE_VOLUME, "mountPath": names.STORAGE_FOLDER}] if claim_name(job) else []
    asked = {"limits": job.worker.resources.limits, "requests": job.worker.resources.requests}
    return {
        "name": names.TRAINER_CONTAINER,
        "image": job.worker.image or settings.image,
        "command": ["python", "-m", "bamboo_trainer"],
        "env": [{"name": name, "value": value} for name, value in env.items()],
        "resources": {kind: {n: str(q) for n, q in values.items()} for kind, values in asked.items() if values},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *storage],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }


def _own_env(name: WorkerId, spec: Json, settings: WorkerPodSettings) -> list[Json]:
    grace = spec.get("terminationGracePeriodSeconds")
    trusted = [{"name": names.ENV_CA, "value": settings.authority}] if settings.authority else []
    return [
        {"name": names.ENV_WORKER, "value": name},
        {"name": names.ENV_COORDINATOR, "value": settings.coordinator_url},
        {"name": names.ENV_TOKEN_FILE, "value": TOKEN_FILE},
        {"name": names.ENV_HOST, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": names.ENV_GRACE, "value": str(names.GRACE_SECONDS if grace is None else grace)},
        *trusted,
    ]


def _own(spec: Json, env: list[Json]) -> None:
    """Add restartPolicy, token, the trainer's `env` and, without hostNetwork, its metrics port to `spec`, in place."""
    token = {"audience": names.TOKEN_AUDIENCE, "expirationSeconds": names.TOKEN_SECONDS, "path": "token"}
    volume = {"name": TOKEN_VOLUME, "projected": {"sources": [{"serviceAccountToken": token}]}}
    mount = {"name": TOKEN_VOLUME, "mountPath": names.TOKEN_FOLDER, "readOnly": True}
    spec["restartPolicy"] = "Never"
    spec["volumes"] = [*(spec.get("volumes") or ()), volume]
    trainer = next(c for c in spec["containers"] if c["name"] == names.TRAINER_CONTAINER)
    trainer["env"] = [*env, *(trainer.get("env") or ())]  # first: others may refer to them
    trainer["volumeMounts"] = [*(trainer.get("volumeMounts") or ()), mount]
    ports = trainer.get("ports", [])
    if isinstance(ports, list) and not spec.get("hostNetwork"):  # with it, two workers could not share a node
        trainer["ports"] = [{"name": METRICS, "containerPort": names.METRICS_PORT}, *ports]


def network_policy(job: JobSpec, uid: str) -> dict[str, Any]:
    """Return the NetworkPolicy of a job's workers: they accept each other's connections, and any pod may read metrics.

    Between workers all ports are open, since a worker listens on any free one. Outgoing connections are not restricted.
    """
    workers = {"matchLabels": {LABEL_JOB_UID: uid}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": about_workers(job, uid),
        "spec": {
            "podSelector": workers,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": workers}]},
                {"from": [{"namespaceSelector": {}}], "ports": [{"protocol": "TCP", "port": METRICS_PORT}]},
            ],
        },
    }
