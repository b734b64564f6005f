"""Pages of jobs that another operator looks after: its answer for a job, its jobs' statuses in the list."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from bamboo_core.view.job_view import JobView, view_of
from bamboo_operator.http.other_operators import OtherOperators
from bamboo_operator.kube.lease import HolderTerms
from manifest_kit import minimal
from page_http_kit import Reviewer, authorized, cluster

HERE = "theirs"  # a namespace of this operator


@asynccontextmanager
async def two_operators() -> AsyncIterator[tuple[aiohttp.ClientSession, str, Reviewer, dict[str, HolderTerms | None]]]:
    """A session, the address of an operator that has none of the jobs of `team`, who reviews for the other one, and
    where operators are by namespace.
    """
    theirs = Reviewer()
    async with cluster(theirs) as (session, url):
        found: dict[str, HolderTerms | None] = {"team": HolderTerms(web=url.removeprefix("http://")), HERE: None}

        async def holder(namespace: str) -> HolderTerms | None:
            return found[namespace]

        def jobs() -> list[JobView]:
            status = {"state": "Training", "cost": {"total": "12.5", "perHour": "2"}, "training": {"step": 7}}
            document = minimal()
            return [view_of({**document, "metadata": {"name": "big", "namespace": "team"}, "status": status})]

        operators = OtherOperators(holder, jobs)
        ours = Reviewer()
        ours.lists = {("good", "")}
        try:
            async with cluster(ours, operators=operators, others=[(HERE, "own")]) as (_, here):
                yield session, here, theirs, found
        finally:
            await operators.close()


async def state(session: aiohttp.ClientSession, url: str, job: str, token: str | None) -> tuple[int, str]:
    headers = authorized(token) if token else {}
    async with session.get(f"{url}/jobs/{job}/state", headers=headers) as answer:
        assert answer.headers["Cache-Control"] == "no-store"
        return answer.status, await answer.text()


async def test_who_asks_for_a_job_of_another_operator_gets_that_ones_answer() -> None:
    async with two_operators() as (session, here, theirs, _):
        status, text = await state(session, here, "team/tiny", "GOOD")
        assert (status, '"name":"tiny"' in text) == (200, True)
        assert theirs.tokens == ["GOOD"], "it reviews who asks"
        assert (await state(session, here, "team/tiny", "OTHER"))[0] == 403
        async with session.get(f"{here}/jobs/team/tiny/state") as answer:
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert (await state(session, here, f"{HERE}/own", "GOOD"))[0] == 200


async def test_a_job_that_nobody_has_at_the_moment() -> None:
    """Two that each think that the other has it ask each other once."""
    async with two_operators() as (session, here, theirs, found):
        found["team"] = HolderTerms()
        status, text = await state(session, here, "team/tiny", "GOOD")
        assert (status, "No operator looks after jobs of namespace team yet" in text) == (503, True)
        found["team"] = HolderTerms(web=here.removeprefix("http://"))
        assert (await state(session, here, "team/tiny", "GOOD"))[0] == 503
        found["team"] = HolderTerms(web="127.0.0.1:1")
        status, text = await state(session, here, "team/tiny", "GOOD")
        assert (status, "does not answer" in text) == (503, True)
        assert theirs.tokens == []


async def test_the_list_has_all_jobs() -> None:
    async with (
        two_operators() as (session, here, _, _),
        session.get(f"{here}/jobs/state", headers=authorized("GOOD")) as answer,
    ):
        rows = {f"{row['namespace']}/{row['name']}": row for row in (await answer.json())["rows"]}
    assert rows.keys() == {"team/tiny", "theirs/own", "team/big"}
    other = rows["team/big"]
    assert (other["step"], other["cost"], other["costPerHour"]) == (7, 12.5, 2.0)
