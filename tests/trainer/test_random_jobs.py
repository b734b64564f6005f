"""Jobs drawn at random, models, grids and disasters: the bits of one worker that nothing happens to, as plain PyTorch.

One job by hand: BAMBOO_RANDOM_JOBS=12:13 python -m pytest tests/trainer/test_random_jobs.py -m slow
"""

import os
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from bamboo_core.coordinator.events import Interrupted, Outcome
from bamboo_core.job.manifest import parse_manifest
from bamboo_trainer.checkpoint.layer_file import decode
from bamboo_trainer.loading import load_task
from bamboo_trainer.reference import train
from bamboo_trainer.tasks.inspection.sharing import settled
from bamboo_trainer.training import TrainingConfig
from manifest_kit import bamboojob
from training_job import Job, MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # bf16 norms

STEPS, MICROBATCHES = 6, 6
FIRST, END = (int(one) for one in os.environ.get("BAMBOO_RANDOM_JOBS", "0:40").split(":"))


@dataclass
class Disaster:
    """Kills workers some turns after a step began, and suspends the job. at: by step, how many turns, and of whom."""

    at: dict[int, tuple[int, str]]
    suspend: tuple[int, int] | None = None  # step and turns
    rng: random.Random = field(default_factory=random.Random)
    done: list[str] = field(default_factory=list)
    _since: tuple[int, int] = (-1, 0)  # the newest step, and in which turn it was first seen

    def __call__(self, job: Job) -> None:
        plan = job.state.plan
        if plan is None or job.state.phase != "Running":
            return
        if job.state.step > self._since[0]:
            self._since = (job.state.step, job.turns)
        step, waited = job.state.step, job.turns - self._since[1]
        if self.suspend and (step, waited) >= self.suspend:
            self.suspend = None
            job.inbox.append(Interrupted(reason="Suspended", keep=True))
        due = [at for at, (turns, _) in self.at.items() if (step, waited) >= (at, turns)]
        for at in due:
            _, whom = self.at.pop(at)
            workers = sorted(name for name, node in job.nodes.items() if node.alive and name in plan.worker_ids())
            if whom == "one":
                workers = self.rng.sample(workers, min(1, len(workers)))
            elif whom == "stage":
                cell = self.rng.choice(plan.cells())
                workers = sorted({w for c in plan.cells() if c.stage == cell.stage for w in plan.at(c).holders})
            self.done.append(f"{whom} at {step}+{waited}")
            for worker in workers:
                job.kill(worker) if whom != "notice" else job.notice(worker)


class RandomJob:
    """What one seed draws: the task and its training, and a grid, checkpoints and disasters for one run of it."""

    def __init__(self, seed: int) -> None:
        rng, self.number = random.Random(seed), seed
        self.rng = rng
        self.schedule = random.Random(f"{seed} schedule").choice(["1F1B", "ZBH1"])
        self.task = {"entrypoint": "random_model_kit:build", "config": {"model": seed, "steps": STEPS}}
        self.training: dict[str, Any] = {
            "steps": STEPS,
            "globalBatchSize": 2 * MICROBATCHES,
            "microBatchSize": 2,
            "seed": rng.randrange(100),
            "gradientGroups": rng.choice([2, 3, 6]),
        }
        if rng.random() < 0.5:
            self.training["maxGradientNorm"] = rng.choice([0.1, 1.0])
        precision = rng.choice(["fp32", "fp32", "fp32", "bf16", "bf16 parameters", "fp16"])
        if precision != "fp32":
            self.training["precision"] = precision.split()[0]
        if precision == "bf16 parameters":
            self.training["parameterPrecision"] = "bf16"
        if rng.random() < 0.3:
            self.training["emaDecay"] = 0.9
        if rng.random() < 0.3:
            self.training["evaluation"] = {"everySteps": 2}

    def alone(self) -> dict[str, Any]:
        """On one worker."""
        return bamboojob(
            task=self.task,
            training=self.training,
            topology={"stages": 1},
            redundancy={"mode": "None"},
            checkpoint={"storage": {"uri": "memory://x"}, "everySteps": 1000},
        )

    def disturbed(self, every: int) -> dict[str, Any]:
        """On a grid of its own."""
        rng = self.rng
        layers, groups = len(load_task(**self.task).layers), int(self.training["gradientGroups"])
        grids = [(p, d) for p in range(1, layers + 1) for d in range(1, groups + 1) if p * d <= 8]
        stages, pipelines = rng.choice(grids)
        mode = rng.choice(["None", "LazyForward", "LazyForward", "EagerForward", "EagerBackward"])
        replicas = rng.choice([1, 2]) if stages > 2 and mode != "None" else 1
        fixed = random.Random(f"{self.number} grids").choice(({}, {"stages": stages}, {"pipelines": pipelines}))
        return bamboojob(
            task=self.task,
            training=self.training,
            topology={**fixed, "schedule": self.schedule},
            redundancy={"mode": mode, "replicas": replicas, "placement": rng.choice(["Device", "Host"])},
            standby={"workers": rng.choice([0, 0, 1])},
            elastic={"maxWorkers": stages * pipelines, "stabilizationSeconds": 0},
            checkpoint={
                "storage": {"uri": "memory://x"},
                "everySteps": every,
            },
        )

    def disaster(self, *, suspended: bool) -> Disaster:
        rng = self.rng
        whom = ["one", "one", "stage", "all", "notice"]
        at = {rng.randrange(STEPS): (rng.randrange(12), rng.choice(whom)) for _ in range(rng.choice([0, 1, 2]))}
        return Disaster(at, (rng.randrange(1, STEPS), rng.randrange(12)) if suspended else None, rng)


