"""API objects, and a small HTTP server that serves them, for tests of commands on a cluster."""

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml

Json = dict[str, Any]
NOW = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)
SPEC = {
    "task": {"entrypoint": "bamboo_trainer.models.mlp:build"},
    "training": {"steps": 1000, "globalBatchSize": 64, "microBatchSize": 8},
    "topology": {"stages": 4},
    "standby": {"workers": 1},
}


def stamp(seconds_ago: float = 0) -> str:
    return (NOW - timedelta(seconds=seconds_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(kind: str, holds: bool, reason: str = "Because", message: str = "") -> Json:
    return {"type": kind, "status": str(holds), "reason": reason, "message": message, "lastTransitionTime": stamp(60)}


def plan(*rows: list[str]) -> str:
    return json.dumps({"epoch": 2, "pipelines": list(rows)})


def job(name: str = "story", spec: Mapping[str, Any] = SPEC, **status: Any) -> Json:
    """Return a running job at step 100, on workers w0 to w3, with w4 on standby."""
    row = [f"{name}-w{n}" for n in range(4)]
    usual: Json = {
        "state": "Running",
        "plan": plan(row),
        "preemptions": 0,
        "takeovers": 0,
        "conditions": [condition("Accepted", True), condition("WorkersReady", True), condition("Running", True)],
        "pipelines": {"desired": 1, "ready": 1},
        "workers": {"desired": 5, "ready": 5},
        "training": {
            "step": 100,
            "steps": 1000,
            "loss": 2.5,
            "samplesPerSecond": 130.06,
            "etaSeconds": 125,
            "lastReportedTime": stamp(5),
        },
        "cost": {"perHour": "4.50", "total": "0.1234"},
    }
    return {
        "apiVersion": "bamboo.dev/v1alpha1",
        "kind": "BambooJob",
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}",
            "generation": 1,
            "creationTimestamp": stamp(600),
        },
        "spec": dict(spec),
        "status": {**usual, **status},
    }


def pod(number: int, name: str = "story", **status: Any) -> Json:
    """Return the pod of a worker that runs on one of three nodes."""
    started = {"name": "trainer", "state": {"running": {"startedAt": stamp(300)}}}
    return {
        "metadata": {
            "name": f"{name}-w{number}",
            "namespace": "team",
            "uid": f"uid-{name}-w{number}",
            "creationTimestamp": stamp(300),
            "labels": {
                "bamboo.dev/job-name": name,
                "bamboo.dev/worker-index": str(number),
                "bamboo.dev/capacity-type": "Spot",
                "bamboo.dev/node-pool": "spot",
            },
            "ownerReferences": [{"kind": "BambooJob", "name": name, "uid": f"uid-{name}", "controller": True}],
        },
        "spec": {"nodeName": f"node-{number % 3}", "terminationGracePeriodSeconds": 30},
        "status": {"phase": "Running", "containerStatuses": [started], **status},
    }


def ended(code: int, reason: str = "Error") -> Json:
    """Return the pod status of a worker that has ended. code: its exit code."""
    state = {"terminated": {"exitCode": code, "reason": reason}}
    return {"phase": "Failed" if code else "Succeeded", "containerStatuses": [{"name": "trainer", "state": state}]}


def node(name: str, *taints: Json, **labels: str) -> Json:
    zone = {"topology.kubernetes.io/zone": f"zone-{name[-1]}"}
    return {
        "metadata": {"name": name, "resourceVersion": "7", "labels": zone | labels},
        "spec": {"taints": list(taints)},
    }


def event(about: str, reason: str, message: str, seconds_ago: float = 30, **more: Any) -> Json:
    kind = "Pod" if about[-2:-1] == "w" else "BambooJob"
    return {
        "metadata": {"uid": f"{about}-{reason}-{seconds_ago}", "resourceVersion": "5"},
        "involvedObject": {"kind": kind, "name": about, "uid": f"uid-{about}"},
        "reason": reason,
        "message": message,
        "type": "Normal",
        "lastTimestamp": stamp(seconds_ago),
        "count": 1,
        **more,
    }


def kubeconfig(path: Path, url: str, user: Mapping[str, Any] | None = None, **cluster: Any) -> Path:
    path.write_text(
        yaml.safe_dump(
            {
                "current-context": "here",
                "contexts": [
                    {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "team"}},
                    {"name": "elsewhere", "context": {"cluster": "c", "user": "u"}},
                ],
                "clusters": [{"name": "c", "cluster": {"server": url, **cluster}}],
                "users": [{"name": "u", "user": {"token": "t"} if user is None else dict(user)}],
            }
        )
    )
    return path


class Asked:
    """A request that the server received."""

    def __init__(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        parts = urlsplit(handler.path)
        self.method, self.path, self.query = handler.command, parts.path, dict(parse_qsl(parts.query))
        self.headers = {name.title(): value for name, value in handler.headers.items()}
        self.body = json.loads(body) if body else None


Answer = Callable[[Asked], tuple[int, Any]]


def refusal(status: int, reason: str, message: str) -> tuple[int, Json]:
    return status, {"kind": "Status", "status": "Failure", "code": status, "reason": reason, "message": message}


@contextmanager
def server(answer: Answer) -> Iterator[tuple[str, list[Asked]]]:
    """Serve the (status, body) that `answer` returns for a request; yield the URL and the list of requests."""
    asked: list[Asked] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            asked.append(Asked(self, self.rfile.read(int(self.headers.get("Content-Length") or 0))))
            status, found = answer(asked[-1])
            data = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Retry-After", "0")  # read by clients if the status says that the server is busy
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = do_DELETE = _serve

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128  # with the default, 5, a sixth caller at once retries only after seconds

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore errors of callers that hang up: tests do so on purpose."""
            if not isinstance(sys.exception(), ConnectionError):
                super().handle_error(request, client_address)

    with Server(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_address[1]}", asked
        finally:
            running.shutdown()
            thread.join()
