"""The operator with a real API server, scheduler and controller manager: losses, strangers, mistakes, deletion."""

import asyncio
import signal
import socket
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bamboo_core.control.codec import decode_from_coordinator, encode
from bamboo_core.control.digests import add_digests
from bamboo_core.control.protocol import Hello, Refused
from bamboo_core.control.server import REFUSED_HEADER
from cluster.client import ApiError, Json
from cluster.handle import OLDEST_SUPPORTED, Cluster
from operator_jobs import digest_of_undisturbed, manifest, slowed, small
from operator_process import JOBS, PATIENCE, Job, Operator, condition, owners

pytest_plugins = ["cluster_kit", "operator_process"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

STEPS, SECONDS = 60, 2.5  # of a step, while there is something to see


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_job_survives_strangers_and_the_loss_of_its_nodes_and_of_its_operator(
    installed: Cluster, namespace: str, operator: Operator, tmp_path: Path
) -> None:
    training = {"steps": STEPS, "globalBatchSize": 16, "microBatchSize": 4}
    document, slow = slowed(manifest("story", training=training), tmp_path, SECONDS)
    job = Job(installed.api, namespace, document)
    status = job.until("Running")
    nodes = {name: pod["spec"]["nodeName"] for name, pod in job.pods().items()}
    assert len(set(nodes.values())) == 3, "the workers are not spread over the zones"
    _neighbours_are_apart(status, nodes)

    # strangers want to be one of its workers
    _strangers_are_refused(job, operator)
    assert job.step(job.status()["training"]["step"] + 1)["preemptions"] == 0

    # a node gets notice: its workers leave between two steps
    job.step(2)
    victim = owners(job.status())[0]
    installed.taint(nodes[victim], "cloud.google.com/impending-node-termination", "", "NoSchedule")
    assert "of pipeline 0 in place of" in job.told("TakenOver")
    installed.api.wait(
        f"/api/v1/namespaces/{namespace}/pods/{victim}",
        lambda pod: not pod or pod["status"].get("phase") == "Succeeded",
        PATIENCE,
    )
    installed.untaint(nodes[victim], "cloud.google.com/impending-node-termination")

    # a worker is killed
    status = job.wait(lambda s: victim not in s["plan"] and condition(s, "Degraded")["status"] == "False")
    before = status["preemptions"]
    row = owners(job.status())
    node = job.pods()[row[1]]["spec"]["nodeName"]
    on_it = [w for w in row if job.pods()[w]["spec"]["nodeName"] == node]
    installed.signal(namespace, on_it[0], signal.SIGKILL)
    job.wait(lambda status: status["preemptions"] > before)
    assert f"lost {on_it[0]}" in job.told("Takeover")

    # the operator is killed; the job goes on with the next one
    operator.kill()
    at = job.status()["training"]["step"]
    time.sleep(1)
    operator.start()
    job.step(at + 2)
    assert condition(job.status(), "Running")["status"] == "True"

    slow.unlink()
    status = job.until("Complete")
    assert status["training"]["step"] == STEPS
    assert status["preemptions"] >= 2
    assert status["state"] == "Complete"
    assert float(status["cost"]["total"]) > 0
    assert add_digests(status["digests"]) == digest_of_undisturbed(document)
    job.told("Complete")  # the last one, after the status
    reasons = [reason for reason, _ in job.events()]
    assert {"WorkerJoined", "Started", "NoticeReceived", "WorkerLost", "Takeover", "Complete"} <= set(reasons)


def _neighbours_are_apart(status: Json, nodes: dict[str, str]) -> None:
    row = owners(status)
    for one, other in zip(row, [*row[1:], row[0]], strict=True):
        assert nodes[one] != nodes[other], f"{one} and {other} share a node and are neighbours: {row}, {nodes}"


async def _knock(operator: Operator, place: str, worker: str, token: str | None) -> str:
    """Connect as `worker` with this token. Return the refusal: HTTP status and reason, or the message of `Refused`."""
    url = f"wss://127.0.0.1:{operator.port}{place}"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    made: list[socket.socket] = []

    def make(address: Any) -> socket.socket:
        made.append(socket.socket(*address[:3]))
        return made[-1]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=make)) as session:
        try:
            async with session.ws_connect(url, headers=headers, ssl=operator.trusting) as channel:
                await channel.send_str(encode(Hello(worker=worker, host="127.0.0.1", port=1)).decode())
                answer = decode_from_coordinator((await channel.receive(timeout=30)).data)
            assert isinstance(answer, Refused), answer
            said = answer.message
        except aiohttp.WSServerHandshakeError as error:
            said = f"{error.status} {(error.headers or {}).get(REFUSED_HEADER)}"
    async with asyncio.timeout(30):
        while any(one.fileno() != -1 for one in made):  # a connection that outlives its loop warns some test later
            await asyncio.sleep(0.01)
    return said


