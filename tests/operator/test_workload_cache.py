"""What is known of jobs' Workloads."""

from typing import Any

from bamboo_operator.cluster.workload_cache import WorkloadCache

KEY = ("default", "tiny")


def workload(name: str, version: int, uid: str = "u", owner: str = "job") -> dict[str, Any]:
    labels = {"bamboo.dev/job-name": KEY[1]}
    owners = [{"kind": "BambooJob", "uid": owner, "controller": True}]
    metadata = {"namespace": KEY[0], "name": name, "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"metadata": {**metadata, "ownerReferences": owners}}


def test_what_a_watch_tells_late_does_not_undo_an_answer() -> None:
    cache = WorkloadCache()
    cache.put(workload("w-1", 9))
    cache.put(workload("w-1", 8))
    assert cache.of(KEY, "job") == [workload("w-1", 9)]
    cache.put(workload("w-1", 3, uid="another"))
    assert cache.uids() == {("default", "w-1"): "another"}


def test_a_job_has_those_that_it_owns_until_they_are_gone() -> None:
    cache = WorkloadCache()
    cache.put(workload("w-1", 1))
    cache.put(workload("x-1", 2, owner="the job before"))
    assert cache.of(KEY, "job") == [workload("w-1", 1)]
    cache.forget(("default", "w-1"), "another")
    assert cache.of(KEY, "job")
    cache.forget(("default", "w-1"), "u")
    assert not cache.of(KEY, "job")
