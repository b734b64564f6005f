"""`doctor`: what may keep a job from starting, one line each, with advice."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bamboo.remote.diagnosis.facts import ClusterFacts, Object
from bamboo.remote.diagnosis.findings import Finding, Severity
from bamboo.remote.diagnosis.installation_checks import installation
from bamboo.remote.diagnosis.job_checks import job
from bamboo.remote.diagnosis.reading import read_facts
from bamboo.remote.session import Session, Target, names_file
from bamboo.terminal.output_format import OutputFormat
from bamboo_core.job.fields import ManifestError
from bamboo_core.job.manifest import parse_manifest, read_manifest
from bamboo_core.kube.errors import UsageError
from bamboo_core.names import EXIT_FAILED, EXIT_OK
from bamboo_core.text import count

STYLES: Final = {
    Severity.OK: "green",
    Severity.UNKNOWN: "dim",
    Severity.WARNING: "yellow",
    Severity.PROBLEM: "bold red",
}


async def doctor(
    session: Session, target: Target | None, file: Object | None, *, operator_namespace: str | None, form: OutputFormat
) -> int:
    """Print the diagnosis; return EXIT_FAILED if there is a problem.

    target: the job to check as well. file: its manifest; None if it is on the cluster.
    """
    of_namespace, spec = session.namespace, None
    if target is not None:
        of_namespace, name = session.of(target)
        try:
            spec = parse_manifest(file or await session.api.job(of_namespace, name))
        except ManifestError as error:
            raise UsageError(str(error)) from None
    findings = diagnosis(await read_facts(session.api, of_namespace, operator_namespace, spec), datetime.now(UTC))
    if form is OutputFormat.JSON:
        print(json.dumps([asdict(one) for one in findings], indent=2))
    else:
        session.console.print(rendered(findings))
    return EXIT_FAILED if any(one.severity is Severity.PROBLEM for one in findings) else EXIT_OK


def manifest_of_file(given: str | None) -> Object | None:
    """Return the manifest in a file; None for a job's name or nothing. Raises UsageError."""
    if given is None or not names_file(given):
        return None
    try:
        return read_manifest(given)[1]
    except ManifestError as error:
        raise UsageError(str(error)) from None


def diagnosis(facts: ClusterFacts, now: datetime) -> tuple[Finding, ...]:
    """Return all findings, in the order in which a user would look."""
    return (*installation(facts, now), *job(facts))


def rendered(findings: Sequence[Finding]) -> RenderableType:
    """Return a table of the findings, each with its advice below it, and the number of problems and warnings."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in findings:
        text = Text(one.message)
        if one.advice:
            text.append(f"\n{one.advice}", style="italic")
        table.add_row(Text(one.severity, style=STYLES[one.severity]), one.subject, text)
    problems, warnings = (
        sum(one.severity is kind for one in findings) for kind in (Severity.PROBLEM, Severity.WARNING)
    )
    return Group(table, Text(f"{count(problems, 'problem')}, {count(warnings, 'warning')}", style="bold"))
