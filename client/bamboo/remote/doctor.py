"""`doctor`, which checks a cluster for problems that keep jobs from starting, and prints findings with advice."""

import json
from collections.abc import Awaitable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Final, TypeVar

from rich.console import Group, RenderableType
from rich.text import Text

from bamboo.remote.checks import ClusterFacts, Finding, Object, Severity, Unreadable, installation, job
from bamboo.remote.operator_pods import arguments, operator_for, operator_pods
from bamboo.remote.session import Session, Target, names_file
from bamboo.terminal.output_format import OutputFormat
from bamboo.terminal.tables import plain_table
from bamboo_core.job.fields import ManifestError
from bamboo_core.job.manifest import parse_manifest, parse_source
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.yaml_file import read_manifest_source
from bamboo_core.kube.api import KubeApi
from bamboo_core.kube.errors import ApiError, ClusterUnreachable, RemoteError, UsageError
from bamboo_core.names import EXIT_FAILED, EXIT_OK, GROUP, KUEUE, PLURAL
from bamboo_core.text import count

T = TypeVar("T")
CRD: Final = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{PLURAL}.{GROUP}"
SUBMITTING: Final = ("get", "create", "patch")  # verbs on jobs


async def read_facts(
    api: KubeApi, namespace: str, operator_namespace: str | None = None, spec: JobSpec | None = None
) -> ClusterFacts:
    """Read the cluster's objects for the checks; an object that cannot be read becomes Unreadable.

    operator_namespace: the operators' namespace; None searches all. spec: the spec of the job to check. Raises
    ClusterUnreachable if the API server cannot be reached, ApiError if it rejects the credentials.
    """
    operators = await _read(operator_pods(api, operator_namespace))
    pod = None if isinstance(operators, Unreadable) else operator_for(operators, namespace)
    return ClusterFacts(
        namespace=namespace,
        crd=await _read(api.find(CRD)),
        operators=operators,
        lease=await _lease(api, pod),
        rights=await _read(_rights(api, namespace)),
        quotas=await _read(api.listed(f"/api/v1/namespaces/{namespace}/resourcequotas")),
        nodes=await _read(api.listed("/api/v1/nodes")),
        spec=spec,
        queue=await _queue(api, namespace, spec),
    )


async def _read(asked: Awaitable[T]) -> T | Unreadable:
    try:
        return await asked
    except ClusterUnreachable:
        raise
    except RemoteError as error:
        if isinstance(error, ApiError) and error.status == 401:
            raise
        return Unreadable(str(error))


async def _lease(api: KubeApi, pod: Object | None) -> Object | Unreadable | None:
    """Return the Lease that the operator's arguments name; None if they name none, or no pod or Lease exists."""
    names = arguments(pod, "--lease") if pod is not None else set()
    if not names:
        return None
    namespace, _, name = min(names).partition("/")
    return await _read(api.read_lease(namespace, name))


async def _rights(api: KubeApi, namespace: str) -> dict[str, bool]:
    """Return, for each verb that `submit` needs, whether the user may use it on jobs in the namespace."""
    job = {"group": GROUP, "resource": PLURAL, "namespace": namespace}
    return {verb: await api.may({"verb": verb, **job}) for verb in SUBMITTING}


async def _queue(api: KubeApi, namespace: str, spec: JobSpec | None) -> Object | Unreadable | None:
    """Return the job's Kueue LocalQueue; None if the job names no queue, or the queue does not exist."""
    if spec is None or spec.queue is None:
        return None
    return await _read(api.find(f"/apis/{KUEUE}/v1beta2/namespaces/{namespace}/localqueues/{spec.queue.name}"))


STYLES: Final = {
    Severity.OK: "green",
    Severity.UNKNOWN: "dim",
    Severity.WARNING: "yellow",
    Severity.PROBLEM: "bold red",
}


async def doctor(
    session: Session, target: Target | None, file: Object | None, *, operator_namespace: str | None, form: OutputFormat
) -> int:
    """Print the findings of all checks; return EXIT_FAILED if one is a PROBLEM, else EXIT_OK.

    target: a job to check, if any. file: its manifest; None reads it from the cluster. Raises UsageError if invalid.
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
    """Return the manifest in the file `given`; None for None or a job's name. Raises UsageError if it is invalid."""
    if given is None or not names_file(given):
        return None
    try:
        source = read_manifest_source(given)
        parse_source(source)
    except ManifestError as error:
        raise UsageError(str(error)) from None
    return source.document


def diagnosis(facts: ClusterFacts, now: datetime) -> tuple[Finding, ...]:
    """Run all checks and return their findings: of the installation, then of quotas, the job's queue, and nodes."""
    return (*installation(facts, now), *job(facts))


def rendered(findings: Sequence[Finding]) -> RenderableType:
    """Return a table of the findings, each with its advice below it, and the number of problems and warnings."""
    table = plain_table("", "", header=False)
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
