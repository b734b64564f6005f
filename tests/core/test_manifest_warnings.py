"""What a manifest is warned of."""

from typing import Any

import pytest

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.manifest_warnings import warnings
from manifest_kit import bamboojob, gpu_pools, training


def manifest(**redundancy: Any) -> dict[str, Any]:
    return bamboojob(
        task={"entrypoint": "a:b"}, training=training(1, 8, 1), topology={"stages": 4}, redundancy=redundancy
    )


@pytest.mark.parametrize(
    ("redundancy", "told"),
    [
        ({}, "ends if two neighbouring workers vanish at the same time; "),
        ({"replicas": 2}, "ends if three neighbouring workers vanish at the same time; "),
        ({"replicas": 2}, "with spec.redundancy.replicas: 3 another worker"),
        ({"replicas": 2, "mode": "None"}, "spec.redundancy.replicas 2 has no effect with spec.redundancy.mode None"),
    ],
)
def test_what_replicas_do_not_cover_is_warned_of(redundancy: dict[str, Any], told: str) -> None:
    assert any(told in warning for warning in warnings(parse_manifest(manifest(**redundancy))))


def test_more_replicas_than_there_are_others_is_a_warning() -> None:
    document = manifest(replicas=3)
    assert not any("replicas 3" in warning for warning in warnings(parse_manifest(document)))
    document["spec"]["topology"]["stages"] = 2
    (warning,) = (w for w in warnings(parse_manifest(document)) if "replicas 3" in w)
    assert warning == "spec.redundancy.replicas 3: a worker has only 1 other to hold its stage's state"


@pytest.mark.parametrize(
    ("per_node", "stages", "pipelines", "told"),
    [
        (1, 4, 1, ""),
        (2, 4, 1, ""),
        (4, 4, 2, ""),
        (4, 4, 1, "spec.spread.workersPerNode 4: all 4 workers are on one node, with whose loss the job ends"),
        (3, 4, 1, "a node with 3 workers has neighbours in a pipeline of 4 stages, whose stages one"),
    ],
)
def test_nodes_with_too_many_workers_are_warned_of(per_node: int, stages: int, pipelines: int, told: str) -> None:
    document = manifest()
    document["spec"] |= {"topology": {"stages": stages, "pipelines": pipelines}, "spread": {"workersPerNode": per_node}}
    found = [warning for warning in warnings(parse_manifest(document)) if "workersPerNode" in warning]
    assert bool(found) is bool(told)
    assert all(told in warning for warning in found)


@pytest.mark.parametrize(
    ("worker", "told"),
    [
        ({}, ""),
        ({"resources": {"limits": {"nvidia.com/gpu": 0}}}, ""),
        ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, ""),
        ({"resources": {"limits": {"nvidia.com/gpu": 8}}}, "a worker uses one of its 8 GPUs; spec.worker.devices 8"),
        ({"resources": {"limits": {"nvidia.com/gpu": 32}}}, "one of its 32 GPUs; more workers with one GPU each"),
        ({"devices": 2, "resources": {"limits": {"amd.com/gpu": "2"}}}, ""),
        (
            {"devices": 2, "resources": {"limits": {"memory": "1Gi"}}},
            "spec.worker.devices 2: spec.worker.resources asks for no GPUs, such as nvidia.com/gpu; on a cluster a",
        ),
    ],
)
def test_devices_without_gpus_and_gpus_without_use_are_warned_of(worker: dict[str, Any], told: str) -> None:
    document = manifest(replicas=3)
    document["spec"]["worker"] = worker
    found = [warning for warning in warnings(parse_manifest(document)) if "GPU" in warning]
    assert bool(found) is bool(told)
    assert all(told in warning for warning in found)


@pytest.mark.parametrize(
    ("gpus", "told"),
    [
        ((2, 2), None),
        ((2, None), "spec.worker.devices 2: node pool b asks for no GPUs, such as nvidia.com/gpu; on a cluster"),
    ],
)
def test_devices_without_gpus_in_a_pool_are_warned_of(gpus: tuple[int | None, ...], told: str | None) -> None:
    document = manifest()
    document["spec"]["worker"] = {"devices": 2}
    document["spec"]["nodePools"] = gpu_pools(*gpus)
    found = [warning for warning in warnings(parse_manifest(document)) if "GPU" in warning]
    assert [warning[: len(told or "")] for warning in found] == ([told] if told else [])


@pytest.mark.parametrize("keeps", [True, False])
def test_money_without_checkpoints_is_warned_of(keeps: bool) -> None:
    document = manifest()
    document["spec"] |= {"budget": {"money": "10"}, "nodePools": [{"name": "spot", "pricePerHour": "1"}]}
    if keeps:
        document["spec"]["checkpoint"] = {"storage": "s3://bucket/x"}
    else:
        document["spec"].pop("checkpoint", None)
    told = [warning for warning in warnings(parse_manifest(document)) if "spec.budget.money without" in warning]
    assert bool(told) is not keeps


@pytest.mark.parametrize(("gpus", "warned"), [(1, False), ("0", False), (None, False), (2, True)])
def test_a_pools_template_that_asks_for_other_gpus_than_devices_is_warned_of(gpus: object, warned: bool) -> None:
    document = manifest(replicas=3)
    resources = {"limits": {"nvidia.com/gpu": gpus}}
    template = {"spec": {"containers": [{"name": "trainer", "resources": resources}]}}
    document["spec"] |= {
        "worker": {"resources": {"limits": {"nvidia.com/gpu": 1}}},
        "nodePools": [{"name": "a"}, {"name": "l4", "template": template}],
    }
    found = [warning for warning in warnings(parse_manifest(document)) if warning.startswith("node pool l4")]
    assert bool(found) is warned


@pytest.mark.parametrize(
    ("pools", "told"),
    [
        ([{}, {"afterSeconds": 60}], []),
        ([{"afterSeconds": 60}], ["node pool n0: afterSeconds has no effect in the first"]),
        ([], []),
    ],
)
def test_what_a_first_pool_says_of_those_before_it_is_warned_of(pools: list[dict[str, Any]], told: list[str]) -> None:
    document = manifest()
    document["spec"]["nodePools"] = [{"name": f"n{number}", **pool} for number, pool in enumerate(pools)]
    found = [warning for warning in warnings(parse_manifest(document)) if "no effect" in warning]
    assert len(found) == len(told)
    assert all(warning.startswith(start) for warning, start in zip(found, told, strict=True))


@pytest.mark.parametrize("name", ["trianer", "Trainer", "trainers", "traner"])
def test_a_container_that_was_to_be_the_workers_is_warned_of(name: str) -> None:
    """It would run beside the worker's, which gets nothing of what it says."""
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
