"""Who may connect to a job's workers: the other workers of the job, and whoever reads their metrics."""

from typing import Any

from bamboo_core.job.spec import JobSpec
from bamboo_core.names import LABEL_JOB_UID, METRICS_PORT
from bamboo_operator.manifests.worker_pod import JobMeta, about_workers


def network_policy(job: JobSpec, meta: JobMeta) -> dict[str, Any]:
    """The policy for a job's workers. Between workers any port is open: each takes one that is free. What workers
    connect to is not restricted.
    """
    workers = {"matchLabels": {LABEL_JOB_UID: meta.uid}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": about_workers(job, meta),
        "spec": {
            "podSelector": workers,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": workers}]},
                {"from": [{"namespaceSelector": {}}], "ports": [{"protocol": "TCP", "port": METRICS_PORT}]},
            ],
        },
    }