def complete(job: Job) -> Job:
    assert job.run().finish is not None
    assert job.finish.outcome is Outcome.COMPLETE, (job.finish, job.emitted[-5:])
    return job


def last_state(job: Job) -> dict[int, bytes]:
    """The files of the last checkpoint, by layer: parameters, buffers, averages, what the optimizer remembers."""
    last = max(job.store.committed)
    assert last.step == STEPS
    return {layer: data for (checkpoint, layer), data in job.store.files.items() if checkpoint == last}


def check_as_plain_pytorch(drawn: RandomJob, job: Job) -> None:
    """Within rounding: sums are in another order, and numbers of 16 bits are rounded after each step."""
    spec = parse_manifest(job.manifest).training
    task = settled(load_task(**drawn.task), spec.seed)
    losses, state = train(task, TrainingConfig.of(spec), STEPS)
    short = "precision" in drawn.training
    for step, loss in job.state.progress.losses.items():
        assert loss == pytest.approx(losses[step], rel=2e-2 if short else 1e-4)
    if short:
        return
    for layer, data in last_state(job).items():
        held = decode(data)
        for name, key in held.names.items():
            if layer == int(key.partition(":")[2].partition(".")[0]):
                torch.testing.assert_close(held.tensors[key], state[f"layers.{layer}.{name}"], rtol=1e-3, atol=1e-4)


def check(seed: int) -> None:
    drawn = RandomJob(seed)
    calm = complete(Job(drawn.alone()))
    check_as_plain_pytorch(drawn, calm)
    store, rng = MemoryStore(), drawn.rng
    losses, evaluations = {}, {}
    for disaster in (drawn.disaster(suspended=rng.random() < 0.5), drawn.disaster(suspended=False), Disaster({})):
        job = Job(drawn.disturbed(rng.choice([1, 2, 1000])), decide=disaster, store=store).run()
        losses, evaluations = losses | job.state.progress.losses, evaluations | job.state.progress.evaluations
        assert job.finish is not None
        if job.finish.outcome is Outcome.COMPLETE:
            break  # else it goes on, on another grid
        lost = job.finish.outcome is Outcome.UNRECOVERABLE and not store.committed  # as it must be
        assert job.finish.outcome is Outcome.INTERRUPTED or lost, (job.finish, job.emitted[-5:])
    assert job.finish.outcome is Outcome.COMPLETE
    assert losses == calm.state.progress.losses
    assert evaluations == calm.state.progress.evaluations
    assert last_state(job) == last_state(calm)


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_job_ends_with_the_same_bits_whatever_is_drawn(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST, END))
def test_many_jobs_end_with_the_same_bits(seed: int) -> None:
    check(seed)
