"""Whatever the document is, it is read or refused in one way."""

from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.job.manifest import ManifestError, Problem, parse_manifest
from manifest_kit import WHOLE, problems

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
FIELDS = list(yaml.safe_load(WHOLE)["spec"])
NAMES = st.sampled_from(["apiVersion", "kind", "metadata", "spec", "steps", "name", "claimName", *FIELDS])
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def sentences(document: Any) -> tuple[Problem, ...]:
    """The problems; none if it is valid. Any other exception fails the test."""
    try:
        parse_manifest(document)
    except ManifestError as error:
        return error.problems or (Problem("", "\n"),)
    return ()


@given(JSON)
def test_any_document_is_refused_in_one_way(document: Any) -> None:
    assert all("\n" not in line for line in problems(document))


@given(st.data())
def test_a_whole_manifest_with_one_value_replaced(data: st.DataObject) -> None:
    document = yaml.safe_load(WHOLE)
    at: Any = document["spec"]
    while True:
        key = data.draw(st.sampled_from(list(at) if isinstance(at, dict) else list(range(len(at)))))
        if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = data.draw(JSON)
    assert all("\n" not in str(problem) for problem in sentences(document))
