"""Readiness probes: exec, httpGet and tcpSocket."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp

Json = dict[str, Any]
Execute = Callable[[Sequence[str]], Awaitable[int]]


async def watch_readiness(container: Json, address: str, execute: Execute, tell: Callable[[bool], None]) -> None:
    """Probes for ever; tell is called when the verdict changes."""
    probe = container["readinessProbe"]
    await asyncio.sleep(probe.get("initialDelaySeconds", 0))
    needed = {True: probe.get("successThreshold", 1), False: probe.get("failureThreshold", 3)}
    verdict, in_a_row, latest = False, 0, False
    while True:
        good = await _attempt(probe, container, address, execute)
        in_a_row = in_a_row + 1 if good == latest else 1
        latest = good
        if good != verdict and in_a_row >= needed[good]:
            verdict = good
            tell(verdict)
        await asyncio.sleep(probe.get("periodSeconds", 10))


async def _attempt(probe: Json, container: Json, address: str, execute: Execute) -> bool:
    with contextlib.suppress(TimeoutError, OSError, aiohttp.ClientError):
        async with asyncio.timeout(probe.get("timeoutSeconds", 1)):
            if "exec" in probe:
                return await execute(probe["exec"]["command"]) == 0
            if "httpGet" in probe:
                return await _http(probe["httpGet"], container, address)
            target = probe["tcpSocket"]
            _, writer = await asyncio.open_connection(target.get("host") or address, port(target["port"], container))
            writer.close()
            return True
    return False


async def _http(target: Json, container: Json, address: str) -> bool:
    scheme = target.get("scheme", "HTTP").lower()
    host = target.get("host") or address
    url = f"{scheme}://{host}:{port(target['port'], container)}{target.get('path', '/')}"
    headers = {header["name"]: header["value"] for header in target.get("httpHeaders", [])}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers, ssl=False) as response:
        return 200 <= response.status < 400


def port(value: int | str, container: Json) -> int:
    """A number, or the name of one of the container's ports."""
    named = {entry.get("name"): int(entry["containerPort"]) for entry in container.get("ports", [])}
    return named[value] if value in named else int(value)
