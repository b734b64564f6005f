"""A real Prometheus, and its promtool, for tests: Debian's package, unpacked into the cache and not installed."""

import contextlib
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.build import cache_folder
from cluster.control_plane import free_ports

MISSING = "needs Prometheus: apt-get install prometheus (or apt-get and dpkg-deb, and Debian's packages within reach)"
START_SECONDS = 60


def binary(name: str) -> str:
    """Path of prometheus or promtool. Skips the test if neither the system nor Debian has it."""
    if found := shutil.which(name):
        return found
    cache = cache_folder() / "prometheus"
    if not (cache / "usr/bin" / name).exists():
        _fetch(cache)
    return str(cache / "usr/bin" / name)


def _fetch(cache: Path) -> None:
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        pytest.skip(MISSING)
    cache.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="prometheus-", dir=cache.parent))
    try:
        download = ["apt-get", "download", "-o", "APT::Sandbox::User=", "prometheus"]
        done = subprocess.run(download, cwd=work, capture_output=True, text=True, timeout=100, check=False)
        packages = sorted(work.glob("prometheus_*.deb"))
        if done.returncode or not packages:
            pytest.skip(f"{MISSING}: {done.stderr.strip()[-200:]}")
        subprocess.run(["dpkg-deb", "-x", str(packages[0]), str(work / "root")], check=True, timeout=60)
        with contextlib.suppress(OSError):  # somebody else was faster
            (work / "root").rename(cache)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def promtool(*arguments: str, stdin: str | None = None) -> str:
    """What it says. Fails the test if it does not like what it is given."""
    done = subprocess.run(
        [binary("promtool"), *arguments], input=stdin, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


class Prometheus:
    """A running server."""

    def __init__(self, port: int, log: Path) -> None:
        self.port, self._log = port, log

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The instant vector (or a scalar, as one sample)."""
        data = self._get("query", {"query": expr})
        return [{"metric": {}, "value": data["result"]}] if data["resultType"] == "scalar" else data["result"]

    def targets(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get("targets", {})["activeTargets"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        """Every rule as it was last evaluated."""
        return [rule for group in self._get("rules", {})["groups"] for rule in group["rules"]]

    def until(self, expr: str, seconds: float = 60) -> list[dict[str, Any]]:
        """Wait until the query has a result; the result."""
        deadline = time.monotonic() + seconds
        while not (found := self.query(expr)):
            assert time.monotonic() < deadline, f"no result for {expr} within {seconds:g} s"
            time.sleep(0.5)
        return found

    def _get(self, what: str, arguments: Mapping[str, str]) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{what}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{arguments}: {error.read().decode()}") from None


@contextlib.contextmanager
def prometheus(folder: Path, config: Mapping[str, Any]) -> Iterator[Prometheus]:
    """Serves until the end of the block."""
    (folder / "prometheus.yml").write_text(yaml.safe_dump(dict(config)))
    (port,) = free_ports(1)
    command = [binary("prometheus"), f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    log = folder / "prometheus.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        _until_ready(process, port, log)
        yield Prometheus(port, log)
    finally:
        process.terminate()
        try:
            process.wait(20)
        finally:
            process.kill()
            process.wait()


def _until_ready(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=2):
            return
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
