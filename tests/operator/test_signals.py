"""Signals about a worker from its node and pod: every cloud's marks, and marks that are no signal."""

from datetime import timedelta
from email.utils import format_datetime

import pytest

from bamboo_operator.signals.cloud_marks import CONDITION_TYPES, CONDITIONS, LABELS, TAINTS, TAINTS_WITH_VALUE
from bamboo_operator.signals.signals import (
    SignalKind,
    node_signal,
    pod_signal,
    worker_exit,
    worker_signal,
)
from operator_kit import NOW, at, node, pod

NTH = "aws-node-termination-handler/"
DEADLINE = "karpenter.sh/nodeclaim-termination-timestamp"


def condition(kind, reason, message="", status="True"):
    return {"type": kind, "status": status, "reason": reason, "message": message}


NOTICES = [
    (node(taints={NTH + "spot-itn": "e1"}), "AwsSpotInterruption", 120),
    (node(taints={NTH + "scheduled-maintenance": "e1"}), "AwsScheduledMaintenance", 120),
    (node(taints={NTH + "asg-lifecycle-termination": "e1"}), "AwsAsgTermination", 120),
    (node(taints={NTH + "rebalance-recommendation": "e1"}), "AwsRebalanceRecommendation", 120),
    (node(taints={NTH + "spot-itn": "e1"}, effect="PreferNoSchedule"), "AwsSpotInterruption", 120),
    (node(taints={"karpenter.sh/disrupted": ""}), "KarpenterDisruption", 120),
    (node(taints={"cloud.google.com/impending-node-termination": ""}), "GkeImpendingTermination", 30),
    (node(labels={"cloud.google.com/active-node-maintenance": "ONGOING"}), "GkeMaintenance", 30),
    (node(taints={"remediator.aks.microsoft.com/unschedulable": ""}), "AksAutoDrain", 30),
    (node(taints={"remediator.kubernetes.azure.com/unschedulable": ""}), "AksAutoDrain", 30),
    (node(taints={"karpenter.sh/disruption": "disrupting"}), "KarpenterDisruption", 120),
    (node(conditions=(condition("Terminating", "TerminationRequested"),)), "OpenShiftTermination", 30),
    (node(taints={"cloudprovider.azure.microsoft.com/draining": "spot-eviction"}), "AzureSpotEviction", 30),
    (node(taints={"ToBeDeletedByClusterAutoscaler": "1700000000"}), "ClusterAutoscalerScaleDown", 30),
    (node(conditions=(condition("VMEventScheduled", "PreemptScheduled"),)), "AzurePreempt", 30),
    (node(conditions=(condition("VMEventScheduled", "TerminateScheduled"),)), "AzureTerminate", 300),
    (node(conditions=(condition("VMEventScheduled", "RedeployScheduled"),)), "AzureRedeploy", 600),
    (node(conditions=(condition("VMEventScheduled", "RebootScheduled"),)), "AzureReboot", 900),
    (node(conditions=(condition("PreemptionScheduled", "SpotEvictionIncoming"),)), "AzureSpotEviction", 30),
    (
        node(conditions=(condition("Ready", "KubeletNotReady", "node is shutting down", "False"),)),
        "NodeShutdown",
        15,
    ),
    (node(deleted=at(-3)), "NodeDeleting", 30),
    (node(conditions=(condition("GracefulNodeShutdownInProgress", "Shutdown"),)), "NodeShutdown", 15),
    (node(conditions=(condition("DrainInProgress", "KubectlDrain"),)), "NodeDrain", 30),
    (node(conditions=(condition("MaintenanceInProgress", "Firmware"),)), "NodeMaintenance", 30),
    (node(conditions=(condition("CSPMaintenance", "Scheduled"),)), "CloudMaintenance", 60),
    (node(conditions=(condition("GpuMemWatch", "GpuMemWatchIsNotHealthy"),)), "GpuUnhealthy", 60),
    (node(conditions=(condition("SysLogsXIDError", "79", "[79] fallen off the bus"),)), "GpuUnhealthy", 60),
    (node(conditions=(condition("NVSwitchDown", "Down"),)), "GpuUnhealthy", 60),
    (node(taints={"nvidia.com/gpu-xid-error": "true"}), "GpuUnhealthy", 60),
    (node(taints={"nvidia.com/gpu-error": "true"}), "GpuUnhealthy", 60),
    (node(taints={"nvidia.com/gpu-error": "true", NTH + "spot-itn": "e1"}), "GpuUnhealthy", 60),
]

