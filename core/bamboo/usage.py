"""What a worker's time goes to: the kinds that traces, metrics and summaries tell apart. Standard library only."""

from enum import StrEnum


class Kind(StrEnum):
    """IDLE: it waited. Whatever is none of these is `other`."""

    FORWARD = "forward"
    BACKWARD = "backward"
    REDUNDANT_FORWARD = "redundant_forward"
    REDUNDANT_BACKWARD = "redundant_backward"
    REHEARSAL = "rehearsal"
    REDUCTION = "reduction"
    SYNC_COMMIT = "sync_commit"
    OPTIMIZER = "optimizer"
    REPLICA_UPDATE = "replica_update"
    IDLE = "idle"


KINDS = {
    "Forward": Kind.FORWARD,
    "Backward": Kind.BACKWARD,
    "RedundantForward": Kind.REDUNDANT_FORWARD,
    "RedundantBackward": Kind.REDUNDANT_BACKWARD,
    "Rehearsal": Kind.REHEARSAL,
    "ScatterGradients": Kind.REDUCTION,
    "ReduceGradients": Kind.REDUCTION,
    "GatherGradients": Kind.REDUCTION,
    "ExchangeTied": Kind.REDUCTION,
    "SumTied": Kind.REDUCTION,
    "SyncReplicas": Kind.SYNC_COMMIT,
    "ReportReady": Kind.SYNC_COMMIT,
    "OptimizerStep": Kind.OPTIMIZER,
    "ReplicaUpdate": Kind.REPLICA_UPDATE,
    "Wait": Kind.IDLE,
}  # by what the engine calls it
REDUNDANT = (Kind.REDUNDANT_FORWARD, Kind.REDUNDANT_BACKWARD, Kind.REHEARSAL)
