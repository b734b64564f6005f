"""The network policy of a job's workers: only other workers and readers of metrics may connect."""

from typing import Any

from bamboo_core.job.spec import JobSpec
from bamboo_core.names import LABEL_JOB_UID, METRICS_PORT
from bamboo_operator.manifests.worker_pod import about_workers


def network_policy(job: JobSpec, uid: str) -> dict[str, Any]:
    """Return the policy for a job's workers.

    Between workers all ports are open, since each uses any free one. Outgoing connections are not restricted.
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