PREEMPTED_NOW = condition("VMEventScheduled", "PreemptScheduled", f"Preempt: {format_datetime(NOW, usegmt=True)}")
LONGER = {"bamboo.dev/notice-seconds": "120"}
NOTICES += [
    (node(taints={"cloud.google.com/impending-node-termination": ""}, labels=LONGER), "GkeImpendingTermination", 120),
    (
        node(conditions=(condition("Ready", "KubeletNotReady", "node is shutting down", "False"),), labels=LONGER),
        "NodeShutdown",
        120,
    ),
    (
        node(
            conditions=(PREEMPTED_NOW,),
            labels=LONGER,
        ),
        "AzurePreempt",
        5,
    ),  # which says when
    (
        node(taints={"cloud.google.com/impending-node-termination": ""}, labels={"bamboo.dev/notice-seconds": "2m"}),
        "GkeImpendingTermination",
        30,
    ),
]

LOST = [
    (node(taints={"node.kubernetes.io/out-of-service": "nodeshutdown"}, effect="NoExecute"), "NodeOutOfService"),
    (node(taints={"node.cloudprovider.kubernetes.io/shutdown": ""}, labels=LONGER), "NodeStopped"),
    (node(taints={NTH + "spot-itn": "", "node.kubernetes.io/out-of-service": ""}), "NodeOutOfService"),
]

NOTHING = [
    {},
    node(taints={"karpenter.sh/disruption": "scheduled"}),
    node(conditions=(condition("Terminating", "TerminationRequested", status="False"),)),
    node(conditions=(condition("Terminating", "Maintenance"),)),
    {"metadata": {"name": "n1"}, "spec": {"unschedulable": True}},
    node(),
    *(
        node(taints={key: ""}, effect=effect)
        for key, effect in [
            ("node.kubernetes.io/unschedulable", "NoSchedule"),
            ("node.kubernetes.io/not-ready", "NoExecute"),
            ("node.kubernetes.io/unreachable", "NoExecute"),
            ("node.kubernetes.io/memory-pressure", "NoSchedule"),
            ("node.kubernetes.io/disk-pressure", "NoSchedule"),
            ("node.kubernetes.io/pid-pressure", "NoSchedule"),
            ("node.kubernetes.io/network-unavailable", "NoSchedule"),
            ("node.cloudprovider.kubernetes.io/uninitialized", "NoSchedule"),
            ("DeletionCandidateOfClusterAutoscaler", "PreferNoSchedule"),
            ("karpenter.sh/unregistered", "NoExecute"),
            ("cloud.google.com/gke-spot", "NoSchedule"),
            ("kubernetes.azure.com/scalesetpriority", "NoSchedule"),
            ("startup-taint.cluster-autoscaler.kubernetes.io/x", "NoSchedule"),
        ]
    ),
    node(conditions=(condition("Ready", "NodeStatusUnknown", "Kubelet stopped posting node status.", "Unknown"),)),
    node(conditions=(condition("Ready", "KubeletNotReady", "container runtime is down", "False"),)),
    node(conditions=(condition("MemoryPressure", "KubeletHasInsufficientMemory"),)),
    node(conditions=(condition("VMEventScheduled", "FreezeScheduled"),)),
    node(conditions=(condition("VMEventScheduled", "PreemptScheduled", status="False"),)),
    node(labels={"cloud.google.com/active-node-maintenance": "NONE", "cloud.google.com/gke-spot": "true"}),
    node(labels={NTH + "action-time": "1700000000"}),
    node(conditions=(condition("MaintenancePlanned", "Firmware"), condition("Drained", "KubectlDrain"))),
    node(conditions=(condition("DrainInProgress", "KubectlDrain", status="False"),)),
    node(conditions=(condition("GpuMemWatch", "GpuMemWatchIsHealthy", status="False"),)),
    node(conditions=(condition("NVSwitchNonFatalError", "Warning"),)),
    node(taints={"nvidia.com/gpu": "present"}),
]


@pytest.mark.parametrize(("given", "source", "seconds"), NOTICES)
def test_a_node_that_will_go_gives_notice(given, source, seconds):
    signal = node_signal(given, NOW)
    assert (signal.kind, signal.source, signal.seconds) == (SignalKind.NOTICE, source, seconds)
    assert signal.message.startswith("node n1 ")
    assert signal.exit_code is None


@pytest.mark.parametrize(("given", "source"), LOST)
def test_a_node_that_is_gone_is_lost(given, source):
    signal = node_signal(given, NOW)
    assert (signal.kind, signal.source, signal.seconds) == (SignalKind.LOST, source, 0)


@pytest.mark.parametrize("given", NOTHING)
def test_marks_of_an_ordinary_node_are_no_signal(given):
    assert node_signal(given, NOW) is None


