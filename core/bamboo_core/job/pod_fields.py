"""Misspelt fields of `worker.template` and of the templates of node pools, found without an API server.

The CRD takes any field there, because pods get new ones with every Kubernetes, and an API server drops those that it
does not know. The names known here are those of Kubernetes' schemas, from the oldest version that Bamboo supports to
NEWEST_MINOR; a newer one may have more.
"""

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from bamboo_core.job.fields import Fields, Problem
from bamboo_core.job.spec import JobSpec

PATH = "spec.worker.template"
_ROOT = "PodTemplateSpec"
_DATA: dict[str, Any] = json.loads(files("bamboo_core.job").joinpath("pod_fields.json").read_text())
_KINDS: dict[str, dict[str, str]] = _DATA["kinds"]  # a field's kind by its name; "" if it has no fields of its own
NEWEST_MINOR: int = _DATA["newest"]


def unknown_fields(template: Mapping[str, Any], path: str = PATH) -> list[Problem]:
    """Return a problem for each unknown field; the API server refuses values of a wrong type. path: of the template."""
    problems: list[Problem] = []
    _look(_ROOT, template, path, problems)
    return problems


def templates_of(job: JobSpec) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Return all pod templates of the job by their paths in the manifest."""
    yield PATH, job.worker.template
    for index, pool in enumerate(job.node_pools):
        if pool.template:
            yield pool_path(index), pool.template


def pool_path(index: int) -> str:
    return f"spec.nodePools[{index}].template"


def unknown_in_template(job: JobSpec) -> list[Problem]:
    """Return unknown fields of all templates, for parse_manifest."""
    return [problem for path, template in templates_of(job) for problem in unknown_fields(template, path)]


def _look(kind: str, value: Mapping[str, Any], path: str, problems: list[Problem]) -> None:
    known = _KINDS[kind]
    fields = Fields(value, path, problems, list(known))
    fields.close()
    for name, inner in known.items():
        found = value.get(name) if inner else None
        if isinstance(found, Mapping):
            _look(inner, found, fields.at(name), problems)
        elif isinstance(found, list):
            for index, item in enumerate(found):
                if isinstance(item, Mapping):
                    _look(inner, item, f"{fields.at(name)}[{index}]", problems)
