"""Workers' reports that the coordinator ignores, and warnings that it emits even after the job's end."""

from bamboo_core.control import protocol
from bamboo_core.control.protocol import Received
from bamboo_core.planning.plan import Cell
from world import World


def test_what_a_worker_invents_is_not_kept() -> None:
    world = World(2, 1, 0)
    world.settle()
    before = world.state
    for number in range(20):
        for message in (
            protocol.ReplicaSynced(cell=Cell(0, 0), replica=f"invented-{number}"),
            protocol.CellFinished(cell=Cell(number + 5, 0), digest="d"),
            protocol.StepCommitted(
                step=10**6 + number, generation=0, loss=1.0, gradient_norm=1.0, microbatches=4, seconds=1.0
            ),
        ):
            for worker in sorted(before.workers):
                world.tell(Received(worker, message))
    after = world.state
    assert (after.plans.synced, after.ending.finished, after.step) == (
        before.plans.synced,
        before.ending.finished,
        before.step,
    )


def test_what_loggers_lack_is_told_although_the_job_is_over() -> None:
    """After a job's end, the coordinator emits workers' warnings about loggers and callbacks, but not about history."""
    world = World(2, 1, 0)
    world.settle()
    world.tell(Received("w0", protocol.WorkerFailed(reason="TaskFailed", message="no")))
    over, said = world.state, len(world.told)
    of_loggers = (protocol.LOGGERS_AWAITED, "LoggerIncomplete", "LoggerFailed", "CallbackFailed")
    reasons = (*of_loggers, "HistoryNotWritten")
    for reason in reasons:
        world.tell(Received("w0", protocol.WorkerWarning(reason=reason, message="so it is")))
    assert world.state == over
    assert [(emit.reason, emit.message, emit.warning) for emit in world.told[said:]] == [
        ("LoggersAwaited", "w0: so it is", False),
        ("LoggerIncomplete", "w0: so it is", True),
        ("LoggerFailed", "w0: so it is", True),
        ("CallbackFailed", "w0: so it is", True),
    ]