def test_every_mark_of_the_tables_is_tried():
    tried = {source for _, source, _ in NOTICES} | {source for _, source in LOST}
    assert {
        mark.source
        for table in (TAINTS, TAINTS_WITH_VALUE, CONDITIONS, CONDITION_TYPES, LABELS)
        for mark in table.values()
    } <= tried


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (node(annotations={DEADLINE: at(90)}), 90),
        (node(annotations={DEADLINE: at(600)}, taints={"karpenter.sh/disrupted": ""}), 600),
        (node(annotations={DEADLINE: at(600)}, taints={"karpenter.sh/disruption": "disrupting"}), 600),
        (node(annotations={DEADLINE: at(600)}, labels={"karpenter.sh/capacity-type": "spot"}), 120),
        (node(annotations={DEADLINE: at(40)}, labels={"karpenter.sh/capacity-type": "spot"}, deleted=at(-1)), 40),
        (node(annotations={DEADLINE: at(-40)}), 5),
        (node(annotations={DEADLINE: "soon"}, taints={"karpenter.sh/disrupted": ""}), 120),
        (node(taints={NTH + "spot-itn": ""}, labels={NTH + "action-time": str(int(NOW.timestamp()) - 50)}), 70),
        (node(taints={NTH + "spot-itn": ""}, labels={NTH + "action-time": "1000"}), 5),
        (node(taints={NTH + "spot-itn": ""}, labels={NTH + "action-time": "?"}), 120),
        (node(taints={NTH + "spot-itn": "", "cloud.google.com/impending-node-termination": ""}), 30),
        (
            node(
                conditions=(
                    condition(
                        "VMEventScheduled",
                        "TerminateScheduled",
                        "Terminate Scheduled: Sun, 01 Mar 2026 12:04:00 GMT. EventId: 1",
                    ),
                )
            ),
            240,
        ),
        (
            node(
                conditions=(
                    condition(
                        "PreemptionScheduled",
                        "SpotEvictionIncoming",
                        "Preempt Scheduled: Sun, 01 Mar 2026 12:00:25 UTC. Duration: -1. EventId: 1",
                    ),
                )
            ),
            25,
        ),
        (node(conditions=(condition("VMEventScheduled", "PreemptScheduled", "Xxx, 99 Xxx 2026 12:00:25 UTC"),)), 30),
    ],
)
def test_the_time_that_a_node_carries_counts(given, seconds):
    signal = node_signal(given, NOW)
    assert (signal.kind, signal.seconds) == (SignalKind.NOTICE, seconds)


PREEMPTED = "WorkloadEvictedDueToPreempted"


def preempted(**pod_of):
    """Return a pod with the condition that Kueue sets when it preempts a pod."""
    return pod(target=PREEMPTED, target_at=at(-9), condition="TerminationTarget", **pod_of)


@pytest.mark.parametrize(
    ("given", "source", "seconds"),
    [
        (pod(deleted=at(12)), "PodDeleted", 12),
        (pod(deleted=at(-12)), "PodDeleted", 0),
        (pod(target="PreemptionByScheduler", target_at=at(-1)), "PreemptionByScheduler", 30),
        (pod(target="DeletionByTaintManager", deleted=at(20)), "DeletionByTaintManager", 20),
        (pod(target="EvictionByEvictionAPI", deleted=at(20)), "EvictionByEvictionAPI", 20),
        (pod(target="DeletionByDeviceTaintManager", deleted=at(20)), "DeletionByDeviceTaintManager", 20),
        (pod(target="TerminationByKubelet"), "TerminationByKubelet", 30),
        (pod(phase="Pending", deleted=at(0)), "PodDeleted", 0),
        (preempted(), PREEMPTED, 30),
        (preempted(deleted=at(20)), PREEMPTED, 20),
        (pod(target="WorkloadDeleted", condition="TerminationTarget"), "WorkloadDeleted", 30),
    ],
)
def test_a_pod_that_will_go_gives_notice(given, source, seconds):
    signal = pod_signal(given, NOW)
    assert (signal.kind, signal.source, signal.seconds) == (SignalKind.NOTICE, source, seconds)
    assert signal.message.startswith("pod tiny-w3 ")


def died(code, **more):
    return {"exitCode": code, "reason": "Error", "finishedAt": at(-5), **more}


@pytest.mark.parametrize(
    ("given", "source"),
    [
        (pod(phase="Failed", reason="NodeShutdown", ended=died(137)), "NodeShutdown"),
        (pod(phase="Failed", reason="Terminated", message="Pod was terminated in response to…"), "Terminated"),
        (pod(phase="Failed", reason="Evicted", message="The node was low on resource: memory."), "Evicted"),
        (pod(phase="Failed", reason="Preempting", ended=died(143)), "Preempting"),
        (pod(phase="Failed", reason="OutOfnvidia.com/gpu", message="Node didn't have enough"), "OutOfnvidia.com/gpu"),
        (pod(phase="Failed"), "PodFailed"),
        (pod(phase="Failed", target="TerminationByKubelet", target_at=at(-9), ended=died(1)), "TerminationByKubelet"),
        (pod(phase="Succeeded", deleted=at(20), ended=died(0)), "PodDeleted"),
        (pod(target="DeletionByPodGC", target_at=at(-1)), "DeletionByPodGC"),
        (preempted(phase="Failed", deleted=at(20), ended=died(143)), PREEMPTED),
        (preempted(phase="Failed", ended=died(1)), PREEMPTED),
    ],
)
def test_a_pod_lost_to_a_disruption_has_no_exit_code(given, source):
    signal = pod_signal(given, NOW)
    assert (signal.kind, signal.source, signal.exit_code) == (SignalKind.LOST, source, None)


