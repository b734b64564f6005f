"""Fields of `worker.template` that no pod has: which ones, in the words of the user's own manifest.

What is a field the API server decides, for it may be newer than what we know; but it sees the pod that is made of the
template, in which lists are merged and some fields are left out.
"""

import re
from collections.abc import Mapping
from typing import Any

from bamboo_core.job.pod_fields import PATH, unknown_fields

_UNKNOWN = re.compile(r'unknown field "([^"]+)"')


def outside_the_spec(template: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields that the API server never sees: beside the pod's metadata and spec, and in the metadata."""
    return tuple(str(found) for found in unknown_fields(template) if not found.path.startswith(f"{PATH}.spec."))


def refusal(template: Mapping[str, Any], message: str) -> tuple[str, ...]:
    """What the API server says of the pod that is made of the template; one sentence for each unknown field."""
    paths = _UNKNOWN.findall(message)
    names = {path.rpartition(".")[2] for path in paths}
    found = [problem for problem in unknown_fields(template) if problem.path.rpartition(".")[2] in names]
    missing = names - {problem.path.rpartition(".")[2] for problem in found}
    ours = [f"{PATH}: unknown field {path} of a pod" for path in paths if path.rpartition(".")[2] in missing]
    return (*map(str, found), *ours) or (f"{PATH}: {message}",)
