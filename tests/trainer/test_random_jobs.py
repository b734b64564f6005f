"""Jobs drawn at random (rows of test_same_bits.py, grids, lost workers), with the bits of one undisturbed worker.

To run the job of seed 12: BAMBOO_RANDOM_JOBS=12:13 python -m pytest tests/trainer/test_random_jobs.py -m slow
"""

import os
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import test_same_bits
from test_same_bits import NUMBERS, ROWS, Table

from bamboo_core.coordinator.events import Interrupted, Outcome
from training_job import Job, MemoryStore

pytestmark = test_same_bits.pytestmark
NAMES = [name for name, row in ROWS.items() if not row.plain and "compiled" not in name]  # to compile takes long
FIRST, END = (int(one) for one in os.environ.get("BAMBOO_RANDOM_JOBS", "1:40").split(":"))


@dataclass
class Disaster:
    """A hook that kills workers N turns of the job's loop after a step began, and may suspend the job. at: by step, N
    and the victims: "one" worker, the holders of a "stage", or "all" workers; with "notice", all get a notice instead.
    """

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
            job.inbox.append(Interrupted(reason="Suspended"))
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
    """The job that a seed draws: a row of the table, and grids, checkpoints and disasters for its runs."""

    def __init__(self, seed: int, table: Table) -> None:
        self.rng, self.table = random.Random(seed), table
        self.name = self.rng.choice(NAMES)
        self.row = ROWS[self.name]

    def document(self, every: int, **spec: Any) -> dict[str, Any]:
        kept = {"storage": "memory://x", "everySteps": every, **spec.pop("checkpoint", {})}
        return self.table.document(self.name, (1, 1), checkpoint=kept, **spec)

    def alone(self) -> dict[str, Any]:
        """Return the manifest of the job on one worker."""
        return self.document(1000, redundancy={"mode": "None"}, **(self.row.alone or {}))

    def disturbed(self, every: int) -> dict[str, Any]:
        """Return the manifest of the job on a drawn grid; the job may choose its stages, its pipelines, or both."""
        rng, most = self.rng, (self.row.deep, self.row.wide[1])
        grids = [(p, d) for p in range(1, most[0] + 1) for d in range(1, most[1] + 1) if p * d <= 8]
        stages, pipelines = rng.choice(grids)
        mode = rng.choice(["None", "Auto", "Replicas", "Replicas", "Replicas"])
        replicas = rng.choice([1, 2]) if stages > 2 and mode != "None" else 1
        document = self.document(
            every,
            redundancy={"mode": mode, "replicas": replicas, "placement": rng.choice(["Device", "Host"])},
            standby={"workers": rng.choice([0, 0, 1])},
            elastic={"maxWorkers": stages * pipelines, "stabilizationSeconds": 0},
        )
        fixed = rng.choice(({}, {"stages": stages}, {"pipelines": pipelines}))
        schedule = {"schedule": document["spec"]["topology"].get("schedule", "1F1B")}
        document["spec"]["topology"] = {**fixed, **schedule}
        return document

    def disaster(self, *, suspended: bool) -> Disaster:
        rng, steps = self.rng, (self.row.numbers or NUMBERS)["steps"]
        whom = ["one", "one", "stage", "all", "notice"]
        at = {rng.randrange(steps): (rng.randrange(12), rng.choice(whom)) for _ in range(rng.choice([0, 1, 2]))}
        return Disaster(at, (rng.randrange(1, steps), rng.randrange(12)) if suspended else None, rng)


def last_state(job: Job) -> dict[int, bytes]:
    """Return the last checkpoint's files by layer: parameters, buffers, and the optimizer's state."""
    last = max(job.store.committed)
    return {layer: data for (checkpoint, layer), data in job.store.files.items() if checkpoint == last}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    return Table(tmp_path_factory)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(FIRST, END))])
def test_a_job_ends_with_the_same_bits_whatever_is_drawn(seed: int, table: Table) -> None:
    drawn = RandomJob(seed, table)
    calm = Job(drawn.alone()).run()
    assert calm.outcome is Outcome.COMPLETE, (calm.finish, calm.emitted[-5:])
    store, rng = MemoryStore(), drawn.rng
    losses, evaluations = {}, {}
    for disaster in (drawn.disaster(suspended=rng.random() < 0.5), drawn.disaster(suspended=False), Disaster({})):
        job = Job(drawn.disturbed(rng.choice([1, 2, 1000])), decide=disaster, store=store).run()
        losses, evaluations = losses | job.state.progress.losses, evaluations | job.state.progress.evaluations
        if job.end.outcome is Outcome.COMPLETE:
            break  # else it goes on, on another grid
        lost = job.end.outcome is Outcome.UNRECOVERABLE and not store.committed  # as it must be
        assert job.end.outcome is Outcome.INTERRUPTED or lost, (job.finish, job.emitted[-5:])
    assert job.end.outcome is Outcome.COMPLETE
    assert losses == calm.state.progress.losses
    assert evaluations == calm.state.progress.evaluations
    assert last_state(job) == last_state(calm)
