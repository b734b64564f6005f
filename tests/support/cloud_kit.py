"""The clouds' metadata endpoints on this machine, with their paths, headers and answers."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import web

from http_kit import serving

ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"


class Endpoint:
    """One cloud's server. trouble: its answer to everything, or how many seconds it waits before each answer."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.trouble: web.Response | float | None = None
        self.url = ""
        self._serving = AsyncExitStack()

    async def __aenter__(self) -> "Endpoint":
        self.url = await self._serving.enter_async_context(serving(self._handle))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._serving.aclose()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.asked[f"{request.method} {request.path}"] += 1
        if isinstance(self.trouble, float):
            await asyncio.sleep(self.trouble)
        elif self.trouble:
            return web.Response(status=self.trouble.status, text=self.trouble.text, headers=self.trouble.headers)
        return await self.answer(request)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=404)


class AwsEndpoint(Endpoint):
    """says: the bodies of the paths that are not 404."""

    def __init__(self) -> None:
        super().__init__()
        self.says: dict[str, str] = {}
        self.tokens = 0
        self.expired = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/latest/api/token":
            if request.method != "PUT":
                return web.Response(status=405)
            if not 1 <= int(request.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "0")) <= 21600:
                return web.Response(status=400)
            self.tokens += 1
            return web.Response(text=f"token-{self.tokens}==")
        token = request.headers.get("X-aws-ec2-metadata-token", "")
        if token not in [f"token-{n}==" for n in range(self.expired + 1, self.tokens + 1)]:
            return web.Response(status=401)
        if body := self.says.get(request.path):
            return web.Response(text=body, content_type="text/plain")
        return web.Response(status=404, text="<?xml version='1.0'?><html>Not Found</html>", content_type="text/html")


class GcpEndpoint(Endpoint):
    """Answers whoever waits for a change when there is one. prefix: of the paths, so that nodes can differ."""

    def __init__(self) -> None:
        super().__init__()
        self.values = {PREEMPTED: "FALSE", MAINTENANCE: "NONE"}
        self.of_prefix: dict[tuple[str, str], str] = {}
        self.waited: list[dict[str, str]] = []
        self.waiting = 0
        self._changed = asyncio.Condition()

    async def say(self, path: str, value: str, prefix: str = "") -> None:
        async with self._changed:
            self.of_prefix[prefix, path] = value
            self._changed.notify_all()

    def _value(self, path: str) -> str:
        prefix, _, rest = path.partition("/computeMetadata")
        return self.of_prefix.get((prefix, f"/computeMetadata{rest}")) or self.values[f"/computeMetadata{rest}"]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Metadata-Flavor") != "Google":
            return web.Response(status=403)
        flavor = {"Metadata-Flavor": "Google"}
        path = request.path
        if path.endswith("/computeMetadata/v1/"):
            return web.Response(text="instance/\nproject/\n", headers=flavor)
        if not path.endswith((PREEMPTED, MAINTENANCE)):
            return web.Response(status=404)
        if request.query.get("wait_for_change") == "true":
            self.waited.append(dict(request.query))
            self.waiting += 1
            try:
                async with asyncio.timeout(float(request.query["timeout_sec"])), self._changed:
                    await self._changed.wait_for(lambda: _etag(self._value(path)) != request.query["last_etag"])
            except TimeoutError:
                pass
            finally:
                self.waiting -= 1
        value = self._value(path)
        return web.Response(text=value, headers={**flavor, "ETag": _etag(value)}, content_type="application/text")


def _etag(value: str) -> str:
    return value.encode().hex()[:16]


class AzureEndpoint(Endpoint):
    def __init__(self, name: str = "vmss_3") -> None:
        super().__init__()
        self.name = name
        self.events: list[dict[str, Any]] = []
        self.slow_first = 0.0
        self.acknowledged: list[Any] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Metadata") != "true":
            return web.json_response({"error": "Bad request. Required metadata header not specified"}, status=400)
        if request.path == "/metadata/instance/compute/name" and request.query["format"] == "text":
            return web.Response(text=self.name)
        if request.path != "/metadata/scheduledevents" or request.query["api-version"] != "2020-07-01":
            return web.Response(status=404)
        if request.method == "POST":
            self.acknowledged.append(await request.json())
            return web.Response(text="")
        slow, self.slow_first = self.slow_first, 0.0
        await asyncio.sleep(slow)
        return web.json_response({"DocumentIncarnation": 1, "Events": self.events})


def event(kind: str = "Preempt", *resources: str, **fields: Any) -> dict[str, Any]:
    """One of Azure's scheduled events, for vmss_3 if no other nodes are given."""
    usual: dict[str, Any] = {
        "EventId": "A123BC45-1234-5678-AB90-ABCDEF123456",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": list(resources or ("vmss_3",)),
        "EventStatus": "Scheduled",
        "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT",
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }
    return usual | fields
