"""Findings of a diagnosis: one sentence for each check, and what to do about it."""

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """OK: all is well. UNKNOWN: it could not be checked. WARNING: jobs train, but not as well as they could. PROBLEM:
    jobs, or this job, do not train.
    """

    OK = "ok"
    UNKNOWN = "unknown"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of a check. subject: what was checked, such as operator. advice: what to do, "" if nothing."""

    severity: Severity
    subject: str
    message: str
    advice: str = ""


def ok(subject: str, message: str) -> Finding:
    return Finding(severity=Severity.OK, subject=subject, message=message)


def unknown(subject: str, message: str, advice: str = "") -> Finding:
    return Finding(severity=Severity.UNKNOWN, subject=subject, message=message, advice=advice)


def warning(subject: str, message: str, advice: str) -> Finding:
    return Finding(severity=Severity.WARNING, subject=subject, message=message, advice=advice)


def problem(subject: str, message: str, advice: str) -> Finding:
    return Finding(severity=Severity.PROBLEM, subject=subject, message=message, advice=advice)
