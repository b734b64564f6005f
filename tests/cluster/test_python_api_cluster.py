"""`import bamboo` with a real API server and operator: a program submits, follows, disturbs and ends jobs."""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import bamboo
from bamboo.jobs.results import JobProgress
from cluster.handle import Cluster
from operator_jobs import small, wrapped
from operator_process import Operator

pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

WAIT_SECONDS = 200.0  # for anything on a loaded machine


def job(folder: Path, document: Any) -> bamboo.Job:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return bamboo.Job.from_file(path)


def until(handle: bamboo.JobHandle, met: Callable[[JobProgress], bool]) -> JobProgress:
    end = time.monotonic() + WAIT_SECONDS
    while not met(progress := handle.progress):
        assert time.monotonic() < end, progress
        time.sleep(0.3)
    return progress


@pytest.fixture
def client(installed: Cluster, namespace: str, operator: Operator) -> bamboo.Client:
    return bamboo.Client(namespace=namespace, kubeconfig=str(installed.kubeconfig))


@pytest.fixture
def store() -> Iterator[str]:
    """A folder that all pods see, as they have a /tmp of their own."""
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
    until(handle, lambda now: now.state == "Running" and now.step > 1)
    assert "story: Running, step " in repr(client.job("story"))
    handle.preempt()
    until(handle, lambda now: now.preemptions == 1)
    assert {"Started", "WorkerLost"} <= {event.reason for event in handle.events()}
    handle.suspend()
    kept = handle.checkpoints()[0].step
    assert (handle.progress.state, handle.progress.grid) == ("Suspended", ())
    assert handle.weights().keys()
    handle.resume()
    until(handle, lambda now: now.state == "Running" and now.step > kept)
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
    ended = handle.wait(WAIT_SECONDS)
    assert (ended.step, ended.steps) == (20, 20)
    failed = client.submit(job(tmp_path, crash))
    with pytest.raises(bamboo.JobFailed) as told:
        failed.wait(WAIT_SECONDS)
    assert told.value.reason == "BackoffLimitExceeded"
    assert "exited with code 7: the last word" in told.value.message
    assert failed.progress.state == "Failed"


def test_a_cluster_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(bamboo.BambooError, match="nowhere"):
        bamboo.Client(kubeconfig=str(tmp_path / "nowhere"))
