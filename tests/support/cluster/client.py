"""A small blocking client of the Kubernetes API for tests, with plain dictionaries."""

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster import kubeconfig

Json = dict[str, Any]
MERGE = "application/merge-patch+json"
BUSY_SECONDS, BUSY_PAUSE = 60.0, 0.2
STRATEGIC = "application/strategic-merge-patch+json"


class ApiError(Exception):
    """A refusal by the API server. code: the HTTP status; reason: Kubernetes' reason, such as NotFound."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code, self.reason = code, reason

    @classmethod
    def of(cls, code: int, body: str) -> "ApiError":
        try:
            status = json.loads(body)
            return cls(code, status.get("reason", ""), status.get("message", body))
        except (ValueError, AttributeError):
            return cls(code, "", body[:500])


class Client:
    def __init__(self, path: Path) -> None:
        self._access = kubeconfig.read(path)
        handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=self._access.tls)]
        if urllib.parse.urlsplit(self._access.server).hostname in ("127.0.0.1", "localhost"):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    def text(self, method: str, path: str, body: Any = None, *, content: str = "application/json", **query: Any) -> str:
        """Send a request and return the answer. Retries HTTP 429, except for evictions. Raises ApiError."""
        end = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                return self._text(method, path, body, content, query)
            except ApiError as error:
                if error.code != 429 or path.endswith("/eviction") or time.monotonic() > end:
                    raise
            time.sleep(BUSY_PAUSE)

    def _text(self, method: str, path: str, body: Any, content: str, query: dict[str, Any]) -> str:
        url = self._access.server + path + (f"?{urllib.parse.urlencode(query)}" if query else "")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": content}, method=method)
        if self._access.token:
            request.add_header("Authorization", f"Bearer {self._access.token}")
        try:
            with self._opener.open(request, timeout=30) as response:
                answer: bytes = response.read()
                return answer.decode()
        except urllib.error.HTTPError as error:
            with error:
                raise ApiError.of(error.code, error.read().decode()) from None

    def request(self, method: str, path: str, body: Any = None, **options: Any) -> Json:
        answer: Json = json.loads(self.text(method, path, body, **options))
        return answer

    def get(self, path: str, **query: Any) -> Json:
        return self.request("GET", path, **query)

    def find(self, path: str, **query: Any) -> Json | None:
        """Return an object; None if it does not exist."""
        try:
            return self.get(path, **query)
        except ApiError as error:
            if error.code != 404:
                raise
            return None

    def create(self, manifest: Json, namespace: str | None = None) -> Json:
        return self.request("POST", collection(manifest, namespace), manifest)

    def patch(self, path: str, body: Json, content: str = MERGE) -> Json:
        return self.request("PATCH", path, body, content=content)

    def delete(self, path: str, seconds: int | None = None) -> None:
        """Delete an object, if it exists. seconds: the grace period."""
        options = {} if seconds is None else {"gracePeriodSeconds": seconds}
        try:
            self.request("DELETE", path, options)
        except ApiError as error:
            if error.code != 404:
                raise

    def wait(self, path: str, condition: Callable[[Json], Any], seconds: float = 300) -> Json:
        """Poll an object ({} if missing) until the condition holds; return it. AssertionError after `seconds`."""
        end = time.monotonic() + seconds
        while True:
            found = self.find(path) or {}
            if condition(found):
                return found
            if time.monotonic() > end:
                shown = json.dumps({"spec": found.get("spec"), "status": found.get("status")}, indent=1)
                raise AssertionError(f"{path} was not as expected after {seconds} s:\n{shown}")
            time.sleep(0.3)  # each question costs 7 ms of processor time, here and at the server


def collection(manifest: Json, namespace: str | None = None) -> str:
    """Return the path to which a manifest is posted. The plural follows English rules, without discovery."""
    group, kind = manifest["apiVersion"], manifest["kind"].lower()
    plural = kind[:-1] + "ies" if kind.endswith("y") else kind + ("es" if kind.endswith("s") else "s")
    namespace = manifest["metadata"].get("namespace", namespace)
    prefix = f"/apis/{group}" if "/" in group else f"/api/{group}"
    return f"{prefix}/namespaces/{namespace}/{plural}" if namespace else f"{prefix}/{plural}"
