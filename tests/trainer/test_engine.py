"""Training in one process with the real coordinator and engines: losses and weights, also after a kill anywhere."""

import functools
import math
import os
from typing import Any

import pytest
import torch

from bamboo_core.coordinator.events import Outcome, SpecChanged
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning import transitions
from bamboo_core.planning.plan import Cell, WorkerId
from bamboo_trainer.engine.engine import Engine
from bamboo_trainer.frames import Frame, FrameKind
from bamboo_trainer.loading import load_task
from bamboo_trainer.training import TrainingConfig
from bamboo_trainer.transport.base import LinkUp
from branching_job import BranchingJob, Kind, each_way, kill_at_each, of_name, sweep
from manifest_kit import bamboojob, gpt_task, training
from memory_transport import MemoryTransport
from reference import train
from training_job import Fault, Job, check_same_bits

STEPS = 4


def manifest(
    stages: int,
    pipelines: int,
    *,
    standby: int = 0,
    tied: bool = False,
    mode: str = "Replicas",
    steps: int = STEPS,
    batch: int = 8,
) -> dict[str, Any]:
    return bamboojob(
        task=gpt_task(dModel=16, context=8, tieEmbeddings=tied),
        training=training(steps, batch, 2, maxGradientNorm=1.0),
        topology={"stages": stages, "pipelines": pipelines, "schedule": "1F1B"},
        redundancy={"mode": mode},
        standby={"workers": standby},
    )


@functools.cache
def undisturbed(stages: int, pipelines: int, steps: int = STEPS, batch: int = 8) -> Job:
    return Job(manifest(stages, pipelines, steps=steps, batch=batch)).run()


def assert_same(job: Job, stages: int, pipelines: int) -> None:
    reference = undisturbed(stages, pipelines)
    assert job.outcome is Outcome.COMPLETE, job.emitted
    assert job.state.progress.losses == reference.state.progress.losses
    assert job.digests == reference.digests


@pytest.mark.parametrize(("stages", "pipelines", "tied"), [(1, 1, False), (4, 2, True)])
def test_losses_and_weights_are_those_of_plain_pytorch(stages: int, pipelines: int, tied: bool) -> None:
    """Losses and weights equal PyTorch's but for rounding, since Bamboo's sums have another order."""
    job = Job(manifest(stages, pipelines, tied=tied)).run()
    spec = job.spec
    config = TrainingConfig(seed=0, precision="fp32", max_gradient_norm=1.0, microbatches=4, micro_batch_size=2)
    losses, weights = train(load_task(spec.task.entrypoint, spec.task.config), config, STEPS)
    torch.testing.assert_close(list(job.state.progress.losses.values()), list(losses), rtol=1e-5, atol=1e-6)
    held = job.weights
    for name, expected in weights.items():
        torch.testing.assert_close(held[name], expected, rtol=1e-4, atol=1e-5)


def test_a_kill_at_each_kind_of_instruction_leaves_the_bits() -> None:
    """The grid 3 x 2 is the smallest in which a stage has two neighbours and a sibling (same stage, other pipeline)."""
    undisturbed(3, 2)
    killed = kill_at_each(manifest(3, 2), lambda f: f.step == 2, lambda job: assert_same(job, 3, 2), of_name)
    assert {"Forward", "Backward", "SyncReplicas", "ReportReady", "OptimizerStep"} <= {f.name for f in killed}


@sweep(of_name)
def test_a_standby_holds_all_that_the_only_worker_holds(kind: Kind | None) -> None:
    """A standby with the only worker's state takes over when that worker is killed before an instruction of a step."""
    document = manifest(1, 1, standby=1, steps=8)
    expected, of_standby = undisturbed(1, 1, 8), ("ReplicaUpdate", "SpotCheck")

    def judge(job: Job) -> list[str]:
        assert job.outcome is Outcome.COMPLETE, job.emitted
        assert job.digests == expected.digests
        assert job.state.progress.losses == expected.state.progress.losses
        return [e.reason for e in job.emitted]

    killed = kill_at_each(document, lambda f: f.step == 5 and f.name not in of_standby and not f.after, judge, kind)
    assert {"Forward", "Backward", "SyncReplicas", "ReportReady", "OptimizerStep"} <= {f.name for f in killed}
    assert all("Takeover" in reasons for reasons in killed.values())


