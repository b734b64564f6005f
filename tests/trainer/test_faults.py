"""Real processes and sockets: workers killed or frozen at chosen instructions, and at random; weights bit-equal."""

import itertools
import json
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import borrowed_worker
from bamboo_core.checkpoint.layout import part_name
from bamboo_core.coordinator.events import Outcome
from bamboo_core.planning.plan import Cell
from folders import TASK_PATH
from manifest_kit import bamboojob, gpt_task, training
from processes import Processes, one_launcher, run, run_slowly, run_with_cut_flows, run_with_faults

pytestmark = pytest.mark.timeout(400)  # the first one runs the references, too
STEPS = 12
SECONDS = 180.0  # for jobs with many workers


def manifest(
    stages: int = 4,
    pipelines: int = 1,
    mixed: bool = False,
    standby: int = 1,
    mode: str = "Replicas",
) -> dict[str, Any]:
    """mixed: bf16 products, and tied embeddings."""
    return bamboojob(
        task=gpt_task(blocks=max(3, stages - 2), tieEmbeddings=mixed),
        training=training(STEPS, 8, 2, maxGradientNorm=1.0, precision="bf16" if mixed else "fp32"),
        topology={"stages": stages, "pipelines": pipelines},
        redundancy={"mode": mode},
        standby={"workers": standby},
    )


@pytest.fixture(scope="module", autouse=True)
def _launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_launcher(tmp_path_factory.mktemp("launcher")):
        yield


@pytest.fixture(autouse=True)
def _tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers find the tests' own."""
    monkeypatch.setenv("PYTHONPATH", TASK_PATH)


def test_what_a_worker_is_to_run_is_not_written_again_while_it_may_be_read(tmp_path: Path) -> None:
    """Of two replacements, started one after the other, the first then found half of it, failed, and was restarted."""
    log = tmp_path / "log"
    borrowed_worker.describe(tmp_path, "token", main=None, log=log)
    (written,) = tmp_path.iterdir()
    os.utime(written, ns=(0, 0))
    borrowed_worker.describe(tmp_path, "token", main=None, log=log)
    assert list(tmp_path.iterdir()) == [written]
    assert written.stat().st_mtime_ns == 0, "it was written again"
    assert json.loads(written.read_text())["log"] == str(log)


Shape = tuple[int, int, bool]
SHAPES: list[Shape] = [(4, 1, False), (2, 2, False), (4, 1, True)]
LARGE: list[Shape] = [(8, 1, False), (4, 2, False)]


