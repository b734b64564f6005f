"""Marks by which clouds, autoscalers and termination handlers announce that a node or pod will go away. Data only.

Marks left out, because the worker may stay: a cordon, DeletionCandidateOfClusterAutoscaler, rebalance
recommendations without an action (they leave no mark), Azure's FreezeScheduled (a pause of seconds), pressure, startup
taints, and the conditions MaintenancePlanned and Drained (a pod left on a drained node is left on purpose).
Also left out are not-ready and unreachable: a node with a silent kubelet may well run a live worker, and heartbeats
detect a dead worker much earlier.
"""

from dataclasses import dataclass

AWS_SECONDS = 120.0
GCP_SECONDS = 30.0
AZURE_SECONDS = 30.0
SHUTDOWN_SECONDS = 15.0  # of a graceful node shutdown's 30 s, the part for pods that are not critical
OPENSHIFT_SECONDS = 30.0
DRAIN_SECONDS = 30.0  # an eviction gives a worker its grace period
SICK_SECONDS = 60.0  # a worker with a sick GPU hands over soon; repairs of the node wait longer

KARPENTER_DEADLINE = "karpenter.sh/nodeclaim-termination-timestamp"  # annotation: the time when the node goes by force
KARPENTER_CAPACITY = "karpenter.sh/capacity-type"
NTH_ACTION_TIME = "aws-node-termination-handler/action-time"  # label: when the handler acted, in seconds since 1970


@dataclass(frozen=True, slots=True)
class DisruptionMark:
    """A mark that a node will be taken away or is gone. source: a CamelCase reason. predicate: completes the
    sentence "node N ...".
    """

    source: str
    predicate: str
    seconds: float | None  # length of the notice; None: the node is gone


SHUTTING_DOWN = "node is shutting down"  # in the message of the condition Ready
SHUTDOWN = DisruptionMark("NodeShutdown", "is shutting down", SHUTDOWN_SECONDS)
DELETING = DisruptionMark("NodeDeleting", "is being deleted", DRAIN_SECONDS)
KARPENTER_TERMINATION = DisruptionMark("KarpenterTermination", "is being terminated by Karpenter", AWS_SECONDS)
SICK = DisruptionMark("GpuUnhealthy", "has a GPU or a link that is broken, according to NVSentinel", SICK_SECONDS)

_NTH = "aws-node-termination-handler/"
_GONE = None

TAINTS: dict[str, DisruptionMark] = {
    _NTH + "spot-itn": DisruptionMark("AwsSpotInterruption", "is being reclaimed by AWS", AWS_SECONDS),
    _NTH + "scheduled-maintenance": DisruptionMark(
        "AwsScheduledMaintenance", "has maintenance scheduled by AWS", AWS_SECONDS
    ),
    _NTH + "asg-lifecycle-termination": DisruptionMark(
        "AwsAsgTermination", "is terminated by its scaling group", AWS_SECONDS
    ),
    _NTH + "rebalance-recommendation": DisruptionMark(
        "AwsRebalanceRecommendation", "may soon be reclaimed by AWS", AWS_SECONDS
    ),
    "karpenter.sh/disrupted": DisruptionMark("KarpenterDisruption", "is disrupted by Karpenter", AWS_SECONDS),
    "cloud.google.com/impending-node-termination": DisruptionMark(
        "GkeImpendingTermination", "is about to be terminated by GCP", GCP_SECONDS
    ),
    "remediator.kubernetes.azure.com/unschedulable": DisruptionMark("AksAutoDrain", "is drained by AKS", AZURE_SECONDS),
    "remediator.aks.microsoft.com/unschedulable": DisruptionMark("AksAutoDrain", "is drained by AKS", AZURE_SECONDS),
    "cloudprovider.azure.microsoft.com/draining": DisruptionMark(
        "AzureSpotEviction", "is drained because Azure reclaims it", AZURE_SECONDS
    ),
    "ToBeDeletedByClusterAutoscaler": DisruptionMark(
        "ClusterAutoscalerScaleDown", "is removed by the cluster autoscaler", DRAIN_SECONDS
    ),
    "node.cloudprovider.kubernetes.io/shutdown": DisruptionMark(
        "NodeStopped", "is shut down, according to its cloud", _GONE
    ),
    "node.kubernetes.io/out-of-service": DisruptionMark("NodeOutOfService", "is out of service", _GONE),
    # NVSentinel's, by the default names of its rules
    "nvidia.com/gpu-xid-error": SICK,
    "nvidia.com/gpu-nvlink-error": SICK,
    "nvidia.com/syslog-xid-error": SICK,
    "nvidia.com/gpu-error": SICK,
}