@pytest.mark.parametrize(
    ("stages", "pipelines", "kept", "most"),
    [
        (1, 3, 0, 6),
        (2, 2, 3, 5),
        (4, 1, 3, 5),
        pytest.param(1, 2, 0, 8, marks=pytest.mark.slow),
        pytest.param(1, 4, 0, 6, marks=pytest.mark.slow),
        pytest.param(2, 4, 2, 5, marks=pytest.mark.slow),
        pytest.param(3, 3, 2, 5, marks=pytest.mark.slow),
    ],
)
def test_all_siblings_share_what_is_lost_in_the_same_step(stages: int, pipelines: int, kept: int, most: int) -> None:
    """After the loss of a worker at its cell's last backward of a step, other workers share the forwards to repeat.
    kept: how many of the cell's four forwards nobody repeats. most: the most forwards that a worker runs.
    """
    lost = Fault("Backward", Cell(pipelines > 1, 0), 2, 7 if pipelines > 1 else 3)
    job = Job(manifest(stages, pipelines, batch=8 * pipelines), (lost,)).run()
    cells = [Cell(d, s) for d in range(pipelines) for s in range(stages)]
    forwards = {Fault("Forward", cell, 2, m, after=True) for cell in cells for m in range(4 * pipelines)}
    ran = {worker: len(forwards.intersection(executed)) for worker, executed in job.executed_by.items()}
    check_same_bits(job, undisturbed(stages, pipelines, batch=8 * pipelines))
    gone = sum(count for worker, count in ran.items() if worker not in job.state.workers)
    assert (gone, sum(ran.values()) - gone, max(ran.values())) == (4, 4 * pipelines * stages - kept, most)
    (taken,) = job.state.moves.takeovers
    assert (taken.forwards, taken.backwards) == (4 - kept, 4 - kept)


def test_what_a_kill_does_wrong_is_told() -> None:
    """`kill_at_each` reports the error of a killed job, which runs in a process of its own."""
    if torch.accelerator.is_available():
        pytest.skip("they are run in this process")

    def judge(job: Job) -> None:
        assert job.state.membership.preemptions == 0, "a worker was lost"

    with pytest.raises(AssertionError, match="a worker was lost"):
        kill_at_each(manifest(2, 1), lambda f: f.name == "Backward", judge)
    with pytest.raises(AssertionError, match="no end of its own"):
        kill_at_each(manifest(2, 1), lambda f: f.name == "Backward", lambda job: os._exit(1))


