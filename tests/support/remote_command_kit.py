"""A runner of `bamboo` commands against a fake API server."""

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from bamboo.cli.commands import app
from remote_kit import Asked, Json, event, kubeconfig, node, pod, refusal, server

MANIFEST = """
apiVersion: bamboo.dev/v1alpha1
kind: BambooJob
metadata: {name: story, resourceVersion: "9"}
spec:
  task: {entrypoint: "bamboo_trainer.models.mlp:build"}
  training: {steps: 3, globalBatchSize: 4, microBatchSize: 2}
  topology: {stages: 2}
status: {state: Running}
"""


class Fake:
    """An API server with one job and its pods, without an operator. there: whether the job already exists."""

    def __init__(self, body: Json, *, there: bool = True) -> None:
        self.body, self.there = body, there

    def __call__(self, asked: Asked) -> tuple[int, Any]:
        last = asked.path.rsplit("/", 1)[1]
        if asked.method == "PATCH":
            self.there = True
            return 200, self.body
        match last:
            case "v1alpha1":
                return 200, {}
            case "bamboojobs":
                return 200, {"items": [self.body] if self.there else []}
            case "pods":
                return 200, {"items": [] if asked.path == "/api/v1/pods" else [pod(n) for n in range(5)]}
            case "events":
                kind = asked.query["fieldSelector"].split("=")[1].split(",")[0]
                about = "story" if kind == "BambooJob" else "story-w1"
                return 200, {"items": [event(about, f"Of{kind}", "a sentence")]}
            case "log":
                return 200, b"first\nlast\n"
            case _ if asked.path.startswith("/api/v1/nodes/"):
                return 200, node(last)
            case _ if self.there and asked.path.endswith("/bamboojobs/story"):
                return 200, self.body
        return refusal(404, "NotFound", "not found")


def type_in(folder: Path, fake: Fake, *arguments: str) -> tuple[int, str, str, list[Asked]]:
    """Run `bamboo` with these arguments; "FILE" becomes MANIFEST's path. Return exit code, stdout, stderr, requests."""
    with server(fake) as (url, asked):
        path = kubeconfig(folder / "config", url, {"token": "t"})
        manifest = folder / "job.yaml"
        manifest.write_text(MANIFEST)
        words = [str(manifest) if word == "FILE" else word for word in arguments]
        if words[0] in ("submit", "run") and "--load" not in words:
            words.append("--no-load")  # it takes seconds; tests/client/test_task_check.py tests it
        done = CliRunner().invoke(app, [*words, "--kubeconfig", str(path)])
    assert "Traceback" not in done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr, asked
