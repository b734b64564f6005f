"""Who may look at a page, and how often the API server is asked."""

import asyncio

from bamboo_core.kube.errors import ApiError
from bamboo_operator.auth.page_access import (
    ALLOWED_SECONDS,
    AT_ONCE,
    REFUSED_SECONDS,
    UNKNOWN_TOKENS_AT_ONCE,
    WAITING,
    PageAccess,
)
from page_http_kit import TEAM, Reviewer, authorized, cluster
from page_kit import Time


async def test_verdicts_are_remembered_for_a_while() -> None:
    clock, reviewer = Time(), Reviewer()
    gate = PageAccess(reviewer, clock)
    for token, seconds in (("GOOD", ALLOWED_SECONDS), ("BAD", REFUSED_SECONDS), ("OTHER", REFUSED_SECONDS)):
        first = await gate.admit(token, TEAM)
        asked = len(reviewer.tokens)
        clock.now += seconds - 0.1
        assert await gate.admit(token, TEAM) == first
        assert len(reviewer.tokens) == asked
        clock.now += 0.2
        assert await gate.admit(token, TEAM) == first
        assert len(reviewer.tokens) == asked + 1
    assert await gate.admit("GOOD", ("team", "another")) is None
    assert len(reviewer.tokens) == 7, "a verdict is for one job only"


async def test_strangers_are_held_back_and_friends_are_not() -> None:
    clock, reviewer = Time(), Reviewer()
    gate = PageAccess(reviewer, clock)
    assert await gate.admit("GOOD", TEAM) is None
    clock.now += ALLOWED_SECONDS + 1
    found = [await gate.admit(f"bad{n}", TEAM) for n in range(200)]
    statuses = [refusal.status for refusal in found if refusal]
    assert statuses.count(401) == UNKNOWN_TOKENS_AT_ONCE
    assert statuses.count(429) == 200 - UNKNOWN_TOKENS_AT_ONCE
    assert found[-1] is not None
    assert found[-1].retry == 1
    assert await gate.admit("GOOD", TEAM) is None
    clock.now += 1
    again = await gate.admit("bad", TEAM)
    assert again is not None
    assert again.status == 401


async def test_reviews_are_few_at_a_time_and_the_queue_is_bounded() -> None:
    clock, reviewer = Time(), Reviewer()
    gate = PageAccess(reviewer, clock)
    reviewer.hold = asyncio.Event()
    asking = []
    for n in range(WAITING + 5):
        clock.now += 1
        asking.append(asyncio.create_task(gate.admit(f"bad{n}", TEAM)))
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    reviewer.hold.set()
    statuses = [refusal.status for refusal in await asyncio.gather(*asking) if refusal]
    assert (statuses.count(401), statuses.count(503)) == (WAITING, 5)
    assert reviewer.most == AT_ONCE


async def test_while_the_api_server_is_away_nobody_is_let_in_and_nothing_is_remembered() -> None:
    reviewer = Reviewer()
    async with cluster(reviewer) as (session, url):
        for fault, status in ((ApiError(500, "InternalError", "no"), 503), (TimeoutError(), 503), (None, 200)):
            reviewer.fault = fault
            async with session.get(f"{url}/jobs/team/tiny/state", headers=authorized("GOOD")) as answer:
                assert (answer.status, answer.headers.get("Retry-After")) == (status, "2" if fault else None)
