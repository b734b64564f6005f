"""The job's protection, which the condition, the metrics, the page and the command line show in the same way."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from bamboo.terminal import phrases
from bamboo_core.coordinator.events import WorkerState
from bamboo_core.coordinator.job_status import status as status_of
from bamboo_core.coordinator.protection import protection
from bamboo_core.coordinator.records.workers import Workers
from bamboo_core.job.api_object import written
from bamboo_core.job.status import BambooJobStatus
from bamboo_core.metrics import catalog as table
from bamboo_core.metrics.exposition import MetricsPage
from bamboo_core.view.job_view import live_state, view_of
from bamboo_operator.http.metrics import job_page
from bamboo_operator.jobs.meter import JobMeter, OperatorCounts
from bamboo_operator.status.document import job_status
from bamboo_operator.status.facts import OperatedJob, StatusFacts
from job_metrics_kit import values
from operator_kit import NOW, job, said, viewed
from world import World

BARE = ((("w0", False), ("w1", True)),)
OFF = {"redundancy": {"mode": "None"}}
PAIRS = {"spread": {"workersPerNode": 2}}
FILLED = {"grid": BARE, "replicating": ("pipeline 0 stage 0",)}
ALONE = {"grid": ((("w0", False), ("w0", False)),), "workers": (("w0", WorkerState.TRAINING),)}
CASES: list[tuple[dict[str, Any], dict[str, Any], bool, str, str]] = [
    ({}, {}, True, "InStep", "yes"),
    (FILLED, {}, False, "Replicating", "no"),
    ({"grid": BARE}, {}, False, "WorkersMissing", "no"),
    (ALONE, {}, False, "OnlyWorker", "no"),
    ({"grid": BARE, "lacks_room": True}, {}, False, "NoRoomForCopies", "no"),
    ({**FILLED, "lacks_room": True}, {}, False, "Replicating", "no"),  # there is room for some
    ({"lacks_room": True}, {}, True, "InStep", "yes"),  # the other pipelines hold it
    ({"grid": BARE}, OFF, False, "RedundancyOff", "off"),
    ({}, OFF, True, "InStep", "yes"),  # the other pipelines hold it
    (
        {**FILLED, "grid": ((("w0", False), ("w1", False)),)},
        {},
        False,
        "WorkersMissing",
        "no",
    ),
    ({"replicas": 1, "nodes": 2}, PAIRS, True, "InStep", "yes"),
    ({"grid": BARE}, PAIRS, False, "WorkersMissing", "no"),
    ({"grid": BARE, "replicas": 1}, PAIRS, False, "OneNode", "no"),  # another worker there holds it, too
    ({**FILLED, "replicas": 1}, PAIRS, False, "Replicating", "no"),
    ({"replicas": 1, "nodes": 2, "crowded": (("n2", 3),)}, PAIRS, False, "CrowdedNode", "no"),
    ({"grid": BARE, "replicas": 1, "crowded": (("n2", 3),)}, PAIRS, False, "OneNode", "no"),  # which is worse
    ({"crowded": (("n2", 3),)}, PAIRS | OFF, False, "CrowdedNode", "no"),
    ({"grid": BARE, "replicas": 1}, PAIRS | OFF, False, "RedundancyOff", "off"),
]


@pytest.mark.parametrize(("changes", "spec", "holds", "reason", "word"), CASES)
def test_everybody_gives_the_same_answer(
    changes: dict[str, Any], spec: dict[str, Any], holds: bool, reason: str, word: str
) -> None:
    status, asked = said(**changes), job(**spec)
    found = protection(status, asked)
    assert (found.holds, found.reason) == (holds, reason)
    facts = StatusFacts(now=NOW, generation=1, spec=asked)
    made = job_status(status, BambooJobStatus(), facts)
    told = made.condition("Protected")
    assert told is not None
    assert (told.holds, told.reason, told.message) == (holds, reason, found.message)
    page = MetricsPage()
    look = OperatedJob(view=viewed(asked, made, status), facts=facts)
    job_page(page, look, JobMeter(OperatorCounts()))
    assert values(page, table.JOB_PROTECTED) == {(reason,): float(holds)}
    bare = sum(not held for row in status.grid for _, held in row)
    assert values(page, table.JOB_UNPROTECTED_STAGES) == {(): bare}
    shown = live_state(status, asked)
    assert (found.message in shown.sentence) == (not holds)
    assert (shown.name == "Degraded") == (made.state == "Degraded") == (not holds and reason != "RedundancyOff")
    seen = view_of({"metadata": {}, "spec": {}, "status": written(made)})
    assert phrases.protected(seen, NOW) == word
    assert phrases.protection(seen, NOW) == f"protected: {'yes' if holds else 'no'}, {found.message} ({reason})"
    assert seen.protected == (holds or reason == "RedundancyOff"), "as far as it is meant to be"


@pytest.mark.parametrize(
    ("status", "spec", "reason"),
    [
        (None, {}, "NotRunning"),
        (said(phase="Pending", grid=(), workers=()), {}, "NotRunning"),
        (said(), {"suspend": True}, "Suspended"),
    ],
)
def test_nothing_is_protected_while_nothing_runs(status: Any, spec: dict[str, Any], reason: str) -> None:
    made = job_status(status, BambooJobStatus(), StatusFacts(now=NOW, generation=1, spec=job(**spec)))
    told = made.condition("Protected")
    assert told is not None
    assert (told.holds, told.reason) == (False, reason)
    assert phrases.protected(view_of({"metadata": {}, "spec": {}, "status": written(made)}), NOW) == "-"


def test_nothing_is_protected_before_a_restarted_operator_has_heard_of_it() -> None:
    """A restarted operator reports no protection until workers report; an earlier status or plan proves nothing."""
    facts = StatusFacts(now=NOW, generation=1, spec=job())
    for changes in ({}, FILLED):
        before = job_status(said(**changes), BambooJobStatus(), facts)
        for status in (said(phase="Recovering", grid=(), workers=()), said(phase="Recovering", **changes)):
            after = job_status(status, before, facts)
            told = after.condition("Protected")
            assert told is not None
            assert (told.holds, told.reason) == (False, "OperatorRestarted")


def test_a_worker_that_is_not_there_protects_nothing() -> None:
    """A missing worker protects no stage, although the plan still names it as a replica in step."""
    world = World(4, 1, 0)
    world.settle()
    assert status_of(world.state, world.now).unprotected == ()
    gone = "w1"
    workers = {worker: record for worker, record in world.state.workers.items() if worker != gone}
    found = status_of(replace(world.state, workers=Workers(workers)), world.now)
    assert len(found.unprotected) == 2, "the stage that it runs, and the one of which it has the replica"
    assert found.replicas == 0


@pytest.mark.parametrize(("room", "told"), [(1, ()), (2, (("n1", 3),)), (3, ())])
def test_a_node_with_more_workers_than_it_may_have_is_named(room: int, told: tuple[tuple[str, int], ...]) -> None:
    """The status names a node with more workers than spread.workersPerNode, if this limit is more than 1."""
    world = World(4, 1, 0, per_node=room)
    world.settle()
    nodes = {"w0": "n0", "w1": "n1", "w2": "n1", "w3": "n1"}
    workers = {
        worker: replace(record, peer=msgspec.structs.replace(record.peer, node=nodes[worker]))
        for worker, record in world.state.workers.items()
    }
    found = status_of(replace(world.state, workers=Workers(workers)), world.now)
    assert found.crowded == told
    if told:
        message = "3 workers on node n1, and spread.workersPerNode is 2"
        assert protection(replace(found, grid=said().grid), world.spec).message == message


def test_protection_says_how_many_hold_a_stage_and_how_many_should() -> None:
    asked = job(redundancy={"replicas": 2})
    full, fewer = said(replicas=2), said(replicas=1)
    told = protection(full, asked)
    assert (told.holds, told.reason) == (True, "InStep")
    assert told.message == "the state of every stage is held by three workers or more, in step"
    told = protection(fewer, asked)
    assert (told.holds, told.reason) == (True, "FewerReplicas")
    assert told.message.startswith("the state of every stage is held by two workers or more, in step; ")
    assert "redundancy.replicas 2 asks for three, " in told.message
    assert protection(fewer, job()).reason == "InStep"
