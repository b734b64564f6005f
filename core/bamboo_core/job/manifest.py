"""The parser of BambooJob manifests: raw document -> `JobSpec`, or all of its problems at once.

Unknown fields are errors; null means absent, as in Kubernetes. `status` and metadata other than names are ignored.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from bamboo_core.job.fields import Fields, ManifestError, Problem
from bamboo_core.job.manifest_rules import check_rules
from bamboo_core.job.model import ReadObject, places, read_object
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.text_patterns import DNS_LABEL, exactly
from bamboo_core.job.yaml_file import ManifestSource, read_manifest_source
from bamboo_core.names import API_VERSION, KIND

__all__ = ["ManifestError", "Problem", "load_manifest", "parse_manifest", "parse_source"]

MOST_PLACES = 2  # in a suggestion
ROOT = ("apiVersion", "kind", "metadata", "spec", "status")


def load_manifest(path: str | Path) -> JobSpec:
    """Read a job's spec from one YAML or JSON file. Raises ManifestError, whose problems name file and line."""
    return parse_source(read_manifest_source(str(path)))


def parse_source(source: ManifestSource) -> JobSpec:
    """Parse the content of a file into a job's spec. Raises ManifestError, whose problems name file and line."""
    try:
        return parse_manifest(source.document)
    except ManifestError as error:
        raise ManifestError(*map(source.place, error.problems)) from None


def parse_manifest(document: Mapping[str, Any]) -> JobSpec:
    """Parse a document into a job's spec, and check all rules. Raises ManifestError with all problems."""
    problems: list[Problem] = []
    objects: list[ReadObject] = []
    job = _root(document, problems, objects)
    check_rules(objects, problems)
    if problems:
        raise ManifestError(*problems)
    return job


def read_spec(document: Mapping[str, Any]) -> JobSpec:
    """Read a job's spec, ignoring problems, to show a job that another version accepted. Defaults or harmless values
    replace missing and wrong values.
    """
    return _root(document, [], [])


@cache
def fields_by_name() -> dict[str, tuple[str, ...]]:
    """Return the paths of fields by name, such as spec.training.steps for steps, to suggest for a misplaced field. Of
    several paths, keep the shallowest, at most MOST_PLACES; leave out fields of objects in lists.
    """
    paths_of: dict[str, set[str]] = {}
    for name, path in (*((name, name) for name in ROOT), *places(JobSpec, "spec")):
        paths_of.setdefault(name, set()).add(path)
    depths = {name: min(path.count(".") for path in paths) for name, paths in paths_of.items()}
    return {
        name: tuple(sorted(path for path in paths if path.count(".") == depths[name]))[:MOST_PLACES]
        for name, paths in paths_of.items()
    }


def _root(document: Mapping[str, Any], problems: list[Problem], objects: list[ReadObject]) -> JobSpec:
    root = Fields(document, "", problems, fields_by_name())
    root.refuse_unknown(ROOT)
    root.text("apiVersion", exactly(API_VERSION))
    root.text("kind", exactly(KIND))
    metadata = root.child("metadata")
    name = metadata.text("name", DNS_LABEL)
    namespace = metadata.optional_text("namespace", DNS_LABEL) or "default"
    job: JobSpec = read_object(JobSpec, root.child("spec"), objects, name=name, namespace=namespace)
    return job
