"""When a job is looked at, and when its status is written."""

from collections import Counter

import pytest

from bamboo_core.control.message import Message
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.kube.api import KubeApi
from bamboo_operator.auth.pod_tokens import TokenReviewer
from bamboo_operator.auth.worker_gateway import WorkerGateway
from bamboo_operator.cluster.indices import ClusterIndices
from bamboo_operator.jobs import reconciler
from bamboo_operator.jobs.coordinator_runner import CoordinatorRunner, TrainingRun
from bamboo_operator.jobs.reconcile_schedule import QUIET_SECONDS, ReconcileTrigger
from bamboo_operator.kube.attempts import ApiAttempts
from bamboo_operator.kube.objects import JobIdentity, JobKey
from opsim_server import Object
from slow_api_kit import JOBS, ManyJobs, manifest, virtual_runner

IDLE_SECONDS = 900.0


def test_idle_jobs_are_looked_at_only_when_something_happens_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod that nobody knew of is removed at once all the same, and an edit is followed."""
    looks: Counter[str] = Counter()

    class Counted(ApiAttempts):
        def __init__(self, key: JobKey) -> None:
            super().__init__(key)
            self.name = key[1]

        def heartbeat(self) -> None:
            looks[self.name] += 1
            super().heartbeat()

    monkeypatch.setattr(reconciler, "ApiAttempts", Counted)
    with virtual_runner(monkeypatch) as (runner, loop):
        simulated = ManyJobs(loop, slowness=1.0, suspended=True)
        loop.call_later(0.45 * IDLE_SECONDS, simulated.bring_late_pod, "job-00")
        runner.run(simulated.run(JOBS, IDLE_SECONDS))
        removed = [at for what, at in simulated.pods if what == "DELETED"]
    assert simulated.stuck == []
    assert [int(at - 0.45 * IDLE_SECONDS) < QUIET_SECONDS / 10 for at in removed] == [True]
    quiet = [looks[f"job-{number:02}"] for number in range(1, JOBS)]
    assert max(quiet) <= 2 * (IDLE_SECONDS / QUIET_SECONDS + 4), "twice at each look"


class NobodyIsAsked:
    async def call(self, *_: object, **__: object) -> Object:
        raise AssertionError("the API server is not asked")


def runner_of(name: str) -> CoordinatorRunner:
    spec = parse_manifest(manifest(name))
    run = TrainingRun(job=JobIdentity(("default", name), "u1"), spec=spec, manifest=manifest(name), resumed=False)
    reviews = TokenReviewer(KubeApi(NobodyIsAsked()))
    return CoordinatorRunner(run, ClusterIndices(), WorkerGateway(), reviews, b"k" * 16, ReconcileTrigger())


class Recorded:
    """A channel to one worker."""

    connected = ("w0",)

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []

    def send(self, worker: str, message: Message) -> None:
        self.sent.append((worker, message))
