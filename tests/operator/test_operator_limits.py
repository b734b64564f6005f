"""What the operator does about workers that do not come: backoff, silence; and who may connect to workers."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bamboo.job.spec import JobSpec
from bamboo_operator.cluster.watch_health import WatchHealth
from bamboo_operator.manifests.network_policy import network_policy
from bamboo_operator.manifests.worker_pod import JobMeta
from bamboo_operator.pods.starting.join_timeout import REPLACE_SECONDS, REPORT_SECONDS, join_problem, seconds_unjoined
from bamboo_operator.pods.starting.start_backoff import FIRST_SECONDS, LAST_SECONDS, StartBackoff
from bamboo_operator.status.plan_record import lost_workers_in
from operator_kit import job

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def test_the_first_workers_that_end_at_once_are_replaced_at_once() -> None:
    backoff = StartBackoff().after(0, 8, 100.0, "exited with code 1")
    assert (backoff.rounds, backoff.pause) == (1, 0.0)
    assert not backoff.holds(100.0)


def test_workers_that_were_made_together_are_one_round() -> None:
    backoff = StartBackoff().after(0, 8, 100.0, "first").after(5, 9, 101.0, "second")
    assert (backoff.rounds, backoff.detail) == (1, "second")
    assert backoff.after(8, 9, 102.0, "third").rounds == 2


def test_each_round_in_vain_makes_the_next_wait_longer() -> None:
    backoff, pauses = StartBackoff(), []
    for number in range(12):
        backoff = backoff.after(number, number + 1, 50.0 * number, "")
        pauses.append(backoff.pause)
    assert pauses[:4] == [0, FIRST_SECONDS, 2 * FIRST_SECONDS, 4 * FIRST_SECONDS]
    assert pauses[-1] == LAST_SECONDS
    assert backoff.holds(50.0 * 11 + LAST_SECONDS - 1)
    assert not backoff.holds(50.0 * 11 + LAST_SECONDS)


def pod(started: datetime | None) -> dict[str, Any]:
    state = {"running": {"startedAt": started.strftime("%Y-%m-%dT%H:%M:%SZ")}} if started else {"waiting": {}}
    return {"status": {"containerStatuses": [{"name": "trainer", "state": state}]}}


def test_only_workers_that_run_and_have_not_joined_are_silent() -> None:
    pods = {
        "job-w0": pod(NOW - timedelta(seconds=300)),
        "job-w1": pod(NOW - timedelta(seconds=90)),
        "job-w2": pod(None),
        "job-w3": {"status": {"phase": "Pending"}},
    }
    assert seconds_unjoined(pods, {"job-w0"}, NOW - timedelta(hours=1), NOW) == {"job-w1": 90.0}
    assert seconds_unjoined(pods, {"job-w0"}, NOW - timedelta(seconds=20), NOW) == {"job-w1": 20.0}


def test_silence_is_told_once_it_lasts() -> None:
    assert join_problem({"job-w1": REPORT_SECONDS - 1}, "ws://x") is None
    found = join_problem({"job-w1": REPORT_SECONDS, "job-w2": REPLACE_SECONDS}, "ws://x")
    assert found is not None
    assert found.reason == "WorkerSilent"
    assert found.message.startswith("2 worker(s) are running but have not connected to ws://x: see the log of job-w1")


@pytest.mark.parametrize(
    ("plan", "lost"),
    [
        (None, set()),
        ("{}", set()),
        ("nonsense", set()),
        ('{"lost": 3}', set()),
        ("[]", set()),
        ('{"epoch": 3, "pipelines": [], "lost": ["a", 4]}', {"a"}),
    ],
)
def test_what_a_former_operator_had_heard_is_read_from_the_status(plan: str | None, lost: set[str]) -> None:
    assert lost_workers_in(plan) == lost


async def test_a_namespace_that_is_deleted_needs_no_watchers() -> None:
    watchers = WatchHealth()
    names = [f"watcher for {kind}.v1@{place}" for place in ("a", "b") for kind in ("pods", "bamboojobs")]
    tasks = {name: asyncio.create_task(asyncio.sleep(60), name=name) for name in names}
    assert watchers.problem() is None
    for name in names[:2]:
        tasks[name].cancel()
    await asyncio.gather(*(tasks[name] for name in names[:2]), return_exceptions=True)
    assert watchers.problem() is None
    tasks[names[2]].cancel()
    await asyncio.gather(tasks[names[2]], return_exceptions=True)
    assert watchers.problem() == "the watcher for pods.v1@b has ended"
    tasks[names[3]].cancel()


async def test_a_watcher_that_ends_is_missed() -> None:
    watchers = WatchHealth()
    assert watchers.problem() is None
    watcher = asyncio.create_task(asyncio.sleep(60), name="watcher for nodes.v1@None")
    other = asyncio.create_task(asyncio.sleep(60), name="something else")
    assert watchers.problem() is None
    for task in (other, watcher):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (watchers.problem() is None) == (task is other)
    assert watchers.problem() == "the watcher for nodes.v1@None has ended"


async def test_an_operator_that_began_before_the_api_server_served_jobs_is_not_well() -> None:
    now = 0.0
    watchers = WatchHealth(lambda: now)
    pods = asyncio.create_task(asyncio.sleep(60), name="watcher for pods.v1@None")
    assert watchers.problem() is None
    now = 59.0
    assert watchers.problem() is None
    now = 61.0
    assert "BambooJobs are not watched" in (watchers.problem() or "")
    jobs = asyncio.create_task(asyncio.sleep(60), name="watcher for bamboojobs.v1alpha1.bamboo.dev@None")
    await asyncio.sleep(0)
    assert watchers.problem() is None
    for task in (pods, jobs):
        task.cancel()


def test_only_workers_of_the_job_connect_to_its_workers_and_whoever_reads_metrics() -> None:
    spec: JobSpec = job()
    workers = {"matchLabels": {"bamboo.dev/job-uid": "uid-1"}}
    owner = {
        "apiVersion": "bamboo.dev/v1alpha1",
        "kind": "BambooJob",
        "name": spec.name,
        "uid": "uid-1",
        "controller": True,
        "blockOwnerDeletion": True,
    }
    assert network_policy(spec, JobMeta(uid="uid-1")) == {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": "bamboo-uid-1",
            "namespace": spec.namespace,
            "labels": {"app.kubernetes.io/managed-by": "bamboo-operator", "app.kubernetes.io/instance": spec.name},
            "ownerReferences": [owner],
        },
        "spec": {
            "podSelector": workers,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": workers}]},
                {"from": [{"namespaceSelector": {}}], "ports": [{"protocol": "TCP", "port": 8080}]},
            ],
        },
    }
