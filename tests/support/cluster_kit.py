"""pytest plugin with a Kubernetes cluster: put pytest_plugins = ["cluster_kit"] into a test module.

Without KUBECONFIG in the environment, the plugin starts one test cluster for all tests, and stops it after the last of
them, since an idle API server takes processor time, too. With KUBECONFIG, tests use that cluster. Tests that need a
method that only the test cluster offers must then skip themselves.
"""

import os
import secrets
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cluster import build
from cluster.client import ApiError
from cluster.control_plane import SECURE_ONLY
from cluster.handle import Cluster, ControlFailed

BUILT = pytest.StashKey[bool]()
FAILURE = pytest.StashKey[Exception]()
STARTED = pytest.StashKey[Cluster]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    """Build Kubernetes before the first test with a cluster, outside of the test's time limit.

    Only the process of `make test` that runs these tests waits for the build. When they are done, stop the cluster.
    """
    if "cluster" in getattr(item, "fixturenames", ()):
        _build(item.config)
    done = yield
    if nextitem is None or not _may_have_a_cluster(nextitem):  # they come in a row: conftest.TOGETHER
        _stop(item.config)
    return done


def _may_have_a_cluster(item: pytest.Item) -> bool:
    return "cluster_kit" in getattr(getattr(item, "module", None), "pytest_plugins", ())


def _stop(config: pytest.Config) -> None:
    """Stop the test cluster, if it runs."""
    if (started := config.stash.get(STARTED, None)) is not None:
        del config.stash[STARTED]
        started.stop()


def _build(config: pytest.Config) -> None:
    """Build Kubernetes once, unless KUBECONFIG is set. If that fails, the fixture `cluster` skips or fails tests."""
    if BUILT in config.stash or os.environ.get("KUBECONFIG"):
        return
    config.stash[BUILT] = True
    capture = config.pluginmanager.getplugin("capturemanager")

    def report(line: str) -> None:
        with capture.global_and_fixture_disabled():
            build.to_stderr(line)

    try:
        build.binaries(report)
    except (build.Unavailable, build.Broken) as error:
        config.stash[FAILURE] = error


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    if given := os.environ.get("KUBECONFIG"):
        attached = Cluster.attach(Path(given.split(os.pathsep)[0]))
        if attached.folder:
            attached.restore()
        yield attached
        return
    failure = request.config.stash.get(FAILURE, None)
    if isinstance(failure, build.Unavailable):
        pytest.skip(str(failure))
    if failure:
        raise failure
    request.config.stash[STARTED] = started = Cluster.start()
    yield started
    _stop(request.config)


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """Yield a new namespace. At the test's end, delete it with its pods, and restore the test cluster's nodes."""
    name = f"test-{secrets.token_hex(4)}"
    path = f"/api/v1/namespaces/{name}"
    cluster.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    own = cluster.minor >= SECURE_ONLY  # older servers: the account is usable once it has its Secret
    cluster.api.wait(f"{path}/serviceaccounts/default", lambda found: found and (own or found.get("secrets")))
    try:
        yield name
    finally:
        if cluster.folder:
            cluster.restore()
        cluster.api.request("DELETE", f"{path}/pods", {"gracePeriodSeconds": 0})
        cluster.api.delete(path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Add the logs of a test's pods and of the cluster's components to its report, if it fails and uses `namespace`."""
    report = yield
    arguments = getattr(item, "funcargs", {})
    if report.when == "call" and report.failed and "namespace" in arguments:
        report.sections += _sections(arguments["cluster"], arguments["namespace"])
    return report


def _sections(cluster: Cluster, namespace: str) -> list[tuple[str, str]]:
    found = []
    with suppress(ApiError, OSError):
        for pod in cluster.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]:
            name, status = pod["metadata"]["name"], pod.get("status", {})
            with suppress(ApiError, ControlFailed, OSError):  # a kubelet has no log of a container that never started
                log = "\n".join(cluster.logs(namespace, name).splitlines()[-30:])
                found.append((f"pod {name}, {status.get('phase')}", log))
    return [*found, ("the cluster's components", cluster.tails())]
