"""Fields of a job's pod templates that no pod has: which ones, in the words of the user's own manifest.

What is a field the API server decides, for it may be newer than what we know; but it sees the pod that is made of the
template, in which lists are merged and some fields are left out.
"""

import re
from collections.abc import Mapping
from typing import Any

from bamboo_core.job.pod_fields import PATH, templates_of, unknown_fields
from bamboo_core.job.spec import JobSpec

_UNKNOWN = re.compile(r'unknown field "([^"]+)"')


def outside_the_spec(job: JobSpec) -> tuple[str, ...]:
    """The fields of its templates that the API server never sees: beside the pod's metadata and spec, and in the
    metadata.
    """
    return tuple(
        str(found)
        for path, template in templates_of(job)
        for found in unknown_fields(template, path)
        if not found.path.startswith(f"{path}.spec.")
    )


def refusal(template: Mapping[str, Any], message: str, path: str = PATH) -> tuple[str, ...]:
    """What the API server says of the pod that is made of the template at that path; one sentence for each unknown
    field.
    """
    paths = _UNKNOWN.findall(message)
    names = {other.rpartition(".")[2] for other in paths}
    found = [problem for problem in unknown_fields(template, path) if problem.path.rpartition(".")[2] in names]
    missing = names - {problem.path.rpartition(".")[2] for problem in found}
    ours = [f"{path}: unknown field {other} of a pod" for other in paths if other.rpartition(".")[2] in missing]
    return (*map(str, found), *ours) or (f"{path}: {message}",)
