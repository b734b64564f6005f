"""Jobs that say what they train, on a cluster whose runtimes say the rest."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest

from bamboo_core.job.runtime import parse_runtime, with_runtime
from cluster.client import Json
from cluster.handle import Cluster
from operator_jobs import digests_of_a_local_run, manifest, slowed, small
from operator_process import Job, Operator, condition

pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

STEPS = 60
NEWER = {"name": "NEWER", "value": "1"}
API = "/apis/bamboo.dev/v1alpha1"


@pytest.fixture
def for_all(installed: Cluster, namespace: str) -> Iterator[str]:
    """The path of a runtime of the cluster, which goes with the test."""
    path = f"{API}/clusterbambooruntimes/{namespace}"
    yield path
    installed.api.delete(path)


def divided(document: Json, kind: str, name: str) -> tuple[Json, Json]:
    """The job without what its runtime says, and that: pools, image, template, resources."""
    job = copy.deepcopy(document)
    part = {name: job["spec"].pop(name) for name in ("worker", "nodePools")}
    del job["spec"]["standby"]
    job["spec"]["runtimeRef"] = {"kind": kind, "name": name}
    assert job["spec"].keys() == {"runtimeRef", "task", "training", "topology"}
    return job, part


def runtime(kind: str, name: str, part: Json, updates: str) -> Json:
    spec = {"job": part, "updates": updates, "overridable": []}
    return {"apiVersion": "bamboo.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def with_newer(part: Json) -> Json:
    worker: Json = copy.deepcopy(part["worker"])
    trainer = worker["template"]["spec"]["containers"][0]
    trainer["env"] = [*trainer.get("env", ()), NEWER]
    return {"spec": {"job": {"worker": worker}}}


def newer(pod: Json) -> bool:
    return NEWER in pod["spec"]["containers"][0]["env"]


def living(pods: dict[str, Json]) -> list[Json]:
    return [pod for pod in pods.values() if pod["status"].get("phase") in ("Pending", "Running")]


@pytest.mark.slow
def test_jobs_wait_for_their_runtime_follow_it_as_it_says_and_end_with_the_same_bits(
    installed: Cluster, namespace: str, for_all: str, operator: Operator, tmp_path: Path
) -> None:
    api, kind = installed.api, "ClusterBambooRuntime"
    document, slow = slowed(manifest("follows", STEPS, standby=0, topology={"stages": 2}), tmp_path)
    five_lines, part = divided(document, kind, namespace)
    follows = Job(api, namespace, five_lines)
    assert follows.told("RuntimeNotFound") == f"spec.runtimeRef: there is no {kind} {namespace} yet"
    assert condition(follows.status(), "Accepted")["reason"] == "RuntimeNotFound"

    made = runtime(kind, namespace, part, "Rollout")
    api.request("POST", for_all.rpartition("/")[0], made)
    keeps_lines, own_part = divided(small("keeps"), "BambooRuntime", "team")
    own = f"{API}/namespaces/{namespace}/bambooruntimes"
    api.request("POST", own, runtime("BambooRuntime", "team", own_part, "NewJobs"))
    keeps = Job(api, namespace, keeps_lines)
    for job in (follows, keeps):
        job.until("Protected")
    accepted = api.wait(for_all, lambda found: found.get("status"))["status"]
    assert condition(accepted, "Accepted")["status"] == "True"
    status = follows.status()
    assert (status["runtime"]["generation"], status["runtime"]["job"]["nodePools"][0]["name"]) == (1, "spot")
    assert status["cost"]["perHour"] == "1.80"
    before = set(keeps.pods())

    for path, of in ((for_all, part), (f"{own}/team", own_part)):
        api.patch(path, with_newer(of))
    follows.until_pods(lambda pods: len(living(pods)) == 2 and all(map(newer, living(pods))))
    follows.wait(lambda s: s["runtime"]["generation"] == 2 and condition(s, "WorkersUpdated")["status"] == "True")
    assert follows.status()["preemptions"] == 0
    assert set(keeps.pods()) == before
    assert not any(map(newer, keeps.pods().values()))

    api.delete(f"{own}/team")
    keeps.wait(lambda s: "BambooRuntime team is gone" in condition(s, "Accepted")["message"])
    assert condition(keeps.status(), "Running")["status"] == "True"

    slow.unlink()
    follows.until("Complete")
    whole = with_runtime({**five_lines, "metadata": document["metadata"]}, parse_runtime(made))
    assert follows.status()["digests"] == digests_of_a_local_run(whole, tmp_path)
    assert set(keeps.pods()) == before
