"""A small job's manifest, for tests that profile its layers."""

from typing import Any

from manifest_kit import bamboojob, training


def manifest(entrypoint: str = "bamboo_trainer.models.bert:build", **config: Any) -> dict[str, Any]:
    task = {"entrypoint": entrypoint, "config": {"size": "tiny", **config}}
    return bamboojob("tiny", task=task, training=training(10, 8, 2), topology={"stages": 2})
