"""Runtimes: what a platform team says once for all jobs that name it, and how a job is read with it. Pure.

A runtime may say those of a job's fields that the API server leaves absent (`part_fields`): of the others it stores a
default in the job, which nobody could tell from what the user said. So nothing that a training's numbers depend on.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, Final

from bamboo_core.job.fields import Fields, ManifestError, Problem
from bamboo_core.job.forms import FieldSlot, OneOf, Quantities, TextList, Tree
from bamboo_core.job.manifest import METADATA, ROOT, Check, parse_manifest
from bamboo_core.job.manifest_rules import check_rules
from bamboo_core.job.model import (
    ApiField,
    Mark,
    Object,
    ObjectList,
    PartOf,
    ReadObject,
    api_fields,
    divided,
    part_fields,
    part_paths,
    read_object,
)
from bamboo_core.job.pod_template import two_templates
from bamboo_core.job.spec import JobSpec, RuntimeKind, RuntimeRef
from bamboo_core.job.status import BambooJobStatus, JobRuntime
from bamboo_core.job.text_patterns import DNS_LABEL, DNS_NAME, exactly, one_of
from bamboo_core.job.yaml_file import ManifestSource, read_manifest_source
from bamboo_core.names import API_VERSION

Json = Mapping[str, Any]
REF: Final = "runtimeRef"
PATHS: Final = tuple(part_paths(JobSpec))  # of the fields of a job's spec that a runtime may say


class RuntimeUpdates(StrEnum):
    """Whom a change of a runtime reaches."""

    NEW_JOBS = "NewJobs"
    ROLLOUT = "Rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSpec:
    """What jobs that name the runtime need not say."""

    job: Annotated[Json, PartOf(JobSpec)] = field(default_factory=dict)
    """The fields of a job's spec that the runtime says. What a job says itself counts instead; in worker.template and
    worker.resources both count, and of the same thing what the job says. To a uri in checkpoint.storage a folder for
    the job is added, /NAMESPACE/NAME.
    """
    overridable: Annotated[
        tuple[str, ...] | None,
        TextList(
            one_of("a field that a runtime may say", *PATHS),
            "names of fields that a runtime may say",
            "A field of job, such as worker.image.",
            len(PATHS),
        ),
    ] = None
    """Which of these fields jobs may say otherwise. By default all; an empty list: none."""
    updates: RuntimeUpdates = RuntimeUpdates.NEW_JOBS
    """Whom a change reaches. NewJobs: jobs that have not begun. Rollout: also those that have; workers are replaced as
    after a change of the job, and where checkpoints are stays as it was.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """A runtime as jobs see it."""

    ref: RuntimeRef
    namespace: str  # "" for one of the cluster
    generation: int
    spec: RuntimeSpec

    def document(self) -> dict[str, Any]:
        """As it can be read again."""
        spec = self.spec
        listed = {} if spec.overridable is None else {"overridable": list(spec.overridable)}
        place = {"namespace": self.namespace} if self.namespace else {}
        return {
            "apiVersion": API_VERSION,
            "kind": str(self.ref.kind),
            "metadata": {"name": self.ref.name, **place, "generation": self.generation},
            "spec": {"job": deepcopy(dict(spec.job)), **listed, "updates": str(spec.updates)},
        }


def parse_runtime(document: Json) -> Runtime:
    """Raises ManifestError with all problems of the document. The rules between a job's fields are judged when it is
    read with a job.
    """
    problems: list[Problem] = []
    found: list[ReadObject] = []
    root = Fields(document, "", problems)
    root.text("apiVersion", exactly(API_VERSION))
    kind = OneOf(RuntimeKind).read(FieldSlot(root, "kind", required=True)) or RuntimeKind.CLUSTER
    root.known.extend(ROOT)
    metadata = root.child("metadata")
    metadata.known.extend(METADATA)
    name = metadata.text("name", DNS_NAME)
    namespace = metadata.optional_text("namespace", DNS_LABEL) or "default"
    generation = metadata.get("generation")
    metadata.close()
    spec: RuntimeSpec = read_object(RuntimeSpec, root.child("spec"), found)
    root.close()
    check_rules(found, problems)
    if problems:
        raise ManifestError(*problems)
    return Runtime(
        ref=RuntimeRef(kind=RuntimeKind(kind), name=name),
        namespace=namespace if kind is RuntimeKind.NAMESPACE else "",
        generation=generation if isinstance(generation, int) else 0,
        spec=spec,
    )


