"""`bug-report`: one archive with what somebody else needs to understand a job's trouble, and without secrets."""

import asyncio
import contextlib
import io
import json
import os
import platform
import re
import tarfile
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Any, Final

from bamboo.remote.diagnosis.reading import read_facts
from bamboo.remote.doctor import diagnosis
from bamboo.remote.operator_pods import operator_pods
from bamboo.remote.session import Session, Target
from bamboo_core.complaints import system_reason
from bamboo_core.job.manifest import ManifestError, parse_manifest
from bamboo_core.job.spec import JobSpec
from bamboo_core.kube.api import KubeApi
from bamboo_core.kube.errors import ApiError, ClusterUnreachable, RemoteError, UsageError
from bamboo_core.names import EXIT_OK, TRAINER_CONTAINER
from bamboo_core.text import size

OPERATOR_CONTAINER: Final = "operator"
OPERATOR_LINES: Final = 5000
WORKER_LINES: Final = 1000
MOST_WORKERS: Final = 64  # whose logs are in it
LARGEST_LOG: Final = 4 << 20  # bytes
LOG_SECONDS: Final = 60.0
LOGS_AT_ONCE: Final = 8
HIDDEN: Final = "(hidden)"
SECRET_KEY: Final = re.compile(r"(?i)(token|secret|passw|credential|api_?-?key|access_?key|private_?key|authorization)")
SECRET_TEXT: Final = re.compile(
    r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # a JSON web token
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\b(?:hf|ghp|gho|github_pat|sk|glpat)[_-][A-Za-z0-9_-]{16,}"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"  # of a URL with a password
    r"|(?i:(?<=bearer )[\w.~+/-]{12,}=*)"
    r"|(?i:(?<=[?&]sig=)[^&\s]+|(?<=[?&]x-amz-signature=)[^&\s]+|(?<=[?&]token=)[^&\s]+|(?<=#token=)[^&\s]+)"
)


async def bug_report(session: Session, target: Target | None, *, operator_namespace: str | None, path: Path) -> int:
    """Writes the archive to a file that is not there yet. Raises UsageError or RemoteError; nothing is half written."""
    if path.exists():
        raise UsageError(f"--output {path}: it exists; name another file")
    files = await collected(session, target, operator_namespace)
    try:
        written = _write(path, files)
    except OSError as error:
        raise RemoteError(f"{path}: cannot be written: {system_reason(error)}") from error
    session.say(f"{path}: {len(files)} files, {size(written)}. Environment variables, secrets and annotations are left")
    session.say("out, and what looks like a token in logs is hidden; look through it before you pass it on.")
    return EXIT_OK


def _write(path: Path, files: Mapping[str, str]) -> int:
    """The size of the archive in bytes. Only its owner can read it."""
    root, partial = path.name.removesuffix(".gz").removesuffix(".tar"), path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with (
            os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened,
            tarfile.open(fileobj=opened, mode="w:gz") as archive,
        ):
            for name, text in files.items():
                data = text.encode()
                entry = tarfile.TarInfo(f"{root}/{name}")
                entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
                archive.addfile(entry, io.BytesIO(data))
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    return path.stat().st_size


async def collected(session: Session, target: Target | None, operator_namespace: str | None) -> dict[str, str]:
    """The files of the archive by name. What may not be read is named in missing.txt."""
    reader = _Reader(session.api)
    files = {"versions.txt": _versions()}
    namespace, name = session.of(target) if target is not None else (session.namespace, "")
    body = await session.api.job(namespace, name) if name else None
    facts = await read_facts(session.api, namespace, operator_namespace, _spec(body))
    found = diagnosis(facts, datetime.now(UTC))
    files["doctor.json"] = _json([asdict(one) for one in found])
    session.say("reading logs")
    for pod in await reader.objects("operators", operator_pods(session.api, operator_namespace)):
        where = f"operator/{pod['metadata']['name']}"
        files[f"{where}.json"] = _json(without_secrets(pod))
        files[f"{where}.log"] = await reader.log(pod, OPERATOR_CONTAINER, OPERATOR_LINES)
    if body is not None:
        files |= await _of_job(reader, body, namespace, name)
    if reader.missing:
        files["missing.txt"] = "".join(f"{line}\n" for line in reader.missing)
    return files


