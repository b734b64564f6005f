"""What a diagnosis says: one sentence for each thing that was looked at, and what to do about it."""

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """OK: as it should be. UNKNOWN: it could not be looked at. WARNING: jobs train, but not as well as they could.
    PROBLEM: jobs do not train, or not this one.
    """

    OK = "ok"
    UNKNOWN = "unknown"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """subject: what was looked at, such as operator. advice: what to do, "" where nothing is to be done."""

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