def read_runtime(path: str) -> Runtime:
    """A file's runtime; - is standard input. The problems of its ManifestError name file and line."""
    source = read_manifest_source(path)
    try:
        return parse_runtime(source.document)
    except ManifestError as error:
        raise ManifestError(*map(source.place, error.problems)) from None


def ref_of(document: Json) -> RuntimeRef | None:
    """The runtime that a job names; None if it names none, or not so that it can be read."""
    spec = document.get("spec")
    said = spec.get(REF) if isinstance(spec, Mapping) else None
    if not isinstance(said, Mapping):
        return None
    kind, name = said.get("kind") or RuntimeKind.CLUSTER, said.get("name")
    if kind not in list(RuntimeKind) or not isinstance(name, str) or not DNS_NAME.fits(name):
        return None
    return RuntimeRef(kind=RuntimeKind(kind), name=name)


# A job with its runtime


def with_runtime(document: Json, runtime: Runtime) -> dict[str, Any]:
    """The job's manifest as if its user had said what the runtime says, and had named none. Raises ManifestError if it
    says what the runtime lets no job say.
    """
    spec = document.get("spec")
    if not isinstance(spec, Mapping):
        return dict(document)
    part = _with_own_place(runtime.spec.job, document)
    if refused := [path for path in _overridden(part, spec) if not _may_say(runtime, path)]:
        raise ManifestError(*(Problem(f"spec.{path}", _fixed(runtime)) for path in refused))
    return _laid_over(document, part)


def parse_source_with(
    source: ManifestSource, runtime: Runtime, also: Check = lambda job: ()
) -> tuple[dict[str, Any], JobSpec]:
    """A file's job with its runtime: the manifest of both, and its spec. The problems of its ManifestError name file
    and line. also: see `parse_manifest`.
    """
    ref = ref_of(source.document)
    try:
        if ref != runtime.ref:
            raise ManifestError(Problem(f"spec.{REF}", f"expected {runtime.ref}, which was given, got {ref or 'none'}"))
        document = with_runtime(source.document, runtime)
        try:
            return document, parse_manifest(document, also)
        except ManifestError as error:
            raise told_with(error, source.document, runtime) from None
    except ManifestError as error:
        raise ManifestError(*map(source.place, error.problems)) from None


def told_with(error: ManifestError, document: Json, runtime: Runtime) -> ManifestError:
    """The problems of `with_runtime`'s manifest, each of which says where it comes from if that is not the job alone.
    document: the job's own.
    """
    return ManifestError(*(replace(p, message=f"{p.message}{_origin(p, document, runtime)}") for p in error.problems))


def with_written_runtime(document: Json, status: BambooJobStatus) -> Json:
    """The job as the operator follows it, by what its status says of the runtime, which has no templates of pods.
    For whoever only shows it.
    """
    spec = document.get("spec")
    if status.runtime is None or not isinstance(spec, Mapping):
        return document
    return _laid_over(document, status.runtime.job)


def written_runtime(runtime: Runtime, document: Json) -> JobRuntime:
    """What the status of a job says of its runtime. Templates of pods are not in it, which may be large."""
    part = _without_trees(JobSpec, _with_own_place(runtime.spec.job, document))
    return JobRuntime(kind=str(runtime.ref.kind), name=runtime.ref.name, generation=runtime.generation, job=part)


def _without_trees(kind: type, said: Json) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for one in api_fields(kind):
        value = said.get(one.name)
        if value is None or isinstance(one.form, Tree):
            continue
        match one.form:
            case Object(inner):
                kept[one.name] = _without_trees(inner, value)
            case ObjectList(inner):
                kept[one.name] = [_without_trees(inner, item) for item in value]
            case _:
                kept[one.name] = deepcopy(value)
    return kept