@pytest.mark.parametrize(
    ("given", "source", "code", "text"),
    [
        (pod(phase="Failed", ended=died(1)), "ContainerFailed", 1, "exited with code 1"),
        (pod(ended=died(1)), "ContainerFailed", 1, "exited with code 1"),
        (
            pod(phase="Failed", ended=died(1, message="Traceback:\n  x\nValueError: bad\n")),
            "ContainerFailed",
            1,
            "exited with code 1: ValueError: bad",
        ),
        (pod(phase="Succeeded", ended=died(0, message="bye")), "ContainerCompleted", 0, "exited with code 0"),
        (
            pod(phase="Failed", ended=died(137, reason="OOMKilled")),
            "OOMKilled",
            137,
            "ran out of memory and was killed (OOMKilled, exit code 137)",
        ),
        (pod(phase="Failed", ended=died(137)), "ContainerFailed", 137, "was ended by SIGKILL (exit code 137)"),
        (pod(phase="Failed", ended=died(1), deleted=at(25)), "PodDeleted", None, ""),
        (pod(phase="Failed", ended=died(1), deleted=at(26)), "ContainerFailed", 1, "exited with code 1"),
        (
            pod(phase="Failed", ended=died(2), target="DeletionByTaintManager", target_at=at(-1)),
            "ContainerFailed",
            2,
            "exited with code 2",
        ),
        (
            pod(phase="Failed", reason="Evicted", message='Usage of EmptyDir volume "tmp" exceeds the limit "1Gi".'),
            "Evicted",
            137,
            'failed with its pod: Evicted: Usage of EmptyDir volume "tmp" exceeds the limit "1Gi".',
        ),
        (
            pod(phase="Failed", init=died(3)),
            "ContainerFailed",
            3,
            "could not start: init container prepare exited with code 3",
        ),
    ],
)
def test_a_worker_that_ends_by_itself_has_an_exit_code(given, source, code, text):
    signal = pod_signal(given, NOW)
    assert (signal.kind, signal.source, signal.exit_code) == (SignalKind.LOST, source, code)
    if code is not None:
        assert signal.message == text
        assert worker_exit(given) == (code, text)


NO_TARGET = pod()
NO_TARGET["status"]["conditions"] = [condition("DisruptionTarget", "PreemptionByScheduler", status="False")]


@pytest.mark.parametrize("given", [{}, pod(), pod(phase="Pending"), pod(phase="Unknown"), {"status": None}, NO_TARGET])
def test_a_pod_that_lives_says_nothing(given):
    assert pod_signal(given, NOW) is None
    assert worker_exit(given) is None


SPOT = node(taints={NTH + "spot-itn": "e1"})
EARLIER = NOW - timedelta(seconds=300)


@pytest.mark.parametrize(
    ("of_pod", "of_node", "now", "source", "seconds", "code"),
    [
        (pod(), SPOT, NOW, "AwsSpotInterruption", 120, None),
        (pod(deleted=at(12)), SPOT, NOW, "PodDeleted", 12, None),
        (pod(deleted=at(12)), SPOT, EARLIER, "AwsSpotInterruption", 120, None),
        (pod(deleted=at(12)), LOST[0][0], NOW, "NodeOutOfService", 0, None),
        (pod(phase="Failed", ended=died(1)), SPOT, NOW, "ContainerFailed", 0, 1),
        (pod(phase="Failed", ended=died(137)), SPOT, NOW, "AwsSpotInterruption", 0, None),  # killed with its node
        (pod(phase="Failed", ended=died(143)), SPOT, NOW, "AwsSpotInterruption", 0, None),
        (pod(phase="Failed", ended=died(137, reason="OOMKilled")), SPOT, NOW, "OOMKilled", 0, 137),
    ],
)
def test_the_worse_signal_of_pod_and_node_counts(of_pod, of_node, now, source, seconds, code):
    signal = worker_signal(of_pod, of_node, now)
    assert (signal.source, signal.seconds, signal.exit_code) == (source, seconds, code)


@pytest.mark.parametrize("of_node", [None, node()])
def test_a_running_pod_on_an_ordinary_node_gives_no_signal(of_node):
    assert worker_signal(pod(), of_node, NOW) is None
