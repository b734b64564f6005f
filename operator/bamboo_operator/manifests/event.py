"""The Kubernetes event that reports a decision to a job's user."""

from datetime import datetime

from bamboo_core.coordinator.events import Emit
from bamboo_core.kube.api import Object
from bamboo_core.names import API_VERSION, KIND
from bamboo_operator.kube.objects import JobIdentity, api_time

COMPONENT = "bamboo-operator"


def event(job: JobIdentity, emit: Emit, now: datetime) -> Object:
    namespace, name = job.key
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{name[:200]}.", "namespace": namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "namespace": namespace,
            "name": name,
            "uid": job.uid,
        },
        "reason": emit.reason[:128],
        "message": emit.message[:1000],
        "type": "Warning" if emit.warning else "Normal",
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": COMPONENT,
        "firstTimestamp": api_time(now),
        "lastTimestamp": api_time(now),
        "count": 1,
    }
