"""Resources shared by all jobs of an operator."""

import asyncio
from dataclasses import dataclass, field

from bamboo_core.kube.api import KubeApi
from bamboo_operator.auth.pod_tokens import TokenReviewer
from bamboo_operator.auth.worker_gateway import WorkerGateway
from bamboo_operator.cluster.indices import ClusterIndices
from bamboo_operator.jobs.meter import OperatorCounts
from bamboo_operator.jobs.reconcile_schedule import Burst
from bamboo_operator.manifests.worker_pod import WorkerPodSettings
from bamboo_operator.pods.queueing import QuotaHolders
from bamboo_operator.signals.node_marks import NodeMark

RECONCILES_AT_ONCE = 4
STATUSES_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedResources:
    """Resources shared by all jobs.

    key: the operator's key, from which job secrets derive. url: ws://HOST:PORT, or wss:, at which workers reach the
    operator. namespaces: watched namespaces; all if empty. turns: semaphore for reconciliations, which may make many
    API calls. status_turns: semaphore for writes of a status.
    """

    cluster: ClusterIndices
    gateway: WorkerGateway
    api: KubeApi
    reviews: TokenReviewer
    key: bytes
    url: str
    settings: WorkerPodSettings
    namespaces: tuple[str, ...] = ()
    marks: tuple[NodeMark, ...] = ()
    counts: OperatorCounts = field(default_factory=OperatorCounts)
    burst: Burst = field(default_factory=Burst)
    quota_holders: QuotaHolders = field(default_factory=QuotaHolders)
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(RECONCILES_AT_ONCE))
    status_turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(STATUSES_AT_ONCE))
