"""What `training.deterministic: true` costs: steps of one stage with it and without it, in turns.

    python bench/deterministic.py [--model gpt2 --model resnet] [--size tiny] [--precision bf16] [--rounds 5]

Each measurement is a process of its own, since cuBLAS reads its setting once, on the device that a worker would take
(BAMBOO_DEVICE, or a GPU if there is one; of a CPU, CPU time counts). Prints the median time of a step of four
microbatches and the spread of the rounds, the ratio of the shortest ones, and how long the look before the first step
takes, which only `true` has. On a CPU nothing else is switched, so the ratio only shows what the measurement is worth.
"""

import json
import subprocess
import sys
import time
from statistics import median
from typing import Annotated

import torch
import typer

from bamboo_core.job.training_spec import LossScaleSpec
from bamboo_trainer.loading import load_task
from bamboo_trainer.memory.placement import choose_device, use, wait_for
from bamboo_trainer.stage.stage import Stage, build_stage
from bamboo_trainer.tasks.inspection.sharing import settled
from bamboo_trainer.training import TrainingConfig

MICROBATCHES = 4
WARMUP, MEASURED = 10, 40
TIMEOUT_SECONDS = 600


def run(
    model: Annotated[list[str] | None, typer.Option(help="Of the library: gpt2, bert, llama, resnet, vgg, …")] = None,
    size: str = "tiny",
    precision: str = "fp32",
    samples: Annotated[int, typer.Option(help="Of a microbatch.")] = 4,
    rounds: int = 5,
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    if child:
        assert model
        print(json.dumps(measure(model[0], size, precision, samples, deterministic=child == "true")))
        return
    device = choose_device("bench-0")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, one thread"
    print(f"{name}, torch {torch.__version__}, {precision}, {size}, {rounds} rounds")
    for one in model or ["gpt2", "resnet"]:
        arguments = ["--model", one, "--size", size, "--precision", precision, "--samples", str(samples)]
        found: dict[str, list[dict[str, float]]] = {"true": [], "false": []}
        for _ in range(rounds):
            for setting, results in found.items():
                results.append(in_a_process([*arguments, "--child", setting]))
        show(one, found)


def show(model: str, found: dict[str, list[dict[str, float]]]) -> None:
    steps = {setting: [result["step"] for result in results] for setting, results in found.items()}
    for setting, seconds in steps.items():
        low, high = (1e3 * edge for edge in (min(seconds), max(seconds)))
        print(f"{model:8} deterministic {setting:5} {1e3 * median(seconds):8.1f} ms a step ({low:.1f} to {high:.1f})")
    look = median(result["look"] for result in found["true"])
    ratio = min(steps["true"]) / min(steps["false"])  # on a busy machine the others tell of other processes
    print(f"{model:8} true / false {ratio:.3f} of the shortest; the look before the first step {1e3 * look:.0f} ms")


def in_a_process(arguments: list[str]) -> dict[str, float]:
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(model: str, size: str, precision: str, samples: int, *, deterministic: bool) -> dict[str, float]:
    """Seconds of a step, the median of some, and of the look before the first one."""
    torch.set_num_threads(1)
    device = choose_device("bench-0")
    use(device, deterministic=deterministic)
    task = settled(load_task(f"bamboo_trainer.models.{model}:build", {"size": size}), 0)
    config = TrainingConfig(
        seed=0,
        precision=precision,
        max_gradient_norm=1.0,
        microbatches=MICROBATCHES,
        micro_batch_size=samples,
        loss_scale=LossScaleSpec() if precision == "fp16" else None,
        deterministic=deterministic,
    )
    stage = build_stage(task, 0, [(0, len(task.layers))], config, device)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    began = clock()
    stage.look(0, 0, None)
    wait_for(device)
    look = clock() - began
    taken = []
    for step in range(WARMUP + MEASURED):
        began = clock()
        train(stage, step)
        wait_for(device)
        taken.append(clock() - began)
    return {"step": median(taken[WARMUP:]), "look": look}


def train(stage: Stage, step: int) -> None:
    """One step, as a worker that has the whole model does it."""
    microbatches = range(MICROBATCHES)
    work = stage.begin(microbatches, [0, MICROBATCHES])
    for number in microbatches:
        stage.forward(work, step, number, None)
        stage.backward(work, step, number, None)
    final = stage.values.final
    gradient = work.gradients.total()[: final.size]
    stage.values.apply(gradient, sum(final.squared_norms(gradient)) ** 0.5, *final.folded(work.contributions))


if __name__ == "__main__":
    typer.run(run)
