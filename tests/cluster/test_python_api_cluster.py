"""The Python API with a real API server and operator: a program submits, follows, disturbs and ends jobs."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import bamboo
from cluster.handle import Cluster
from operator_jobs import small, wrapped
from operator_process import PATIENCE, Operator
from waiting import until

pytest_plugins = ["cluster_kit", "operator_process"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


def job(folder: Path, document: Any) -> bamboo.Job:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return bamboo.Job.from_file(path)


def trains_on(handle: bamboo.JobHandle, step: int) -> bool:
    progress = handle.progress
    return progress.state == "Running" and progress.step > step


@pytest.fixture
def client(installed: Cluster, namespace: str, operator: Operator) -> bamboo.Client:
    return bamboo.Client(namespace=namespace, kubeconfig=str(installed.kubeconfig))


@pytest.fixture
def store() -> Iterator[str]:
    """Yield the URI of a folder that all pods share. It is not in /tmp, since each pod has a /tmp of its own."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder).as_uri()


@pytest.mark.slow
def test_the_life_of_a_job(client: bamboo.Client, tmp_path: Path, store: str) -> None:
    wanted = job(tmp_path, small("story", standby=1, checkpoint={"storage": store}))
    assert client.submit(wanted, dry_run=True).name == "story"
    assert client.jobs() == []
    handle = client.submit(wanted)
    with pytest.raises(bamboo.ClusterError, match="job story exists in namespace"):
        client.submit(wanted)
    assert [one.name for one in client.jobs()] == ["story"]
    until(lambda: trains_on(handle, 1), PATIENCE, lambda: handle.progress)
    assert "story: Running, step " in repr(client.job("story"))
    handle.preempt()
    until(lambda: handle.progress.preemptions == 1, PATIENCE, lambda: handle.progress)
    assert {"Started", "WorkerLost"} <= {event.reason for event in handle.events()}
    handle.suspend()
    kept = handle.checkpoints()[0].step
    assert (handle.progress.state, handle.progress.grid) == ("Suspended", ())
    assert handle.weights().keys()
    handle.resume()
    until(lambda: trains_on(handle, kept), PATIENCE, lambda: handle.progress)
    assert handle.history().losses()
    assert "<b>story</b>: Running" in handle._repr_html_()
    handle.stop()
    with pytest.raises(bamboo.JobInterrupted, match="the job was deleted"):
        handle.wait()
    with pytest.raises(bamboo.ClusterError, match="there is no job story"):
        client.job("story")


@pytest.mark.slow
def test_jobs_that_end_are_watched(client: bamboo.Client, tmp_path: Path) -> None:
    short = job(tmp_path, small("short", steps=20))
    crash = wrapped(small("crash", backoffLimit=0), ["bash", "-c", "echo the last word; exit 7"])

    handle = client.submit(short)
    for progress in client.watch():
        if progress.state == "Complete":
            break
    ended = handle.wait(PATIENCE)
    assert (ended.step, ended.steps) == (20, 20)
    failed = client.submit(job(tmp_path, crash))
    with pytest.raises(bamboo.JobFailed) as told:
        failed.wait(PATIENCE)
    assert told.value.reason == "BackoffLimitExceeded"
    assert "exited with code 7: the last word" in told.value.message
    assert failed.progress.state == "Failed"


def test_a_cluster_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(bamboo.BambooError, match="nowhere"):
        bamboo.Client(kubeconfig=str(tmp_path / "nowhere"))
