"""Two manifests that the tests of the parser start from: the smallest one, and one with every field."""

from typing import Any

import pytest
import yaml

from bamboo.job.manifest import ManifestError, parse_manifest

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
  managedBy: kueue.x-k8s.io/multikueue
  task: {entrypoint: "a.b:build", config: {rate: 1e-3, sizes: [1, 2.5, null, {deep: true}]}}
  training: {steps: 100, globalBatchSize: 256, microBatchSize: 8, seed: 7, precision: bf16,
             maxGradientNorm: 1, reproducible: true, gradientGroups: 16}
  topology: {stages: 4, pipelines: 2, lookahead: 2, split: [3, 4, 4, 2]}
  elastic: {minPipelines: 1, maxPipelines: 4, stabilizationSeconds: 60}
  redundancy: {mode: None, placement: Host}
  standby: {workers: 1}
  nodePools:
  - {name: spot, capacity: Spot, preset: Karpenter, pricePerHour: "0.91", maxWorkers: 8}
  - {name: fallback, capacity: OnDemand, pricePerHour: "3.06", afterSeconds: 300, maxWorkers: 2, revert: true}
  spread: {topologyKey: example.com/rack, policy: None}
  checkpoint:
    storage: {persistentVolumeClaim: {claimName: x}}
    everySteps: 50
    keepLatest: 2
    resume: Never
  worker: {image: "r.io/t:1", resources: {limits: {nvidia.com/gpu: 1, memory: 16Gi}},
           template: {spec: {a: 1}}}
  queue: {name: q}
  failurePolicy: {backoffLimit: 2, rules: [{name: oom, onExitCodes: [137], action: RestartWorker}]}
  activeDeadlineSeconds: 86400
  progressDeadlineSeconds: 900
  ttlSecondsAfterFinished: 0
  cleanPodPolicy: All
  disruptionBudget: None
status: {step: 3}
"""


def minimal() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(MINIMAL)
    return document


def problems(document: Any) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(document)
    assert str(caught.value) == "\n".join(map(str, caught.value.problems))
    return [str(problem) for problem in caught.value.problems]