# By (key, value), where the key alone does not decide
TAINTS_WITH_VALUE: dict[tuple[str, str], DisruptionMark] = {
    ("karpenter.sh/disruption", "disrupting"): DisruptionMark(
        "KarpenterDisruption", "is disrupted by Karpenter", AWS_SECONDS
    ),  # before Karpenter 1.0
}

# By (type, reason) of a condition that is True. Azure's message has the time of the event; see `signals`.
CONDITIONS: dict[tuple[str, str], DisruptionMark] = {
    ("VMEventScheduled", "PreemptScheduled"): DisruptionMark(
        "AzurePreempt", "is being reclaimed by Azure", AZURE_SECONDS
    ),
    ("VMEventScheduled", "TerminateScheduled"): DisruptionMark("AzureTerminate", "is to be terminated by Azure", 300.0),
    ("VMEventScheduled", "RedeployScheduled"): DisruptionMark("AzureRedeploy", "is to be redeployed by Azure", 600.0),
    ("VMEventScheduled", "RebootScheduled"): DisruptionMark("AzureReboot", "is to be rebooted by Azure", 900.0),
    ("PreemptionScheduled", "SpotEvictionIncoming"): DisruptionMark(
        "AzureSpotEviction", "is being reclaimed by Azure", AZURE_SECONDS
    ),
    # The same on every cloud, though AWS would give more time than the others
    ("Terminating", "TerminationRequested"): DisruptionMark(
        "OpenShiftTermination", "is about to be terminated by its cloud", OPENSHIFT_SECONDS
    ),
}

# By the type of a condition that is True, whatever its reason
CONDITION_TYPES: dict[str, DisruptionMark] = {
    # Kubernetes' own since 1.37, set by tools that drain or maintain nodes
    "GracefulNodeShutdownInProgress": SHUTDOWN,
    "DrainInProgress": DisruptionMark("NodeDrain", "is being drained", DRAIN_SECONDS),
    "MaintenanceInProgress": DisruptionMark("NodeMaintenance", "is under maintenance", DRAIN_SECONDS),
    # NVSentinel's, which are True only for fatal errors
    "CSPMaintenance": DisruptionMark("CloudMaintenance", "has maintenance scheduled by its cloud", SICK_SECONDS),
    **dict.fromkeys(
        (
            "GpuMemWatch",
            "GpuThermalWatch",
            "GpuPcieWatch",
            "GpuPowerWatch",
            "GpuInforomWatch",
            "GpuSmWatch",
            "GpuNvlinkWatch",
            "GpuMcuWatch",
            "GpuPmuWatch",
            "GpuDriverWatch",
            "SysLogsXIDError",
            "SysLogsSXIDError",
            "SysLogsGPUFallenOff",
            "NVSwitchFatalError",
            "NVSwitchDown",
        ),
        SICK,
    ),
}

LABELS: dict[tuple[str, str], DisruptionMark] = {
    ("cloud.google.com/active-node-maintenance", "ONGOING"): DisruptionMark(
        "GkeMaintenance", "is under maintenance by GCP", GCP_SECONDS
    ),
}

TARGETED = ("DisruptionTarget", "TerminationTarget")  # conditions of a pod to be removed: Kubernetes' and Kueue's

# Reasons of these conditions, and of a failed pod's status, that are not the worker's fault
DISRUPTIONS: dict[str, str] = {
    "PreemptionByScheduler": "is preempted by a pod of higher priority",
    "DeletionByTaintManager": "is deleted because of a taint of its node",
    "DeletionByDeviceTaintManager": "is deleted because of a taint of its device",
    "EvictionByEvictionAPI": "is evicted",
    "DeletionByPodGC": "is removed because its node is gone",
    "TerminationByKubelet": "is terminated by its node",
    "NodeShutdown": "was terminated by the shutdown of its node",
    "Shutdown": "was terminated by the shutdown of its node",
    "Terminated": "was terminated by the shutdown of its node",
    "Evicted": "was evicted by its node",
    "Preempting": "was terminated in favour of a critical pod",
    "Preempted": "was preempted by a pod of higher priority",
    "NodeLost": "was on a node that is lost",
    "WorkloadEvictedDueToPreempted": "is preempted by Kueue in favour of another workload",
    "WorkloadEvictedDueToPodsReadyTimeout": "is deleted by Kueue, because it was not ready in time",
    "WorkloadEvictedDueToClusterQueueStopped": "is deleted by Kueue, because its queue is drained",
    "WorkloadEvictedDueToLocalQueueStopped": "is deleted by Kueue, because its queue is drained",
}
GONE_WITH_NODE = "DeletionByPodGC"
