"""What do the library's models consist of, how are they split, and what memory do their workers need?

    python bench/models.py                             # the published sizes: counted, nothing is computed
    python bench/models.py --only resnet --stages 8
    python bench/models.py --train                     # the tiny ones: seconds of a step in plain PyTorch

Costs and memory are those that the planner and `bamboo validate --load` count, on tensors without data. A model with an
entrypoint of its own: --entrypoint bamboo_trainer.models.huggingface:build --config '{"architecture": "gpt2"}'.
"""

import json as json_module
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from _common import machine, median, say, show, write_json
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.grid import layer_ranges
from bamboo_trainer.loading import load_task
from bamboo_trainer.memory.estimate import measure, worker_memory
from bamboo_trainer.reference import train as train_plainly
from bamboo_trainer.tasks.inspection.costs import layer_costs
from bamboo_trainer.tasks.inspection.sharing import settled
from bamboo_trainer.training import TrainingConfig

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"size": "xl"},
    "bert": {"size": "large", "data": {"length": 512}},
    "llama": {"size": "3.2-1b", "data": {"length": 2048}},
    "resnet": {"size": "152"},
    "vgg": {"size": "19"},
    "alexnet": {"size": "full"},
    "gnmt": {"size": "16"},
}
STEPS, WARMUP = 6, 2


def run(
    only: Annotated[str | None, typer.Option(help=f"One of {', '.join(MODELS)}.")] = None,
    entrypoint: Annotated[str | None, typer.Option(help="A task of your own instead.")] = None,
    config: Annotated[str, typer.Option(help="Its config, as JSON.")] = "{}",
    stages: Annotated[int, typer.Option(min=1)] = 4,
    samples: Annotated[int, typer.Option(min=1, help="Of a microbatch.")] = 4,
    train: Annotated[bool, typer.Option("--train", help="Train the tiny ones instead.")] = False,
    json: Annotated[Path | None, typer.Option(help='Write the figures to this file, or to "-".')] = None,
) -> None:
    """Count, split and estimate each model, and print a table.

    largest: the costliest layer, of all. balance: the costliest stage over the mean one. None, lazy, eager: GiB of the
    worker that needs most, without redundancy, with it, and while it runs a lost neighbour's stage, too.
    """
    names = [name for name in MODELS if only in (None, name)]
    if not names:
        raise typer.BadParameter(f"expected one of {', '.join(MODELS)}", param_hint="--only")
    chosen = {name: (f"bamboo_trainer.models.{name}:build", MODELS[name]) for name in names}
    if entrypoint is not None:
        chosen = {entrypoint: (entrypoint, json_module.loads(config))}
    figures = []
    for name, (build, given) in chosen.items():
        say(name)
        figures.append(_trained(name, build) if train else _counted(name, (build, given), stages, samples))
    title = f"seconds of a step of {8} samples" if train else f"{stages} stages, microbatches of {samples} samples"
    show(title, list(figures[0]), [[_shown(value) for value in one.values()] for one in figures])
    write_json(json, {"machine": machine(), "stages": stages, "samples": samples, "models": figures})


def _counted(name: str, of: tuple[str, dict[str, Any]], stages: int, samples: int) -> dict[str, Any]:
    entrypoint, config = of
    spec = _spec(entrypoint, config, stages, samples, "EagerForward")
    began = time.monotonic()
    task = settled(load_task(entrypoint, config), 0)
    loaded = time.monotonic()
    costs = layer_costs(task, samples)
    counted = time.monotonic()
    ranges = layer_ranges(costs, spec.topology)
    sizes = measure(task, spec)
    by_stage = [sum(costs[first:end]) for first, end in ranges]
    memory = {
        mode: worker_memory(sizes, ranges, _spec(entrypoint, config, stages, samples, mode), taken_over=taken)[1].total
        for mode, taken in (("None", False), ("LazyForward", False), ("EagerForward", True))
    }
    return {
        "model": f"{name} {config.get('size', '')}",
        "M param.": sum(size.parameters - size.tied for size in sizes) / 1e6,
        "layers": len(sizes),
        "largest, %": 100 * max(costs) / sum(costs),
        "split": " ".join(str(end - first) for first, end in ranges),
        "balance": max(by_stage) / (sum(by_stage) / len(by_stage)),
        "None": memory["None"] / 2**30,
        "lazy": memory["LazyForward"] / 2**30,
        "eager, two": memory["EagerForward"] / 2**30,
        "load, s": loaded - began,
        "count, s": counted - loaded,
    }


def _spec(entrypoint: str, config: dict[str, Any], stages: int, samples: int, mode: str) -> Any:
    return parse_manifest(
        {
            "apiVersion": "bamboo.dev/v1alpha1",
            "kind": "BambooJob",
            "metadata": {"name": "models"},
            "spec": {
                "task": {"entrypoint": entrypoint, "config": config},
                "training": {"steps": 1, "globalBatchSize": samples * 4 * stages, "microBatchSize": samples},
                "topology": {"stages": stages},
                "redundancy": {"mode": mode},
            },
        }
    )


def _trained(name: str, entrypoint: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    task = settled(load_task(entrypoint, {"size": "tiny"}), 0)
    training = TrainingConfig(seed=0, precision="fp32", max_gradient_norm=1.0, microbatches=4, micro_batch_size=2)
    train_plainly(task, training, WARMUP)
    times = []
    for _ in range(STEPS):
        began = time.process_time()
        train_plainly(task, training, WARMUP)
        times.append((time.process_time() - began) / WARMUP)
    return {"model": f"{name} tiny", "CPU ms a step": 1000 * median(times)}


def _shown(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    typer.run(run)
