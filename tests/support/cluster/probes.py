"""Readiness probes by HTTP."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import aiohttp

Json = dict[str, Any]


async def watch_readiness(container: Json, address: str, tell: Callable[[bool], None]) -> None:
    """Probe a container for ever, and call `tell` when it becomes ready or unready. address: of its pod."""
    probe = container["readinessProbe"]
    await asyncio.sleep(probe.get("initialDelaySeconds", 0))
    needed = {True: probe.get("successThreshold", 1), False: probe.get("failureThreshold", 3)}
    verdict, in_a_row, latest = False, 0, False
    while True:
        good = await _attempt(probe, container, address)
        in_a_row = in_a_row + 1 if good == latest else 1
        latest = good
        if good != verdict and in_a_row >= needed[good]:
            verdict = good
            tell(verdict)
        await asyncio.sleep(probe.get("periodSeconds", 10))


async def _attempt(probe: Json, container: Json, address: str) -> bool:
    """Return whether a GET of the probe's path succeeds. Its port is a number or names a port of the container."""
    target = probe["httpGet"]
    named = {entry.get("name"): entry["containerPort"] for entry in container.get("ports", [])}
    url = f"http://{address}:{named.get(target['port'], target['port'])}{target.get('path', '/')}"
    with contextlib.suppress(TimeoutError, OSError, aiohttp.ClientError):
        timeout = aiohttp.ClientTimeout(total=probe.get("timeoutSeconds", 1))
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
            return 200 <= response.status < 400
    return False
