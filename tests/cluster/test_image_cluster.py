"""The operator's image on a real API server: it operates a job from a container, and leaves when it is told to."""

import secrets
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from bamboo_core.control.digests import add_digests
from cluster.handle import Cluster
from image_kit import RUN_SECONDS, Images, Unavailable, call, confined, images
from operator_jobs import digest_of_undisturbed, small
from operator_process import Job, Operator

pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.image, pytest.mark.slow, pytest.mark.timeout(2400)]


class Contained(Operator):
    """As its Deployment runs it, but on this machine's network."""

    def __init__(self, built: Images, cluster: Cluster, namespace: str, folder: Path) -> None:
        self._built, self._name = built, f"bamboo-test-{secrets.token_hex(4)}"
        super().__init__(cluster, namespace, folder)

    def run(self, arguments: list[str], env: dict[str, str], log: BinaryIO) -> subprocess.Popen[bytes]:
        for path in self._folder.iterdir():
            path.chmod(0o644)  # the image's user is neither root nor the one who runs the tests
        command = self._built.store.podman(
            "run",
            "--rm",
            "--name",
            self._name,
            *confined(tmp=False),
            "--env",
            f"KUBECONFIG={self._kubeconfig}",
            "--volume",
            f"{self._folder}:{self._folder}:ro",
            self._built.operator,
            *arguments,
        )
        return subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def remove(self) -> None:
        call(self._built.store.podman("rm", "--force", "--time", "0", "--ignore", self._name), RUN_SECONDS)


@pytest.fixture
def operator(installed: Cluster, namespace: str, tmp_path: Path) -> Iterator[Contained]:
    try:
        built = images()
    except Unavailable as error:
        pytest.skip(str(error))
    folder = tmp_path / "operator"
    folder.mkdir()
    running = Contained(built, installed, namespace, folder)
    try:
        yield running
    finally:
        running.remove()
        running.kill()
        print(running.said)
    running.check()


def test_the_operators_image_operates(installed: Cluster, namespace: str, operator: Contained, tmp_path: Path) -> None:
    document = small("contained", steps=200)
    status = Job(installed.api, namespace, document).until("Complete")
    assert add_digests(status["digests"]) == digest_of_undisturbed(document)
    with urllib.request.urlopen(f"http://127.0.0.1:{operator.web_port}/healthz", timeout=10) as answer:
        assert answer.status == 200
    assert operator.kill(signal.SIGTERM) == 0, operator.said
