"""Warnings about valid manifests."""

from typing import Any

import pytest

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.manifest_warnings import warnings
from manifest_kit import bamboojob, gpu_pools, training


def manifest(**spec: Any) -> dict[str, Any]:
    usual = {"task": {"entrypoint": "a:b"}, "training": training(1, 8, 1), "topology": {"stages": 4}}
    return bamboojob(**(usual | spec))


def gpus(**resources: Any) -> dict[str, Any]:
    return {"resources": {"limits": {"nvidia.com/gpu": 1} | resources}}


def pool_asks(number: Any) -> dict[str, Any]:
    """Return fields of a spec: workers request one GPU, and the second pool's template requests `number`."""
    trainer = {"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": number}}}
    template = {"spec": {"containers": [trainer]}}
    return {"worker": gpus(), "nodePools": [{"name": "a"}, {"name": "l4", "template": template}]}


def pair(per_node: int, pipelines: int = 1) -> dict[str, Any]:
    return {"topology": {"stages": 4, "pipelines": pipelines}, "spread": {"workersPerNode": per_node}}


MONEY = {"budget": {"money": "10"}, "nodePools": [{"name": "spot", "pricePerHour": "1"}]}
TWO = {"devices": 2}


@pytest.mark.parametrize(
    ("spec", "about", "message"),
    [
        ({}, "neighbouring", "ends if two neighbouring workers vanish at the same time; "),
        ({"redundancy": {"replicas": 2}}, "neighbouring", "ends if three neighbouring workers vanish at the same"),
        ({"redundancy": {"replicas": 2}}, "neighbouring", "with spec.redundancy.replicas: 3 another worker"),
        ({"redundancy": {"replicas": 2, "mode": "None"}}, "replicas 2", "has no effect with spec.redundancy.mode None"),
        ({"redundancy": {"replicas": 3}}, "replicas 3", None),
        (
            {"redundancy": {"replicas": 3}, "topology": {"stages": 2}},
            "replicas 3",
            "spec.redundancy.replicas 3: a worker has only 1 other to hold its stage's state",
        ),
        (pair(1), "workersPerNode", None),
        (pair(2), "workersPerNode", None),
        (pair(4, pipelines=2), "workersPerNode", None),
        (pair(4), "workersPerNode", "4: all 4 workers are on one node, with whose loss the job ends"),
        (pair(3), "workersPerNode", "a node with 3 workers has neighbours in a pipeline of 4 stages, whose stages one"),
        ({}, "GPU", None),
        ({"worker": gpus(**{"nvidia.com/gpu": 0})}, "GPU", None),
        ({"worker": gpus()}, "GPU", None),
        ({"worker": gpus(**{"nvidia.com/gpu": 8})}, "GPU", "a worker uses one of its 8 GPUs; spec.worker.devices 8"),
        ({"worker": gpus(**{"nvidia.com/gpu": 32})}, "GPU", "one of its 32 GPUs; more workers with one GPU each"),
        ({"worker": TWO | {"resources": {"limits": {"amd.com/gpu": "2"}}}}, "GPU", None),
        (
            {"worker": TWO | {"resources": {"limits": {"memory": "1Gi"}}}},
            "GPU",
            "spec.worker.devices 2: spec.worker.resources asks for no GPUs, such as nvidia.com/gpu; on a cluster a",
        ),
        ({"worker": TWO, "nodePools": gpu_pools(2, 2)}, "GPU", None),
        (
            {"worker": TWO, "nodePools": gpu_pools(2, None)},
            "GPU",
            "spec.worker.devices 2: node pool b asks for no GPUs, such as nvidia.com/gpu; on a cluster",
        ),
        (pool_asks(1), "node pool l4", None),
        (pool_asks("0"), "node pool l4", None),
        (pool_asks(None), "node pool l4", None),
        (pool_asks(2), "node pool l4", "node pool l4"),
        (MONEY, "spec.budget.money", "spec.budget.money without"),
        (MONEY | {"checkpoint": {"storage": "s3://bucket/x"}}, "spec.budget.money without", None),
        ({"nodePools": [{"name": "a"}, {"name": "b", "afterSeconds": 60}]}, "afterSeconds", None),
        (
            {"nodePools": [{"name": "a", "afterSeconds": 60}]},
            "afterSeconds",
            "node pool a: afterSeconds has no effect in the first",
        ),
    ],
)
def test_what_may_surprise_is_warned_of(spec: dict[str, Any], about: str, message: str | None) -> None:
    found = [warning for warning in warnings(parse_manifest(manifest(**spec))) if about in warning]
    assert [message] == [message for warning in found if message in warning] if message else not found


@pytest.mark.parametrize("name", ["trianer", "Trainer", "trainers", "traner"])
def test_a_container_that_was_to_be_the_workers_is_warned_of(name: str) -> None:
    """A container named almost like "trainer" gets a warning: it would run beside the worker's container."""
    document = manifest()
    containers = [{"name": "logs", "image": "x"}, {"name": name, "env": []}]
    document["spec"]["worker"] = {"template": {"spec": {"containers": containers}}}
    document["spec"]["nodePools"] = [{"name": "a", "template": {"spec": {"containers": [{"name": name}]}}}]
    found = [warning for warning in warnings(parse_manifest(document)) if "container" in warning]
    beside = f"{name}: a container of its own beside the worker's, which is called trainer"
    assert found == [
        f"spec.worker.template.spec.containers[1].name {beside}",
        f"spec.nodePools[0].template.spec.containers[0].name {beside}",
    ]
    document = manifest()
    names = [{"name": name} for name in ("trainer", "istio-proxy", "training-logs", "training")]
    document["spec"]["worker"] = {"template": {"spec": {"containers": names}}}
    assert not any("container" in warning for warning in warnings(parse_manifest(document)))
    document["spec"]["worker"] = {"template": {"spec": {"containers": "none"}}}
    warnings(parse_manifest(document))
