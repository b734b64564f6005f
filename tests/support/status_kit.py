"""Builders of job statuses as the API has them."""

from bamboo_core.coordinator.events import Finish, Outcome, WorkerState
from bamboo_core.job.api_object import written
from bamboo_core.job.status import read_status
from bamboo_operator.status.document import job_status
from bamboo_operator.status.facts import StatusFacts
from operator_kit import NOW, job, said

JOB = job()


POOLED = job(
    nodePools=[
        {"name": "spot", "pricePerHour": "0.91"},
        {"name": "fallback", "capacity": "OnDemand", "pricePerHour": "3.06", "afterSeconds": 300},
    ]
)


DONE = Finish(Outcome.COMPLETE, "Complete", "all 10 steps are done")
FAILED = Finish(Outcome.FAILED, "TaskFailed", "w0: it raised")
INTERRUPTED = Finish(Outcome.INTERRUPTED, "Suspended", "the job is suspended")
RUNNING = said()
BUSY = (("w0", WorkerState.TRAINING), ("w1", WorkerState.TRAINING))
DOUBLED = ((("w0", False), ("w0", False)),)


def facts(**more):
    return StatusFacts(**{"now": NOW, "generation": 1, "spec": JOB, **more})


def conditions(status):
    return {c["type"]: c for c in status["conditions"]}


def holding(status):
    return {c["type"]: c["reason"] for c in status["conditions"] if c["status"] == "True"}


def seen(status=None, previous=None, **more):
    """Return the status that the operator writes. status: the coordinator's, if one runs. previous: the one before."""
    return written(job_status(status, read_status(previous), facts(**more)))