class References(dict[Shape, Processes]):
    """The undisturbed jobs, each of which is run when it is first asked for."""

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
    """Of the root, and of others. tests/trainer/test_engine.py strikes at every instruction, without processes."""
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


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_a_node_is_lost_with_both_its_workers(
    stage: int, references: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get SIGKILL in the same instant. They are no neighbours, so their stages are taken over in mid-step."""
    document = manifest(standby=0)  # so that all nodes are full
    document["spec"]["spread"] = {"workersPerNode": 2}
    lost = []

    def decide(job: Processes) -> None:
        if job.state.step >= 5 and not job.acted and job.state.plan:
            owner = job.owner(0, stage)
            workers = [owner, *job.places.lost_with(owner, job.pool.alive)]
            lost.extend(s for s in range(4) if job.owner(0, s) in workers)
            for worker in workers:
                job.signal(worker)

    job = run_slowly(document, tmp_path, monkeypatch, decide, since=5, until=lambda job: bool(job.acted))
    assert_same(job, references[4, 1, False])
    assert (len(job.acted), job.state.membership.preemptions, job.state.ends.restarts) == (2, 2, 0), (
        job.exits,
        job.pool.tail(40),
    )
    assert lost in ([0, 2], [1, 3])


@pytest.mark.slow
@pytest.mark.parametrize("part", [2, 3])
def test_a_worker_with_two_devices_is_lost_as_one(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed in a backward of either part of its stage, and the other worker repeats both."""
    document = manifest(2)
    document["spec"]["topology"]["split"] = [2, 3]
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    reference = run(document, folders[0])
    document["spec"]["worker"] = {"devices": 2}
    fault = ("Backward", 0, part, 5, 3, signal.SIGKILL)
    job = run_with_faults(document, folders[1], monkeypatch, fault)
    assert_same(job, reference)
    assert (job.state.membership.preemptions, job.state.ends.restarts) == (1, 0)


@pytest.mark.slow
def test_who_lives_goes_back_to_a_checkpoint_with_its_copies_and_does_not_read_their_files(
    references: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All who hold a stage are lost. The files of all layers that others have copies of are damaged before."""
    store, document = tmp_path / "store", manifest()
    document["spec"]["checkpoint"] = {"storage": store.as_uri(), "everySteps": 4}
    in_memory: set[int] = set()

    def decide(job: Processes) -> None:
        kept = job.state.checkpoints.kept
        if job.acted or job.state.step < 5 or not kept or is_tidying(job):
            return
        victims = set(job.state.current_plan.at(Cell(0, 2)).holders)
        copies = job.state.copies.held[kept[0]]
        in_memory.update(layer for worker, layers in copies.items() if worker not in victims for layer in layers)
        folder = next(store.glob(f"step-*{kept[0].id}"))
        for layer in in_memory:
            file = folder / part_name(layer)
            file.write_bytes(bytes(file.stat().st_size))
        for worker in victims:
            job.signal(worker)

    job = run_slowly(document, tmp_path, monkeypatch, decide, since=5, until=lambda job: bool(job.acted))
    assert_same(job, references[4, 1, False])
    assert any(e.reason == "RolledBack" for e in job.emitted), [(e.reason, e.message) for e in job.emitted]
    (told,) = [e.message for e in job.emitted if e.reason == "RolledBack"]
    assert f"{len(in_memory)} of 5 layers from memory" in told
    assert sum(job.state.checkpoints.counts.restores.values()) == 1


def is_tidying(job: Processes) -> bool:
    return job.state.checkpoints.tidying is not None or bool(job.state.checkpoints.writers)


@pytest.mark.slow
@pytest.mark.parametrize("healer", [True, False], ids=["the healer", "the one that feeds it"])
def test_a_loss_during_healing_leaves_the_bits(
    healer: bool, references: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The healer dies while it is being filled; or its feeder, between the decision to move the stage and the move."""
    owners: set[str] = set()

    def decide(job: Processes) -> None:
        plan = job.state.plan
        if job.state.step >= 3 and not job.acted and plan:
            owners.update(plan.at(c).owner for c in plan.cells())
            job.signal(job.owner(0, 2))
        if len(job.acted) != 1 or plan is None:
            return
        newcomers = {w for c in plan.cells() for w in plan.at(c).replicas} - owners
        if healer and plan.reason == "Replicating" and newcomers:  # the standby worker may not have joined yet
            job.signal(min(newcomers))
        if not healer and plan.reason == "Healed":
            feeders = [a.shadow for a in map(plan.at, plan.cells()) if a.owner not in owners]
            job.signal(str(feeders[0]))

    job = run_slowly(manifest(), tmp_path, monkeypatch, decide, since=3, until=lambda job: len(job.acted) == 2)
    assert_same(job, references[4, 1, False])
    assert len(job.acted) == 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_single_connections_lost_at_random_leave_the_bits(
    seed: int, references: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of links of several, within bodies: as if the whole link had been lost."""
    shape = SHAPES[seed % len(SHAPES)]
    job = run_with_cut_flows(manifest(*shape), tmp_path, monkeypatch, seed)
    assert_same(job, references[shape])
    assert job.state.membership.preemptions == 0


def soak_seeds() -> list[int]:
    return list(range(int(os.environ.get("BAMBOO_SOAK", "50"))))


def survivable(job: Processes, victims: set[str]) -> bool:
    """Does every cell keep a worker that holds its state? Nobody who was struck before counts, gone or not."""
    plan, struck = job.state.plan, victims | set(job.acted)
    assert plan is not None
    return all(
        {plan.at(c).owner, *(w for w in plan.at(c).replicas if (c, w) in job.state.plans.synced)} - struck
        for c in plan.cells()
    )


@dataclass(frozen=True, slots=True)
class Burst:
    """Workers that are struck at once, at the first moment after that step, but for `later`, at which they may be.

    struck: for each its place among the workers that are there, from 0 up to 1, and its signal.
    """

    step: float
    later: int
    struck: tuple[tuple[float, signal.Signals], ...]


def burst(rng: random.Random, step: float, most: int) -> Burst:
    kinds = [signal.SIGKILL] * 6 + [signal.SIGTERM] * 3 + [signal.SIGSTOP] * (most > 1)
    later = next(n for n in itertools.count() if rng.random() < 0.3)
    struck = tuple((rng.random(), rng.choice(kinds)) for _ in range(rng.randint(1, most)))
    return Burst(step, later, struck)


def victims(job: Processes, struck: tuple[tuple[float, signal.Signals], ...]) -> dict[str, signal.Signals]:
    """Nobody without whom the job could not go on."""
    there, found = sorted(set(job.state.workers) - set(job.acted)), dict[str, signal.Signals]()
    for place, number in struck[: len(there)]:
        worker = there.pop(int(place * len(there)))
        if survivable(job, {*found, worker}):
            found[worker] = number
    return found


def disturb(seed: int, shapes: list[Shape], references: References, folder: Path, *, most: int = 1) -> None:
    """Up to three bursts at random moments, each after the job is protected again, of up to `most` workers at once.

    Every third one gets notice; where bursts are larger than one, some are frozen. All is drawn before the job begins,
    so that a seed means the same whatever the machine's speed; which event comes when is still the machine's.
    """
    rng = random.Random(seed)
    shape = rng.choice(shapes)
    standby = rng.randint(0, 2)
    steps = sorted(rng.uniform(1, STEPS - 2) for _ in range(rng.randint(1, 3)))
    left = [burst(rng, step, most) for step in steps]
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
        passed = 0
        for worker, number in sorted(victims(job, left.pop(0).struck).items()):
            job.signal(worker, number)

    document = manifest(*shape, standby=standby)
    assert_same(run(document, folder, decide, seconds=SECONDS), references[shape])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_losses_leave_the_bits(seed: int, references: References, tmp_path: Path) -> None:
    disturb(1000 + seed, SHAPES, references, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("seed", soak_seeds())
def test_random_losses_of_new_seeds_leave_the_bits(seed: int, references: References, tmp_path: Path) -> None:
    disturb(seed, SHAPES, references, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("seed", soak_seeds())
def test_bursts_of_losses_leave_the_bits(seed: int, references: References, tmp_path: Path) -> None:
    """8 workers, of which up to 3 go at once."""
    disturb(seed, LARGE, references, tmp_path, most=3)