@sweep(of_name)
@pytest.mark.parametrize(
    ("stages", "pipelines"),
    [(2, 1), pytest.param(4, 1, marks=pytest.mark.slow), pytest.param(3, 2, marks=pytest.mark.slow)],
)
def test_a_spare_worker_takes_its_part_within_the_step(
    stages: int, pipelines: int, kind: Kind | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spare worker continues after the microbatches that the heir has finished. Then another worker is lost, at any
    instruction until the step ends.
    """
    monkeypatch.setattr(transitions, "LEAST_SECONDS", -1.0)
    document = manifest(stages, pipelines, standby=1, batch=16 * pipelines)
    lost = Fault("Forward", Cell(0, stages - 1), 2, 1)
    expected = Job(document).run()

    class Killed(BranchingJob):
        def strikes(self, fault: Fault) -> bool:
            moved = fault.step == 2 and any(e.reason == "Healed" and e.message.endswith(" now") for e in self.emitted)
            return (moved and self.branch(fault, kind and kind(fault))) or super().strikes(fault)

    def judge(job: Job) -> int:
        check_same_bits(job, expected)
        return job.state.membership.preemptions

    killed = each_way(lambda: Killed(document, (lost,)), judge)
    assert {"Forward", "Backward", "SendPartialSum", "AddPartialSums"} <= {fault.name for fault in killed}
    assert set(killed.values()) == {2}


@pytest.mark.parametrize(
    ("stages", "pipelines", "gap", "losses"),
    [
        (3, 1, 5, (2, 2, 1, 2, 0, 2, 1, 0)),  # the cells whose owners are lost, by number
        pytest.param(2, 3, 5, (0, 1, 5, 2, 3, 1, 4), marks=pytest.mark.slow),
        pytest.param(4, 1, 20, (1, 2, 1, 0, 3), marks=pytest.mark.slow),
        pytest.param(5, 2, 5, (1, 2, 9, 2, 3, 3, 6), marks=pytest.mark.slow),
        pytest.param(2, 3, 10, (4, 1, 3, 4, 1, 2, 1), marks=pytest.mark.slow),
    ],
)
def test_what_is_summed_stays_so_through_any_number_of_losses_in_a_step(
    stages: int, pipelines: int, gap: int, losses: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished sums survive several losses of workers in a step. gap: the fewest `job.turns` from loss to loss."""
    monkeypatch.setattr(transitions, "LEAST_SECONDS", -1.0)
    document = manifest(stages, pipelines, standby=1, batch=32 * pipelines)
    expected, left, last = Job(document).run(), list(losses), 0

    def decide(job: Job) -> None:
        nonlocal last
        if job.state.step != 2 or not left or job.turns - last < gap:
            return
        plan, plans = job.plan, job.state.plans
        cells = plan.cells()
        held = all((c, w) in plans.synced for c in cells for w in plan.at(c).replicas[:1] or (None,))
        if held and len(plan.owners()) == len(cells) and (plans.in_force or plan.worker_ids() <= plans.applied):
            last = job.turns
            job.kill(plan.at(cells[left.pop(0)]).owner)

    job = Job(document, decide=decide).run()
    check_same_bits(job, expected)
    assert job.state.membership.preemptions == len(losses)
    run = [f for f in job.executed if f.step == 2 and f.name.startswith("Backward") and f.name != "BackwardWeight"]
    again = sum(not fault.after for fault in run) / (32 * stages * pipelines) - 1
    assert again < 0.1 * len(losses), again


def test_no_cell_moves_while_its_committed_step_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell moves to its next owner only after the heir has repeated the committed step. The cell's worker dies
    between its report of the step and its last gradients, and the heir is slow; the plan that heals the pipeline comes
    with the commit.
    """
    last, slow, turn = Cell(0, 2), set[str](), Engine.turn

    def decide(job: Job) -> None:
        if Fault("ReportReady", last, 1, after=True) not in job.executed:
            return
        if not slow:
            slow.update({"w0", "w2"})
        elif job.nodes["w2"].alive:
            job.kill("w2")
        elif job.nodes["w0"].inside.step >= 2:
            slow.discard("w1")
        elif last in job.nodes["w1"].inside.executor.cells:
            slow.add("w1")
            if job.plan.boundary and job.nodes["w0"].engine.newest_plan == job.plan:
                slow.discard("w0")

    def slowly(engine: Engine) -> bool:
        return not any(job.nodes[worker].engine is engine for worker in slow) and turn(engine)

    monkeypatch.setattr(Engine, "turn", slowly)
    monkeypatch.setattr(transitions, "LEAST_SECONDS", math.inf)  # the spare worker takes it at the boundary
    job = Job(manifest(3, 1, standby=1), decide=decide)
    job.run(5_000)
    assert_same(job, 3, 1)
    assert [e.reason for e in job.emitted if e.reason in ("Takeover", "Healed")] == ["Takeover", "Healed"]
    begun = min(fault.step for fault in job.executed_by["w3"] if fault.name == "Forward")
    assert begun == 3, "its heir has repeated step 1, and run step 2"


def test_a_replica_that_misses_commits_while_it_is_filled_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root repeats the last commits to a replica that is being filled and whose link to the root has broken."""
    job = Job(manifest(4, 1, standby=1, steps=14), (Fault("Backward", Cell(0, 2), 1, 1),))
    missed: list[int] = []
    late: list[tuple[MemoryTransport, Frame]] = []
    send = MemoryTransport.send

    def lossy(self: MemoryTransport, peer: WorkerId, frame: Frame) -> None:
        kind = frame.address.kind
        if peer == "w4" and kind is FrameKind.LAYER and len(missed) < 4:
            late.append((self, frame))
        elif peer == "w4" and kind is FrameKind.COMMIT and late and len(missed) < 4:
            missed.append(frame.address.step)
            if len(missed) == 4:
                for giver, state in late:
                    send(giver, "w4", state)
                job.nodes["w4"].events.append(LinkUp(self.worker))
                job.nodes[self.worker].events.append(LinkUp("w4"))
        else:
            send(self, peer, frame)

    monkeypatch.setattr(MemoryTransport, "send", lossy)
    job.run()
    assert len(missed) == 4
    assert job.outcome is Outcome.COMPLETE
    assert job.digests == undisturbed(4, 1, steps=14).digests
    assert {job.plan.at(Cell(0, s)).owner for s in range(4)} == {"w0", "w1", "w3", "w4"}


def killed_with_neighbours(
    document: dict[str, Any], step: int, replicas: int, cell: Cell | None = None, kind: Kind | None = None
) -> dict[Fault, int]:
    """Run a job for each instruction of a step, and check its bits. Each run kills the instruction's worker and the
    owners of the `replicas` - 1 stages before it (cyclic). Return the number of repeated forwards by instruction.
    cell: try its instructions only. kind: maps an instruction to a kind; try one instruction of each kind only.
    """
    document["spec"]["redundancy"]["replicas"] = replicas
    stages = document["spec"]["topology"]["stages"]
    undisturbed(stages, 1)

    class Killed(BranchingJob):
        def strikes(self, fault: Fault) -> bool:
            if fault.step != step or cell not in (None, fault.cell) or not self.branch(fault, kind and kind(fault)):
                return False
            for back in range(1, replicas):
                self.kill(self.plan.at(Cell(0, (fault.cell.stage - back) % stages)).owner)
            return True

    def judge(job: Job) -> int:
        assert_same(job, stages, 1)
        assert (
            job.state.membership.preemptions >= replicas - 1
        )  # the one that was to strike itself may have been killed before
        assert not job.state.checkpoints.counts.restores
        return sum(t.forwards for t in job.state.moves.takeovers)

    return each_way(lambda: Killed(document), judge)


@pytest.mark.parametrize(
    ("stages", "replicas", "cell", "kind"),
    [
        (4, 2, Cell(0, 0), of_name),  # and so the root
        pytest.param(4, 2, None, None, marks=pytest.mark.slow),  # each cell at each instruction
        pytest.param(5, 3, None, None, marks=pytest.mark.slow),
    ],
)
def test_neighbours_are_killed_at_once_at_an_instruction(
    stages: int, replicas: int, cell: Cell | None, kind: Kind | None
) -> None:
    """A pipeline without a checkpoint survives the loss of as many neighbours at once as each stage has replicas."""
    killed = killed_with_neighbours(manifest(stages, 1), 2, replicas, cell, kind)
    assert {f.cell for f in killed} == ({cell} if cell else {Cell(0, s) for s in range(stages)})
    assert {"Forward", "Backward", "SyncReplicas", "ReportReady", "OptimizerStep"} <= {f.name for f in killed}


def test_the_mode_is_switched_at_a_step_boundary() -> None:
    """Edits of the redundancy mode every few steps, and the loss of a worker after the last edit, change no bit."""
    modes = ["Replicas", "None", "Auto"]
    left = list(enumerate(modes))

    def decide(job: Job) -> None:
        if left and job.state.plan and job.state.step >= 3 * left[0][0]:
            document = manifest(3, 1, steps=14, mode=left.pop(0)[1])
            job.inbox.append(SpecChanged(parse_manifest(document)))

    job = Job(manifest(3, 1, steps=14), (Fault("Backward", Cell(0, 1), 13, 2),), decide=decide).run()
    reference = undisturbed(3, 1, 14)
    assert job.outcome is Outcome.COMPLETE, job.emitted
    assert not job.faults
    assert job.digests == reference.digests
    assert sum(e.reason == "ModeChanged" for e in job.emitted) == 2
