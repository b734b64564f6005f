"""What a diagnosis says of nodes: for the pools of a job, of GPUs, of who gives notice."""

from typing import Any

import pytest

from diagnosis_kit import found, lines, node, spec, spot_node

TAINT = {"key": "team", "value": "x", "effect": "NoSchedule"}
GPU_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
SMALL = {"containers": [{"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": None, "example.com/gpu": 1}}}]}
POOL_JOB = spec(
    worker={"resources": {"limits": {"nvidia.com/gpu": 1}}},
    nodePools=[
        {
            "name": "spot",
            "preset": "Karpenter",
            "pricePerHour": "1",
            "template": {"spec": SMALL | {"nodeSelector": {"type": "a"}}},
        }
    ],
)
GPU_JOB = spec(worker={"resources": {"limits": {"nvidia.com/gpu": 1}}})
TOLERANT = spec(worker={"template": {"spec": {"tolerations": [{"key": "team", "operator": "Exists"}]}}})


def four(**more: Any) -> list[dict[str, Any]]:
    return [spot_node(f"node-{number}", **more) for number in range(4)]


def of_type(kind: str, name: str) -> dict[str, Any]:
    found = spot_node(name, {**GPU_TAINT, "key": "example.com/gpu"}, allocatable={"example.com/gpu": "1"})
    found["metadata"]["labels"]["type"] = kind
    return found


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes": [spot_node("a", ready=False)]}, ["problem nodes: none of 1 node is ready"]),
        ({"nodes": [node("a")]}, ["warning pool spot: no node that is ready now fits"]),
        ({"nodes": [spot_node("a", TAINT)]}, ["warning pool spot: no node that is ready now fits"]),
        ({"nodes": four(), "spec": TOLERANT}, []),
        ({"nodes": [spot_node(f"n{i}", TAINT) for i in range(4)], "spec": TOLERANT}, []),
        ({"nodes": four()[:2]}, ["warning pool spot: 2 fitting nodes with room for 2 of 4 workers"]),
        (
            {"nodes": four(allocatable={"cpu": "2"})},
            ["problem pool spot: none of 4 fitting nodes is large enough for a worker's requests"],
        ),
        (
            {
                "nodes": [spot_node(f"n{i}", GPU_TAINT, allocatable={"nvidia.com/gpu": "1"}) for i in range(4)],
                "spec": GPU_JOB,
            },
            [],
        ),
        (
            {"nodes": four(allocatable={"example.com/gpu": "1"}), "spec": POOL_JOB},
            ["warning pool spot: no node that is ready now fits"],
        ),
        (
            {"nodes": [of_type("a", f"n{i}") for i in range(4)], "spec": POOL_JOB},
            [],
        ),
        (
            {"nodes": four(), "spec": GPU_JOB},
            ["problem pool spot: none of 4 fitting nodes is large enough for a worker's requests"],
        ),
    ],
)
def test_pools_are_compared_with_the_nodes(changes: dict[str, Any], said: list[str]) -> None:
    assert lines(found(**changes)) == said


def test_a_node_with_a_gpu_that_no_plugin_offers_is_a_problem() -> None:
    nodes = four()
    nodes[2]["metadata"]["labels"]["nvidia.com/gpu.present"] = "true"
    nodes[1]["metadata"]["labels"]["nvidia.com/gpu.present"] = "false"
    assert lines(found(nodes=nodes)) == [
        "problem GPU plugin: 1 node with GPUs, such as node-2, offer none of them to pods"
    ]
    nodes[2]["status"]["allocatable"]["nvidia.com/gpu"] = "2"
    assert not lines(found(nodes=nodes))


def test_a_label_that_gives_no_seconds_is_told() -> None:
    nodes = four()
    nodes[0]["metadata"]["labels"]["bamboo.dev/notice-seconds"] = "120"
    assert not lines(found(nodes=nodes))
    nodes[1]["metadata"]["labels"]["bamboo.dev/notice-seconds"] = "2m"
    assert lines(found(nodes=nodes)) == [
        "warning notices: node-1 has the label bamboo.dev/notice-seconds=2m, which says nothing"
    ]


def test_aws_nodes_of_no_pool_may_go_without_a_word() -> None:
    nodes = [*four(), node("own", provider="aws:///eu/i-1")]
    (said,) = lines(found(nodes=nodes))
    assert said.startswith("warning notices: 1 node of AWS, such as own, belong to no managed node group")
    nodes[-1]["metadata"]["labels"]["eks.amazonaws.com/nodegroup"] = "g"
    assert not lines(found(nodes=nodes))
