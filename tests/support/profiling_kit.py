"""A small job's manifest, for tests that profile its layers."""

from typing import Any


def manifest(entrypoint: str = "bamboo_trainer.models.bert:build", **config: Any) -> dict[str, Any]:
    return {
        "apiVersion": "bamboo.dev/v1alpha1",
        "kind": "BambooJob",
        "metadata": {"name": "tiny"},
        "spec": {
            "task": {"entrypoint": entrypoint, "config": {"size": "tiny", **config}},
            "training": {"steps": 10, "globalBatchSize": 8, "microBatchSize": 2},
            "topology": {"stages": 2},
        },
    }
