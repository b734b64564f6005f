"""Who may connect to a job's workers."""

from bamboo_core.job.spec import JobSpec
from bamboo_operator.manifests.network_policy import network_policy
from operator_kit import job


def test_only_workers_of_the_job_connect_to_its_workers_and_whoever_reads_metrics() -> None:
    spec: JobSpec = job()
    workers = {"matchLabels": {"bamboo.dev/job-uid": "uid-1"}}
    owner = {
        "apiVersion": "bamboo.dev/v1alpha1",
        "kind": "BambooJob",
        "name": spec.name,
        "uid": "uid-1",
        "controller": True,
        "blockOwnerDeletion": True,
    }
    assert network_policy(spec, "uid-1") == {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": "bamboo-uid-1",
            "namespace": spec.namespace,
            "labels": {"app.kubernetes.io/managed-by": "bamboo-operator", "app.kubernetes.io/instance": spec.name},
            "ownerReferences": [owner],
        },
        "spec": {
            "podSelector": workers,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": workers}]},
                {"from": [{"namespaceSelector": {}}], "ports": [{"protocol": "TCP", "port": 8080}]},
            ],
        },
    }