def followed(began: Runtime, newest: Runtime | None, *, trains: bool) -> Runtime:
    """What a job has of its runtime that has begun with one. newest: None if there is none any more. trains: it has
    workers; else it is suspended.
    """
    if newest is None or newest.spec.updates is RuntimeUpdates.NEW_JOBS:
        return began
    kept = {Mark.FIXED, Mark.WHILE_SUSPENDED} if trains else {Mark.FIXED}
    return replace(newest, spec=replace(newest.spec, job=_kept(JobSpec, kept, began.spec.job, newest.spec.job)))


def _kept(kind: type, marks: set[Mark], began: Json, newest: Json) -> dict[str, Any]:
    """The newest part, but for its fields with one of these marks."""
    part: dict[str, Any] = {}
    for one in part_fields(kind):
        inner = divided(one)
        if one.marks & marks or inner is None:
            source = began if one.marks & marks else newest
            part |= {one.name: source[one.name]} if one.name in source else {}
        elif said := _kept(inner, marks, began.get(one.name) or {}, newest.get(one.name) or {}):
            part[one.name] = said
    return part


def _laid_over(document: Json, part: Json) -> dict[str, Any]:
    spec = {name: value for name, value in document["spec"].items() if name != REF}
    return {**document, "spec": deepcopy(_merged(JobSpec, part, spec))}


def _merged(kind: type, part: Json, said: Json) -> dict[str, Any]:
    """What was said, and what the part says beside it. What is malformed stays as it is."""
    merged = dict(said)
    for one in part_fields(kind):
        if (given := part.get(one.name)) is not None:
            merged[one.name] = _merged_field(one, given, said.get(one.name))
    return merged


def _merged_field(one: ApiField, given: Any, said: Any) -> Any:
    if said is None:
        return given
    if not isinstance(said, Mapping) or not isinstance(given, Mapping):
        return said
    if inner := divided(one):
        return _merged(inner, given, said)
    match one.form:
        case Tree():
            return two_templates(given, said)
        case Quantities():
            return {**given, **said}
    return said


def _overridden(part: Json, said: Json) -> Iterator[str]:
    """The paths of the fields of which the part does not hold as it is. To have its workers replaced, a job need not be
    allowed another template.
    """
    merged = _merged(JobSpec, part, said)
    for path in PATHS:
        given = _at(part, path)
        if given is not None and _at(merged, path) != given:
            yield path


def _may_say(runtime: Runtime, path: str) -> bool:
    return runtime.spec.overridable is None or path in runtime.spec.overridable


def _fixed(runtime: Runtime) -> str:
    listed = runtime.spec.overridable
    lets = f"only {', '.join(listed)}" if listed else "nothing"
    return f"{runtime.ref} says it, of which jobs may override {lets}"


def _with_own_place(part: Json, document: Json) -> dict[str, Any]:
    """Each job has a folder of its own where the runtime has checkpoints be written."""
    uri = _at(part, "checkpoint.storage.uri")
    if not isinstance(uri, str):
        return dict(part)
    metadata = document.get("metadata")
    known = metadata if isinstance(metadata, Mapping) else {}
    own = f"{uri.rstrip('/')}/{known.get('namespace') or 'default'}/{known.get('name')}"
    checkpoint = part["checkpoint"]
    return {**part, "checkpoint": {**checkpoint, "storage": {**checkpoint["storage"], "uri": own}}}


def _origin(problem: Problem, document: Json, runtime: Runtime) -> str:
    path = next((path for path in PATHS if f"{problem.path}.".startswith((f"spec.{path}.", f"spec.{path}["))), None)
    if path is None or _at(runtime.spec.job, path) is None:
        return ""
    spec = document.get("spec")
    said = _at(spec if isinstance(spec, Mapping) else {}, path) is not None
    return f" (of the job together with {runtime.ref})" if said else f" (of {runtime.ref})"


def _at(values: Any, path: str) -> Any:
    for name in path.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values
