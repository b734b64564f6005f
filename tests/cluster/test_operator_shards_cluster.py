"""Operators that divide the jobs on a real control plane: a job goes from one to another, and notices nothing."""

import signal
import socket
import time
from pathlib import Path

import pytest

from bamboo_core.names import shard_of
from bamboo_operator.kube.job_shards import MOST_SHARDS
from cluster.handle import Cluster
from operator_jobs import digests_of_a_local_run, manifest, slowed
from operator_process import PATIENCE, Job, Operator
from operator_web import ask, stand_in, step, until_ready, until_step

pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


@pytest.mark.slow
def test_a_job_changes_its_operator_twice_and_ends_with_the_same_bits(
    installed: Cluster, namespace: str, operator: Operator, tmp_path: Path
) -> None:
    """First a second operator comes, and asks for half of the shards, of which the job is in one; then it dies."""
    shards = next(n for n in range(2, MOST_SHARDS + 1) if shard_of(namespace, n) < n // 2)
    other = operator.another("second")
    with socket.create_server(("127.0.0.1", 0)) as free:
        other.port = free.getsockname()[1]
    pods = {one.identity: stand_in(installed, namespace, one.identity) for one in (operator, other)}
    record = ("--node-record", f"{namespace}/bamboo-operator-nodes")  # which one of them writes, and the other reads
    operator.more = other.more = ("--shards", str(shards), "--address", "127.0.0.1", *record)
    operator.kill(signal.SIGTERM)
    operator.start()
    until_ready(operator)
    document, slow = slowed(manifest("moves", 60, standby=0, topology={"stages": 2}), tmp_path)
    job = Job(installed.api, namespace, document)
    reached = until_step(operator, 3)

    other.start()
    try:
        reached = until_step(other, reached + 3)
        assert step(operator) == 0, "it has no metrics of a job of the other one"
        assert ask(operator, f"/jobs/{namespace}/moves/state")[0] == 401, "as the other one answers"
        assert job.status()["preemptions"] == 0

        other.kill()
        installed.api.delete(pods[other.identity], 0)
        until_step(operator, reached + 3)
        slow.unlink()
        status = job.until("Complete")
    finally:
        if other.alive:
            other.kill()
        print(other.said)
    other.check()
    assert status["preemptions"] == 0
    assert status["digests"] == digests_of_a_local_run(document, tmp_path)
    assert not [said for said in (operator.said, other.said) if "the record of nodes" in said], "it is well"
    assert operator.said.count("asks for shard") == 0
    assert other.said.count("asks for shard") == shards // 2
    deadline = time.monotonic() + PATIENCE
    while f"looks after shard {shards - 1} of {shards}" not in operator.said:
        assert time.monotonic() < deadline
        time.sleep(0.1)