async def _of_job(reader: "_Reader", body: Mapping[str, Any], namespace: str, name: str) -> dict[str, str]:
    api = reader.api
    files = {"job.json": _json(without_secrets(body))}
    pods = await reader.objects("pods", api.pods(namespace, name))
    events = await reader.objects("events", api.events(namespace, "BambooJob", name))
    events += await reader.objects("events of pods", api.events(namespace, "Pod"))
    names = {pod["metadata"]["name"] for pod in pods} | {name}
    files["events.json"] = _json([without_secrets(e) for e in events if e["involvedObject"]["name"] in names])
    nodes = await api.nodes({str(pod["spec"]["nodeName"]) for pod in pods if pod["spec"].get("nodeName")})
    files["nodes.json"] = _json([without_secrets(node) for node in nodes.values()])
    files["pods.json"] = _json([without_secrets(pod) for pod in pods])
    at_once = asyncio.Semaphore(LOGS_AT_ONCE)

    async def one(pod: Mapping[str, Any]) -> tuple[str, str]:
        async with at_once:
            return f"workers/{pod['metadata']['name']}.log", await reader.log(pod, TRAINER_CONTAINER, WORKER_LINES)

    return files | dict(await asyncio.gather(*(one(pod) for pod in pods[:MOST_WORKERS])))


class _Reader:
    """Reads what may be read, and keeps in words what may not."""

    def __init__(self, api: KubeApi) -> None:
        self.api = api
        self.missing: list[str] = []

    async def objects(self, what: str, asked: Awaitable[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
        try:
            return list(await asked)
        except ClusterUnreachable:
            raise
        except RemoteError as error:
            self.missing.append(f"{what}: {error}")
            return []

    async def log(self, pod: Mapping[str, Any], container: str, lines: int) -> str:
        """The last lines of a container's log, without what looks like a secret."""
        metadata = pod["metadata"]
        query = {"container": container, "tailLines": str(lines), "timestamps": "true", "limitBytes": str(LARGEST_LOG)}
        read: list[str] = []
        try:
            async with (
                asyncio.timeout(LOG_SECONDS),
                contextlib.aclosing(self.api.log(metadata["namespace"], metadata["name"], query)) as found,
            ):
                async for line in found:
                    read.append(hidden(line))
        except (ApiError, ClusterUnreachable, TimeoutError) as error:
            self.missing.append(f"log of {metadata['namespace']}/{metadata['name']}: {error or 'not read in time'}")
        return "".join(f"{line}\n" for line in read)


def _versions() -> str:
    lines = [
        f"bamboo {distribution_version('bamboo-spot')}",
        f"python {platform.python_version()}",
        platform.platform(),
    ]
    return "".join(f"{line}\n" for line in lines)


def _spec(body: Mapping[str, Any] | None) -> JobSpec | None:
    """A job that the operator refuses has none."""
    try:
        return None if body is None else parse_manifest(body)
    except ManifestError:
        return None


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, default=str) + "\n"


def without_secrets(value: Any) -> Any:
    """The object without values of environment variables, annotations and managed fields, and without the values of
    keys that are named as secrets are; text that looks like a secret is hidden.
    """
    if isinstance(value, Mapping):
        return {str(key): _kept(str(key), inner) for key, inner in value.items() if key != "managedFields"}
    if isinstance(value, list):
        return [without_secrets(one) for one in value]
    return hidden(value) if isinstance(value, str) else value


def _kept(key: str, value: Any) -> Any:
    if key == "annotations" and isinstance(value, Mapping):
        return dict.fromkeys(value, HIDDEN)
    if key == "env" and isinstance(value, Sequence) and not isinstance(value, str):
        return [{**one, "value": HIDDEN} if isinstance(one, Mapping) and "value" in one else one for one in value]
    if SECRET_KEY.search(key) and isinstance(value, str | int | float) and not isinstance(value, bool):
        return HIDDEN
    return without_secrets(value)


def hidden(text: str) -> str:
    """Text without what looks like a token, a key or a password in a URL."""
    return SECRET_TEXT.sub(HIDDEN, text)
