"""How workers' pods ended, heard of before or after their channels closed."""

from collections.abc import Callable
from datetime import UTC, datetime

from bamboo_core.control.protocol import ChannelClosed, PeerDown
from bamboo_core.names import TRAINER_CONTAINER
from bamboo_operator.kube.objects import JobIdentity
from bamboo_operator.status.writer import StatusWriter
from opsim_kopf import pod_event
from pod_controller_kit import Job, Place

pytest_plugins = ["pod_controller_fixtures"]


def ended(place: Place, name: str, code: int) -> None:
    """The kubelet says so."""
    terminated = {"exitCode": code, "finishedAt": datetime.now(UTC).isoformat(), "message": "it was so\n"}
    state = {"name": TRAINER_CONTAINER, "state": {"terminated": terminated}}
    place.pods[name]["status"] = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [state]}
    pod_event(place.cluster, "MODIFIED", place.pods[name])


async def missed(job: Job, name: str) -> None:
    """Its channel and its links close."""
    job.hear("tiny-w0", PeerDown(peer=name))
    job.runner.handle(ChannelClosed(name))
    assert name in job.runner.state.membership.gone
    await job.reconciles()


async def test_a_pod_that_we_delete_because_its_worker_was_missed_was_not_taken_away(
    begin: Callable[..., Job],
) -> None:
    """Nor one that ends with its node for the same reason: what is deleted by others is a disruption."""
    place = Place()
    job = begin(place, standby={"workers": 1})
    await job.reconciles()
    job.train()
    await missed(job, "tiny-w1")
    await job.reconciles(15.0)
    assert place.deleted == ["tiny-w1"]
    await job.ticks(0.2)
    assert not job.runner.state.ends.since_commit["tiny-w1"].disrupted
    assert "tiny-w1" not in job.runner.state.ends.unexplained
    await missed(job, "tiny-w2")
    place.take("tiny-w2")
    await job.ticks(0.2)
    assert job.runner.state.ends.since_commit["tiny-w2"].disrupted


async def test_an_operator_that_comes_later_does_not_count_again_what_ended_before_training(
    begin: Callable[..., Job],
) -> None:
    """The pods of the last workers that failed stay, for their logs."""
    place = Place()
    first = begin(place)
    await first.reconciles()
    assert first.plan_record() is None
    ended(place, "tiny-w1", 3)
    await first.ticks(0.2)
    assert (first.runner.state.ends.restarts, first.runner.state.plan) == (1, None)
    written, job_id = {"plan": first.plan_record()}, JobIdentity(("default", "tiny"), "uid")
    status = StatusWriter(job_id, written, place)  # type: ignore[arg-type]
    assert status.plan is None, "no worker trains"
    second = begin(place, known_lost=status.written.plan_record.lost)
    await second.reconciles()
    ended(place, "tiny-w0", 3)  # while it works
    await second.ticks(0.2)
    assert second.runner.state.ends.restarts == 1, "its own; the first one is in the status already"
    assert "tiny-w1" in place.pods
