"""Unknown fields in a job's pod templates, named as in the user's manifest.

The API server decides which fields are known, since it may be newer than Bamboo. But it sees the finished pod, in which
lists are merged and some fields are left out.
"""

import re
from collections.abc import Mapping
from typing import Any

from bamboo_core.job.pod_fields import PATH, templates_of, unknown_fields
from bamboo_core.job.spec import JobSpec

_UNKNOWN = re.compile(r'unknown field "([^"]+)"')


def outside_the_spec(job: JobSpec) -> tuple[str, ...]:
    """Return the unknown fields that the API server never sees: in the metadata, and next to metadata and spec."""
    return tuple(
        str(problem)
        for path, template in templates_of(job)
        for problem in unknown_fields(template, path)
        if not problem.path.startswith(f"{path}.spec.")
    )


def refusal(template: Mapping[str, Any], message: str, path: str = PATH) -> tuple[str, ...]:
    """Return the API server's objections to a pod made of this template, one sentence for each unknown field."""
    paths = _UNKNOWN.findall(message)
    names = {other.rpartition(".")[2] for other in paths}
    problems = [problem for problem in unknown_fields(template, path) if problem.path.rpartition(".")[2] in names]
    missing = names - {problem.path.rpartition(".")[2] for problem in problems}
    ours = [f"{path}: unknown field {other} of a pod" for other in paths if other.rpartition(".")[2] in missing]
    return (*map(str, problems), *ours) or (f"{path}: {message}",)
