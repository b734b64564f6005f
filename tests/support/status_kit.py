"""Jobs' statuses."""

from bamboo_core.job.api_object import written
from bamboo_core.job.status import read_status
from bamboo_operator.status.document import job_status
from bamboo_operator.status.facts import StatusFacts
from operator_kit import NOW, job

JOB = job()


POOLED = job(
    nodePools=[
        {"name": "spot", "pricePerHour": "0.91"},
        {"name": "fallback", "capacity": "OnDemand", "pricePerHour": "3.06", "afterSeconds": 300},
    ]
)


def facts(**more):
    return StatusFacts(**{"now": NOW, "generation": 1, "spec": JOB, **more})


def conditions(status):
    return {c["type"]: c for c in status["conditions"]}


def holding(status):
    return {c["type"]: c["reason"] for c in status["conditions"] if c["status"] == "True"}


def seen(status=None, previous=None, **more):
    """The status as the API has it, after that previous one."""
    return written(job_status(status, read_status(previous), facts(**more)))
