"""The domains to which Kueue assigns workers, and which one the next pod is in."""

from typing import Any

import pytest

from bamboo_core.names import LABEL_POD_SET
from bamboo_operator.queues.topology import Domain, next_domain, read_domains

# The examples of Kueue's API, in its own encodings of the same.
BLOCKS, HOSTNAME = ["block", "rack"], ["kubernetes.io/hostname"]
APART = {
    "domainCount": 2,
    "valuesPerLevel": [{"individual": {"roots": ["b1", "b1"]}}, {"individual": {"roots": ["r1", "r2"]}}],
    "podCounts": {"individual": [4, 2]},
}
ALIKE = {
    "domainCount": 2,
    "valuesPerLevel": [{"universal": "b1"}, {"individual": {"prefix": "r", "roots": ["1", "2"]}}],
    "podCounts": {"individual": [4, 2]},
}
NODES = {
    "domainCount": 2,
    "valuesPerLevel": [{"individual": {"prefix": "b1-", "suffix": "-spot", "roots": ["n1", "n2"]}}],
    "podCounts": {"universal": 1},
}
ONE_MORE = {"domainCount": 1, "valuesPerLevel": [{"universal": "b2-n7"}], "podCounts": {"universal": 3}}


@pytest.mark.parametrize(
    ("levels", "slices", "domains"),
    [
        (BLOCKS, [APART], [({"block": "b1", "rack": "r1"}, 4), ({"block": "b1", "rack": "r2"}, 2)]),
        (BLOCKS, [ALIKE], [({"block": "b1", "rack": "r1"}, 4), ({"block": "b1", "rack": "r2"}, 2)]),
        (
            HOSTNAME,
            [NODES, ONE_MORE],
            [({HOSTNAME[0]: "b1-n1-spot"}, 1), ({HOSTNAME[0]: "b1-n2-spot"}, 1), ({HOSTNAME[0]: "b2-n7"}, 3)],
        ),
    ],
)
def test_an_assignment_is_read_however_it_is_encoded(levels: Any, slices: Any, domains: Any) -> None:
    assert read_domains({"levels": levels, "slices": slices}) == tuple(Domain(*one) for one in domains)


def test_where_no_topology_is_assigned_there_are_no_domains() -> None:
    assert read_domains(None) == ()


def pods(**racks: int) -> list[dict[str, Any]]:
    labels = {"labels": {LABEL_POD_SET: "workers"}}
    return [
        {"metadata": labels, "spec": {"nodeSelector": {"rack": rack, "x": "y"}}}
        for rack in racks
        for _ in range(racks[rack])
    ]


RACKS = (Domain({"rack": "a"}, 2), Domain({"rack": "b"}, 2), Domain({"rack": "c"}, 4))


@pytest.mark.parametrize(
    ("there", "rack"),
    [
        ({}, "a"),
        ({"a": 1}, "a"),
        ({"a": 2}, "b"),
        ({"a": 2, "b": 1}, "b"),
        ({"b": 1}, "b"),  # a pipeline of which one is lost, before one that was given back
        ({"a": 2, "b": 2}, "c"),
        ({"a": 3, "b": 2, "c": 4}, "b"),  # one more than there are seats, for one that is about to leave
    ],
)
def test_domains_are_filled_one_after_the_other(there: dict[str, int], rack: str) -> None:
    assert next_domain(RACKS, "workers", pods(**there)).labels == {"rack": rack}
    assert next_domain(RACKS, "standby", pods(**there)).labels == {"rack": "a"}, "others' pods do not count"
