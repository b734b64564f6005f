"""Arguments that name a job: its name, KIND/NAME, or a manifest file."""

from typing import Any

import pytest

from bamboo.remote.session import target
from bamboo_core.kube.errors import UsageError


@pytest.mark.parametrize(
    ("given", "name", "namespace"),
    [
        ("story", "story", None),
        ("bj/story", "story", None),
        ("bamboojob.bamboo.dev/story", "story", None),
        ("FILE", "tale", "team"),
    ],
)
def test_jobs_are_named_by_name_or_file(tmp_path: Any, given: str, name: str, namespace: str | None) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("metadata: {name: tale, namespace: team}\n")
    found = target(str(file) if given == "FILE" else given)
    assert (found.name, found.namespace) == (name, namespace)


@pytest.mark.parametrize("given", ["", "No", "a/b", "no-such.yaml", "-x", "../story"])
def test_other_names_are_refused(given: str) -> None:
    with pytest.raises(UsageError):
        target(given)