def _strangers_are_refused(job: Job, operator: Operator) -> None:
    """Check that the operator refuses callers that know a worker's name but have no token of its pod."""
    pods = job.pods()
    worker, other = sorted(pods)[:2]
    account = f"/api/v1/namespaces/{job.namespace}/serviceaccounts/default/token"

    def token(audience: str, pod: str | None) -> str:
        spec: Json = {"audiences": [audience], "expirationSeconds": 600}
        if pod:
            uid = pods[pod]["metadata"]["uid"]
            spec["boundObjectRef"] = {"kind": "Pod", "apiVersion": "v1", "name": pod, "uid": uid}
        return str(job.api.request("POST", account, {"spec": spec})["status"]["token"])

    place = f"/v1/jobs/{job.namespace}/{job.name}/workers"
    for offered, said in (
        (None, "403 there is no token"),
        ("nonsense", "403 the token is not that of a pod"),
        (token("bamboo.dev", worker)[:-5] + "AAAAA", "503 None"),
        (token("https://kubernetes.default.svc", worker), "503 None"),
        (token("bamboo.dev", None), "403 the token is not that of a pod"),
        (token("bamboo.dev", other), f"this is {other}, not {worker}"),
    ):
        assert asyncio.run(_knock(operator, place, worker, offered)) == said


def test_a_key_of_the_task_that_is_renamed_is_a_change(installed: Cluster, namespace: str) -> None:
    """The API server refuses edits that rename a key of task.config or change its value."""
    if installed.minor < OLDEST_SUPPORTED:
        pytest.skip("this server knows no rules")
    document = small(
        "renamed", 20, suspend=True, task={"entrypoint": "a:b", "config": {"a": 1, "b": None, "c": {"d": 2}}}
    )
    installed.api.create(document, namespace)
    place = f"{JOBS.format(namespace)}/renamed"
    assert installed.api.get(place)["spec"]["task"]["config"] == document["spec"]["task"]["config"]
    for wrong in ({"a": None, "z": 1}, {"c": {"d": None, "e": 2}}, {"a": 2}):
        with pytest.raises(ApiError, match=r"spec\.task: .*cannot change"):
            installed.api.patch(place, {"spec": {"task": {"config": wrong}}})


def test_what_is_wrong_is_said(installed: Cluster, namespace: str, operator: Operator) -> None:
    tolerations = [{"key": "a", "operator": "Exists"}, {"key": "b", "operator": "Sometimes"}]
    wrong = manifest(
        "wrong", standby=0, topology={"stages": 2}, worker={"template": {"spec": {"tolerations": tolerations}}}
    )
    job = Job(installed.api, namespace, wrong)
    status = job.until("Accepted", "False")
    assert "spec.tolerations[1].operator: Unsupported value" in condition(status, "Accepted")["message"]
    assert status["state"] == "Invalid"
    assert job.pods() == {}
    if installed.minor >= OLDEST_SUPPORTED:
        tolerations[1] = {"key": "b", "operater": "Exists"}
        job.edit({**wrong["spec"], "suspend": True})  # while it is not, the worker's template is fixed
        said = 'unknown field "spec.tolerations[1].operater"'
        job.wait(lambda status: said in condition(status, "Accepted")["message"])
    job.edit({"worker": None, "suspend": True})
    job.edit({"suspend": False})
    job.until("Accepted")
    job.delete()

    failing = small("failing", 20, task={"entrypoint": "bamboo_trainer.models.gpt:build", "config": {"dModel": -1}})
    job = Job(installed.api, namespace, failing)
    status = job.until("Failed")
    assert "task.config" in condition(status, "Failed")["message"]


@pytest.mark.slow
def test_a_job_is_deleted_without_its_pods(installed: Cluster, namespace: str, operator: Operator) -> None:
    """A job is deleted with propagationPolicy Orphan while no operator runs; its pods end once an operator is back."""
    document = small("orphaning")
    document["spec"]["task"]["config"]["learningRate"] = 1e-7
    (container,) = document["spec"]["worker"]["template"]["spec"]["containers"]
    container["env"] = [*container["env"], {"name": "AWKWARD", "value": "<é & \u2028>"}]
    job = Job(installed.api, namespace, document)
    job.until("Running")
    revisions = f"/apis/apps/v1/namespaces/{namespace}/controllerrevisions"
    installed.api.wait(revisions, lambda found: len(found["items"]) == 1)
    operator.kill()
    installed.api.request("DELETE", job.path, {"propagationPolicy": "Orphan"})
    installed.api.wait(job.path, lambda found: not found, 60)
    operator.start()
    job.until_pods(lambda pods: [pod["status"]["phase"] for pod in pods.values()] == ["Succeeded"] * 2)
    (revision,) = installed.api.get(revisions)["items"]
    assert "ownerReferences" not in revision["metadata"]
