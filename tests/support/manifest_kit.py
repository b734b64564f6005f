"""Manifests for tests: builders, the smallest manifest and one with nearly every field."""

from copy import deepcopy
from typing import Any

import pytest
import yaml

from bamboo_core.job.manifest import ManifestError, parse_manifest
from bamboo_core.names import GROUP, KIND, VERSION
from folders import ROOT

TEXT = str(ROOT / "LICENSE")  # the text that small language models learn

MINIMAL = """\
apiVersion: bamboo.dev/v1alpha1
kind: BambooJob
metadata: {name: tiny}
spec: {task: {entrypoint: "m:build"}, topology: {stages: 2},
       training: {steps: 10, globalBatchSize: 8, microBatchSize: 2}}
"""

WHOLE = """\
apiVersion: bamboo.dev/v1alpha1
kind: BambooJob
metadata: {name: whole, namespace: team-a, labels: {a: b}, creationTimestamp: 2024-01-01T00:00:00Z}
spec:
  suspend: true
  task: {entrypoint: "a.b:build", config: {rate: 1e-3, sizes: [1, 2.5, null, {deep: true}]},
         initialFrom: {url: "s3://bucket/other", step: 40, drop: ["head.*"]}}
  training: {steps: 100, globalBatchSize: 256, microBatchSize: 8, seed: 7, precision: fp16, parameterPrecision: fp32,
             boundaryPrecision: fp32,
             maxGradientNorm: 1, nonFinite: Skip,
             evaluation: {everySteps: 20, batches: 5, metric: right, goal: Max, patience: 3},
             loggers: [{name: own, type: TensorBoard, config: {folder: "/x"}}],
             deterministic: true, compile: true, gradientGroups: 16}
  topology: {stages: 4, schedule: ZBH1,
             split: [3, 4, 4, 2]}
  elastic: {maxWorkers: 16, minWorkers: 8, minStages: 1, objective: Throughput, stabilizationSeconds: 60}
  redundancy: {mode: None, placement: Host}
  standby: {workers: 1}
  nodePools:
  - {name: spot, capacity: Spot, preset: Karpenter, pricePerHour: "0.91", maxWorkers: 8}
  - {name: fallback, capacity: OnDemand, pricePerHour: "3.06", afterSeconds: 300, maxWorkers: 2,
     template: {spec: {a: 1}}}
  spread: {policy: SingleZone, workersPerNode: 2}
  checkpoint:
    storage: pvc://x
    everySteps: 50
    keepLatest: 2
  worker: {image: "r.io/t:1", resources: {limits: {nvidia.com/gpu: 2, memory: 16Gi}},
           template: {spec: {a: 1}}, devices: 2}
  queue: {name: q, priorityClass: high, growthPriorityClass: low}
  backoffLimit: 2
  progressDeadlineSeconds: 900
  ttlSecondsAfterFinished: 0
status: {step: 3}
"""


def bamboojob(name: str = "test", *, namespace: str | None = None, **spec: Any) -> dict[str, Any]:
    """Return a BambooJob's document. spec: the fields of its `spec`."""
    metadata = {"name": name} if namespace is None else {"name": name, "namespace": namespace}
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": metadata, "spec": spec}


def training(steps: int, batch: int, micro: int, **more: Any) -> dict[str, Any]:
    """Return a manifest's section `training`. batch, micro: samples of a step and of a microbatch."""
    return {"steps": steps, "globalBatchSize": batch, "microBatchSize": micro, **more}


def gpt_task(**config: Any) -> dict[str, Any]:
    """Return the task of a small GPT with dropout, on the text of this checkout's license."""
    usual = {"dModel": 32, "heads": 2, "blocks": 3, "context": 16, "dropout": 0.1, "text": TEXT}
    return {"entrypoint": "bamboo_trainer.models.gpt:build", "config": usual | config}


def mlp_task(**config: Any) -> dict[str, Any]:
    """Return the task of a small model of linear layers."""
    usual = {"width": 16, "blocks": 2, "samples": 32}
    return {"entrypoint": "bamboo_trainer.models.mlp:build", "config": usual | config}


def minimal() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(MINIMAL)
    return document


def gpu_pools(*gpus: int | None) -> list[dict[str, Any]]:
    """Return up to three node pools, a to c. gpus: GPUs that each pool's template requests; None for no template."""
    pools: list[dict[str, Any]] = []
    for name, number in zip("abc", gpus, strict=False):
        trainer = {"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": number}}}
        pools.append({"name": name} | ({} if number is None else {"template": {"spec": {"containers": [trainer]}}}))
    return pools


def problems(document: Any) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(document)
    assert str(caught.value) == "\n".join(map(str, caught.value.problems))
    return [str(problem) for problem in caught.value.problems]


ABSENT = object()


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the minimal manifest with values set at dotted paths; ABSENT removes a field."""
    document = minimal()
    for path, value in changes.items():
        *parents, last = path.split(".")
        at = document
        for name in parents:
            at = at.setdefault(name, {})
        if value is ABSENT:
            del at[last]
        else:
            at[last] = deepcopy(value)
    return document
