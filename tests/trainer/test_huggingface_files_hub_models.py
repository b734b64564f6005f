"""Models by their id on the Hub, fetched by huggingface_hub from a server with the Hub's endpoints."""

import hashlib
import json
import os
import shutil
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from bamboo_trainer.loading import load_task
from bamboo_trainer.models.huggingface_files import model_folder
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.user_code import build_layer
from transformers_kit import ENTRYPOINT, FAMILIES, LENGTH, transformers

MODEL, COMMIT = "bamboo-tests/tiny-gpt2", "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_" + "s" * 20


class Hub:
    """A fake Hub with one model. asked: method and path of each request, in order. tokens: their Authorization headers.
    status: the code of every answer; 0 for the usual ones.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked, self.tokens = folder, list[str](), set[str | None]()
        self.status = 0
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def files(self) -> list[str]:
        """The names of the fetched files."""
        fetched = (path for method, _, path in (one.partition(" ") for one in self.asked) if method == "GET")
        return sorted(path.rpartition(f"/{COMMIT}/")[2] for path in fetched if "/resolve/" in path)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                """Log nothing."""

            def do_HEAD(self) -> None:
                self._answer(body=False)

            def do_GET(self) -> None:
                self._answer(body=True)

            def _answer(self, *, body: bool) -> None:
                path = urllib.parse.urlsplit(self.path).path
                hub.asked.append(f"{self.command} {path}")
                hub.tokens.add(self.headers.get("Authorization"))
                data, headers = (None, {}) if hub.status else hub.found(path)
                self.send_response(hub.status or (404 if data is None else 200))
                known = data or b""
                for name, value in {**headers, "Content-Length": str(len(known))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if body:
                    self.wfile.write(known)

        return Handler

    def found(self, path: str) -> tuple[bytes | None, dict[str, str]]:
        parts = path.strip("/").split("/")
        if path.startswith(f"/api/models/{MODEL}/tree/{COMMIT}"):
            rows = [
                {
                    "type": "file",
                    "oid": _oid(file),
                    "size": file.stat().st_size,
                    "path": str(file.relative_to(self.folder)),
                }
                for file in sorted(self.folder.rglob("*"))
                if file.is_file()
            ]
            return json.dumps(rows).encode(), {"Content-Type": "application/json"}
        if path == f"/api/models/{MODEL}/revision/main":
            return json.dumps({"id": MODEL, "sha": COMMIT}).encode(), {"Content-Type": "application/json"}
        if path.startswith(f"/{MODEL}/resolve/{COMMIT}/"):
            file = self.folder / "/".join(parts[4:])
            if file.is_file():
                return file.read_bytes(), {"ETag": f'"{_oid(file)}"', "X-Repo-Commit": COMMIT}
        missing = "RevisionNotFound" if MODEL in path else "RepoNotFound"
        return None, {"X-Error-Code": missing}


def _oid(file: Path) -> str:
    data = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Start a Hub with one model of several files, not all of them needed, and an empty cache."""
    folder = tmp_path / "published"
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**FAMILIES["gpt2"])).save_pretrained(
        folder, max_shard_size="8KB"
    )
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    (folder / "modeling_own.py").write_text("raise SystemExit\n")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.safetensors").write_bytes(b"other")
    made = Hub(folder)
    monkeypatch.setattr(constants, "ENDPOINT", made.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", made.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_ENDPOINT", made.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    yield made
    made.close()


def config(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "revision": COMMIT, "data": {"length": LENGTH}, **more}


def refused(said: str, **more: Any) -> str:
    with pytest.raises(TaskError) as error:
        load_task(ENTRYPOINT, {key: value for key, value in config(**more).items() if value is not None})
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert TOKEN not in str(error.value)
    return str(error.value)


def test_a_model_is_fetched_once_and_no_file_that_is_not_needed(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    task = load_task(ENTRYPOINT, config())
    by_folder = load_task(ENTRYPOINT, {"model": str(hub.folder), "data": {"length": LENGTH}})
    ours, theirs = (build_layer(one, 0, 0).state_dict() for one in (task, by_folder))
    assert all(bool((ours[name] == theirs[name]).all()) for name in theirs)
    needed = sorted(
        path.name
        for path in hub.folder.iterdir()
        if path.is_file() and path.name not in ("pytorch_model.bin", "modeling_own.py")
    )
    assert len(needed) > 5
    assert hub.files == needed
    assert hub.tokens - {None} == {f"Bearer {TOKEN}"}
    assert TOKEN not in caplog.text + "".join(capfd.readouterr())
    before = len(hub.asked)
    load_task(ENTRYPOINT, config())
    assert len(hub.asked) == before, "what the cache has is not asked for"


def test_a_model_of_random_values_needs_no_weights(hub: Hub) -> None:
    load_task(ENTRYPOINT, config(random=True))
    assert not [name for name in hub.files if name.endswith(".safetensors")]


def test_what_forbids_or_fails_to_fetch_says_what_to_do(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = f"run `hf download {MODEL} --revision {COMMIT}` where there is a network, for the cache {tmp_path}/cache"
    hub.status = 403
    refused(f"{hub.url} answered 403: {what}, or name a folder as model")
    hub.status = 0
    refused(f"{hub.url} has no revision {'f' * 40} of {MODEL}", revision="f" * 40)
    refused(f"{hub.url} has no model bamboo-tests/none that HF_TOKEN may read", model="bamboo-tests/none")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = len(hub.asked)
    refused(f"it is not in the cache as a whole, and HF_HUB_OFFLINE forbids to fetch it: {what}")
    assert len(hub.asked) == asked


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_named_without_the_password_in_its_address(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error, after half a minute of retries by huggingface_hub, has the Hub's address without its password."""
    hub.close()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url.replace("//", f"//me:{TOKEN}@"))
    refused(f"{hub.url} cannot be reached (ConnectError): run `hf download {MODEL} --revision {COMMIT}`")


def test_a_model_is_pinned_to_a_commit(hub: Hub) -> None:
    said = refused(f"{MODEL}; for the model of that name on the Hub revision must name a commit of it", revision=None)
    assert said.endswith(f"; main is {COMMIT} now")
    refused(f"revision must be a commit of 40 hex digits, got 'main'; main is {COMMIT} now", revision="main")
    refused("revision must be a commit of 40 hex digits, got 'v9' (", revision="v9")


def test_a_folder_of_that_name_comes_first(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(hub.folder, MODEL)
    assert model_folder(MODEL, None, weights=True) == MODEL
    assert not hub.asked
    assert "HF_HUB_OFFLINE" not in os.environ
