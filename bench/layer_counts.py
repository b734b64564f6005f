"""Counts of published models' operations and bytes by layer, for profiles MODEL@DEVICE (`bamboo.profiles.analytic`).

    python bench/layer_counts.py              # client/bamboo/profiles/counts/*.json
    python bench/layer_counts.py --only vgg

Nothing is measured: the script counts operations on tensors without data, in fp32 and (for MODEL-bf16) in bf16.
Microbatches are as large as those of the profiles that `bench/profiles.py` writes.
"""

from typing import Annotated, Any

import msgspec
import typer

from _common import say, show
from bamboo.local.trainer_calls.task_profile import counts_of
from bamboo.profiles.analytic import LayerCount, TaskCounts
from bamboo.profiles.files import COUNTS
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.profile import ProfiledTask
from bamboo_trainer.profiling import count
from nsdi2023.workloads import WORKLOADS
from profiles import BLOCKS, CONFIGS, microbatch

PRECISIONS = {"": "fp32", "-bf16": "bf16"}


def run(only: Annotated[str | None, typer.Option(help=f"One of {', '.join(CONFIGS)}.")] = None) -> None:
    """Count the operations and bytes of each model's layers, and write a file for each model and precision."""
    rows = []
    COUNTS.mkdir(exist_ok=True)
    for name in (name for name in CONFIGS if only in (None, name)):
        for suffix, precision in PRECISIONS.items():
            say(name + suffix)
            found = counted(name, name + suffix, precision)
            content = msgspec.json.encode(found)
            (COUNTS / f"{name}{suffix}.json").write_bytes(content + b"\n")
            operations = sum(
                layer.times * op[1] * op[3] for layer in found.layers for op in (*layer.forward, *layer.backward)
            )
            rows.append(
                [name + suffix, str(found.samples), f"{operations / found.samples / 1e9:.1f}", str(len(content))]
            )
    show("counts", ["model", "samples", "10^9 operations a sample", "bytes"], rows)


def counted(name: str, called: str, precision: str) -> TaskCounts:
    """Count a model's layers: equal blocks once, equal neighbours as one entry. called: the result's name."""
    entrypoint, config = CONFIGS[name]
    blocks = BLOCKS.get(name)
    samples = microbatch(WORKLOADS[name])
    manifest = _manifest(entrypoint, config if blocks is None else {**config, "blocks": 1}, samples, precision)
    found = counts_of(parse_manifest(manifest), count(manifest))
    replace = msgspec.structs.replace
    layers = list(found.layers)
    if blocks is not None:
        layers[1] = replace(layers[1], times=blocks)
    task = ProfiledTask(entrypoint=entrypoint, config=config, precision=precision)
    kept: list[LayerCount] = []
    for layer in layers:
        if kept and replace(kept[-1], times=layer.times) == layer:
            kept[-1] = replace(layer, times=kept[-1].times + layer.times)
        else:
            kept.append(layer)
    return replace(found, name=called, layers=tuple(kept), task=task)


def _manifest(entrypoint: str, config: dict[str, Any], samples: int, precision: str) -> dict[str, Any]:
    return {
        "apiVersion": "bamboo.dev/v1alpha1",
        "kind": "BambooJob",
        "metadata": {"name": "counts"},
        "spec": {
            "task": {"entrypoint": entrypoint, "config": config},
            "training": {
                "steps": 1,
                "globalBatchSize": samples,
                "microBatchSize": samples,
                "precision": precision,
            },
            "topology": {"stages": 1},
        },
    }


if __name__ == "__main__":
    typer.run(run)
