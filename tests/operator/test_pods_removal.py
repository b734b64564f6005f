"""The removal of a job's workers: the pods that the operator deletes, and its wait until workers exit."""

from typing import Any

import pytest

from bamboo_core.kube.errors import ApiError
from bamboo_operator.cluster.indices import ClusterIndices
from bamboo_operator.kube import attempts
from bamboo_operator.kube.attempts import ApiAttempts
from bamboo_operator.kube.objects import JobIdentity
from bamboo_operator.pods import removal
from bamboo_operator.pods.removal import PodRemoval
from bamboo_operator.pods.view import JobPods
from operator_kit import JOB_UID, stored
from opsim_kopf import pod_event

KEY = ("default", "tiny")


class Deletions:
    """An API server that answers deletions with `answers` in turn (an error, or whether the pod existed), then True."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.answers, self.names = list(answers), list[str]()

    async def delete_pod(self, namespace: str, name: str, uid: str) -> bool:
        self.names.append(name)
        answer = self.answers.pop(0) if self.answers else True
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "FIRST_RETRY", 0.0)


def made(api: Any) -> tuple[PodRemoval, JobPods, ClusterIndices, list[str]]:
    """Return the removal of a job's pods, one running and one ended, with the pods, the indices and the pods' names."""
    cluster, names = ClusterIndices(), []
    for number, phase in enumerate(("Running", "Succeeded")):
        pod = stored(number, phase=phase)
        pod_event(cluster, "ADDED", pod)
        names.append(pod["metadata"]["name"])
    pods = JobPods(JobIdentity(KEY, JOB_UID), cluster, api)
    return PodRemoval(pods, ApiAttempts(KEY)), pods, cluster, names


async def test_pods_that_have_ended_go_only_when_all_are_to_go() -> None:
    for count in (1, 2):
        api = Deletions()
        removal, pods, _, names = made(api)
        await (removal.remove_running() if count == 1 else removal.remove_all())
        assert api.names == names[:count]
        assert pods.deleted() == set(names[:count])


async def test_a_pod_that_is_gone_is_forgotten_and_one_that_was_replaced_is_left() -> None:
    ended, _, cluster, names = made(Deletions(False))
    await ended.remove_running()
    assert set(cluster.pods(KEY, JOB_UID)) == {names[1]}
    api = Deletions(ApiError(409, "Reason", "another uid"))
    ended, _, _, names = made(api)
    await ended.remove_running()
    assert api.names == names[:1]


async def test_pods_are_left_alone_while_a_worker_waits_for_its_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "EXIT_SECONDS", 0.0)
    ended, pods, cluster, names = made(Deletions())
    looks = list[int]()

    def meanwhile() -> None:
        looks.append(1)
        if len(looks) == 3:  # its loggers are done, and it ends
            pod = cluster.pods(KEY, JOB_UID)[names[0]]
            pod_event(cluster, "MODIFIED", {**pod, "status": {"phase": "Succeeded"}})

    await ended.wait_for_exit(meanwhile, lambda: ())
    assert looks == [1], "a worker that waits for nothing has had its time"
    await ended.wait_for_exit(meanwhile, lambda: names[:1])
    assert pods.living() == {}


async def test_nobody_waits_for_a_worker_that_no_node_runs() -> None:
    """The removal does not wait for a Pending pod, which has no running process that must exit."""
    ended, pods, cluster, names = made(Deletions())
    pod_event(cluster, "MODIFIED", {**cluster.pods(KEY, JOB_UID)[names[0]], "status": {"phase": "Pending"}})
    looks = list[int]()
    await ended.wait_for_exit(lambda: looks.append(1), lambda: names)
    assert looks == [1]
    assert len(pods.living()) == 1
