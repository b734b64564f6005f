"""The operator's server of job pages, with fake reviews of tokens and access."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
from aiohttp import web

from bamboo_core.job.status import BambooJobStatus
from bamboo_core.names import PAGE_AUDIENCE
from bamboo_operator.http.job_pages import JobPages
from bamboo_operator.status.facts import OperatedJob, StatusFacts
from http_kit import serving
from operator_kit import NOW, job, viewed

TEAM = ("team", "tiny")


def authorized(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


class Reviewer:
    """A fake reviewer of tokens and access: GOOD may get jobs, OTHER may not, WORKER has the workers' audience."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.attributes: list[dict[str, str]] = []
        self.fault: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.now = self.most = 0

    async def review_token(self, token: str, audiences: Sequence[str]) -> dict[str, Any]:
        self.tokens.append(token)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if self.hold:
                await self.hold.wait()
        finally:
            self.now -= 1
        if self.fault:
            raise self.fault
        if token == "WORKER":
            return {"authenticated": True, "audiences": ["bamboo.dev"], "user": {"username": "w"}}
        if token not in ("GOOD", "OTHER") or PAGE_AUDIENCE not in audiences:
            return {"authenticated": False}
        user = {"username": token.lower(), "uid": "1", "groups": ["g"], "extra": {"a": ["b"]}}
        return {"authenticated": True, "audiences": [PAGE_AUDIENCE], "user": user}

    async def review_access(self, user: dict[str, Any], attributes: dict[str, str]) -> dict[str, Any]:
        assert (user["groups"], user["extra"]) == (["g"], {"a": ["b"]})
        self.attributes.append(attributes)
        return {"allowed": user["username"] == "good"}


def operated(namespace: str, name: str) -> OperatedJob:
    """Return a suspended job, as the operator knows it."""
    spec = replace(job(), name=name, namespace=namespace)
    view = viewed(spec, BambooJobStatus(state="Suspended"))
    return OperatedJob(view=view, facts=StatusFacts(now=NOW, generation=1, spec=spec))


@asynccontextmanager
async def cluster(reviewer: Reviewer) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """Yield a session and the URL of a server with the page of one job, team/tiny."""
    app = web.Application()
    JobPages({TEAM: operated(*TEAM)}.get, reviewer).add_to(app)
    async with serving(app) as url, aiohttp.ClientSession() as session:
        yield session, url
