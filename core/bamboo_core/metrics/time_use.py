"""The uses of a worker's time in its metrics, and a table of the use of each span. Standard library only."""

from enum import StrEnum


class TimeUse(StrEnum):
    """A use of a worker's time. REHEARSAL: trial runs and checks while the worker waits. IDLE: all other waiting."""

    FORWARD = "forward"
    BACKWARD = "backward"
    REHEARSAL = "rehearsal"
    REDUCTION = "reduction"
    SYNC_COMMIT = "sync_commit"
    OPTIMIZER = "optimizer"
    REPLICA_UPDATE = "replica_update"
    IDLE = "idle"


TIME_USE_OF_SPAN = {
    "Forward": TimeUse.FORWARD,
    "Evaluate": TimeUse.FORWARD,
    "Backward": TimeUse.BACKWARD,
    "BackwardInput": TimeUse.BACKWARD,
    "BackwardWeight": TimeUse.BACKWARD,
    "BackwardRest": TimeUse.BACKWARD,
    "Rehearsal": TimeUse.REHEARSAL,
    "SpotCheck": TimeUse.REHEARSAL,
    "SendPartialSum": TimeUse.REDUCTION,
    "AddPartialSums": TimeUse.REDUCTION,
    "ScatterGradients": TimeUse.REDUCTION,
    "ReduceGradients": TimeUse.REDUCTION,
    "GatherGradients": TimeUse.REDUCTION,
    "ExchangeTied": TimeUse.REDUCTION,
    "SumTied": TimeUse.REDUCTION,
    "SyncReplicas": TimeUse.SYNC_COMMIT,
    "ReportReady": TimeUse.SYNC_COMMIT,
    "OptimizerStep": TimeUse.OPTIMIZER,
    "ReplicaUpdate": TimeUse.REPLICA_UPDATE,
    "Wait": TimeUse.IDLE,
}  # by the engine's name of the span
