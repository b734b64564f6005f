"""Jobs with real processes and sockets, whose workers are killed, frozen or given notice: the bits stay the same."""

import itertools
import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bamboo_core.coordinator.events import Outcome
from folders import TASK_PATH
from manifest_kit import bamboojob, gpt_task, training
from processes import Processes, run, run_slowly, run_with_faults

pytestmark = pytest.mark.timeout(400)  # the first one runs the references, too
STEPS = 12
SECONDS = 180.0  # for jobs with many workers


def manifest(
    stages: int = 4,
    pipelines: int = 1,
    mixed: bool = False,
    standby: int = 1,
) -> dict[str, Any]:
    """Return the manifest of a small GPT. mixed: with bf16 autocast and tied embeddings."""
    return bamboojob(
        task=gpt_task(blocks=max(3, stages - 2), tieEmbeddings=mixed),
        training=training(STEPS, 8, 2, maxGradientNorm=1.0, precision="bf16" if mixed else "fp32"),
        topology={"stages": stages, "pipelines": pipelines},
        redundancy={"mode": "Replicas"},
        standby={"workers": standby},
    )


@pytest.fixture(autouse=True)
def _tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let worker processes import the tests' own tasks."""
    monkeypatch.setenv("PYTHONPATH", TASK_PATH, prepend=os.pathsep)


Shape = tuple[int, int, bool]
SHAPES: list[Shape] = [(4, 1, False), (2, 2, False), (4, 1, True)]


class References(dict[Shape, Processes]):
    """The undisturbed jobs by shape (stages, pipelines, mixed); each one runs when it is first looked up."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self._factory = factory

    def __missing__(self, shape: Shape) -> Processes:
        self[shape] = run(manifest(*shape), self._factory.mktemp("reference"), seconds=SECONDS)
        return self[shape]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory)


def assert_same(job: Processes, reference: Processes) -> None:
    assert job.outcome is Outcome.COMPLETE, job.emitted
    assert job.state.progress.losses == reference.state.progress.losses
    by_cell = dict(reference.state.ending.finished)
    assert dict(job.state.ending.finished) == by_cell
    assert not job.pool.alive


@pytest.mark.parametrize(
    "fault",
    [
        ("Backward", 0, 0, 5, 3),
        *(pytest.param((name, 0, 2, 5, 0), marks=pytest.mark.slow) for name in ("SyncReplicas", "OptimizerStep")),
    ],
    ids=lambda fault: fault[0],
)
def test_a_sigkill_at_an_instruction_leaves_the_bits(
    fault: tuple[str, int, int, int, int], references: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test kills the root or another worker. test_engine.py kills at each kind of instruction, in virtual time."""
    job = run_with_faults(manifest(), tmp_path, monkeypatch, (*fault, signal.SIGKILL))
    assert_same(job, references[4, 1, False])
    assert job.state.membership.preemptions == 1


def test_a_frozen_worker_is_declared_lost_and_fenced_when_it_wakes(
    references: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decide(job: Processes) -> None:
        if job.state.step >= 4 and not job.acted and job.state.plan:
            job.signal(job.owner(0, 2), signal.SIGSTOP)
        if job.state.moves.takeovers and len(job.acted) == 1:
            job.signal(job.acted[0], signal.SIGCONT)

    job = run_slowly(manifest(), tmp_path, monkeypatch, decide, since=4, until=lambda job: len(job.acted) == 2)
    assert_same(job, references[4, 1, False])
    # If the machine itself stood still meanwhile, its channel may have been closed first.
    silent = tuple(f"{job.acted[0]} is lost: {text}" for text in ("no heartbeat", "its control channel stays closed"))
    assert any(e.reason == "WorkerLost" and e.message.startswith(silent) for e in job.emitted)


def test_sigterm_is_a_notice(references: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(job: Processes) -> None:
        if job.state.step >= 3 and not job.acted and job.state.plan:
            job.signal(job.owner(0, 1), signal.SIGTERM)

    def heard(job: Processes) -> bool:
        return any(e.reason == "PlannedTakeover" for e in job.emitted)

    job = run_slowly(manifest(), tmp_path, monkeypatch, decide, since=3, until=heard)
    assert_same(job, references[4, 1, False])
    assert heard(job)
    assert job.exits[job.acted[0]] == 0


def soak_seeds() -> list[int]:
    return list(range(int(os.environ.get("BAMBOO_SOAK", "50"))))


def survivable(job: Processes, victims: set[str]) -> bool:
    """Return whether every cell keeps a worker with its state if the victims are lost. Workers that were struck before
    count as lost, too, even if they live.
    """
    plan, struck = job.state.plan, victims | set(job.acted)
    assert plan is not None
    return all(
        {plan.at(c).owner, *(w for w in plan.at(c).replicas if (c, w) in job.state.plans.synced)} - struck
        for c in plan.cells()
    )


@dataclass(frozen=True, slots=True)
class Loss:
    """A signal to a worker after `step`. later: number of events to let pass first while the job is protected.

    place: the worker's place among the workers without a signal so far, as a fraction: at least 0, less than 1.
    """

    step: float
    later: int
    place: float
    signal: signal.Signals


def drawn(rng: random.Random, step: float) -> Loss:
    later = next(n for n in itertools.count() if rng.random() < 0.3)
    kinds = [signal.SIGKILL] * 6 + [signal.SIGTERM] * 3
    return Loss(step, later, rng.random(), rng.choice(kinds))


def disturb(seed: int, references: References, folder: Path) -> None:
    """Run a job in which up to three workers get SIGKILL, or SIGTERM as notice, and check its bits.

    All random choices are made before the job begins, so a seed means the same at any speed of the machine, except for
    the order of events. Each signal waits until the job is protected again.
    """
    rng = random.Random(seed)
    shape = rng.choice(SHAPES)
    standby = rng.randint(0, 2)
    left = [drawn(rng, step) for step in sorted(rng.uniform(1, STEPS - 2) for _ in range(rng.randint(1, 3)))]
    print(f"seed {seed}: {shape=} {standby=}", *left, sep="\n")  # shown if the test fails
    passed = 0

    def decide(job: Processes) -> None:
        nonlocal passed
        plan = job.state.plan
        if plan is None or not left or job.state.step < left[0].step or job.state.phase != "Running":
            return
        covered = all(any((c, w) in job.state.plans.synced for w in plan.at(c).replicas) for c in plan.cells())
        if not covered or not plan.worker_ids() <= job.state.plans.applied:
            return
        if passed < left[0].later:
            passed += 1
            return
        passed, loss = 0, left.pop(0)
        there = sorted(set(job.state.workers) - set(job.acted))
        worker = there[int(loss.place * len(there))]
        if survivable(job, {worker}):
            job.signal(worker, loss.signal)

    document = manifest(*shape, standby=standby)
    assert_same(run(document, folder, decide, seconds=SECONDS), references[shape])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_losses_leave_the_bits(seed: int, references: References, tmp_path: Path) -> None:
    disturb(1000 + seed, references, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("seed", soak_seeds())
def test_random_losses_of_new_seeds_leave_the_bits(seed: int, references: References, tmp_path: Path) -> None:
    disturb(seed, references, tmp_path)
