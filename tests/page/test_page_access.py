"""Who may look at a page, and how often the API server is asked."""

import asyncio

import pytest

from bamboo_core.kube.errors import ApiError
from bamboo_core.names import PAGE_AUDIENCE
from bamboo_operator.auth.page_access import (
    ALLOWED_SECONDS,
    AT_ONCE,
    MOST_NAMESPACES,
    REFUSED_SECONDS,
    UNKNOWN_TOKENS_AT_ONCE,
    WAITING,
    PageAccess,
    SeenNamespaces,
)
from bamboo_operator.auth.page_callers import ProxyCaller, TokenCaller
from page_http_kit import API, TEAM, Reviewer, authorized, cluster
from page_kit import Time

GOOD = TokenCaller("GOOD")


async def test_verdicts_are_remembered_for_a_while() -> None:
    clock, reviewer = Time(), Reviewer()
    gate = PageAccess(reviewer, clock=clock)
    for token, seconds in (("GOOD", ALLOWED_SECONDS), ("BAD", REFUSED_SECONDS), ("OTHER", REFUSED_SECONDS)):
        first = await gate.admit(TokenCaller(token), TEAM)
        asked = len(reviewer.tokens) + len(reviewer.attributes)
        clock.now += seconds - 0.1
        assert await gate.admit(TokenCaller(token), TEAM) == first
        assert len(reviewer.tokens) + len(reviewer.attributes) == asked
        clock.now += 0.2
        assert await gate.admit(TokenCaller(token), TEAM) == first
        assert len(reviewer.tokens) + len(reviewer.attributes) > asked
    assert await gate.admit(GOOD, ("team", "another")) is None
    assert len(reviewer.attributes) == 5, "a verdict is for one job only"


async def test_strangers_are_held_back_and_friends_are_not() -> None:
    clock, reviewer = Time(), Reviewer()
    gate = PageAccess(reviewer, clock=clock)
    assert await gate.admit(GOOD, TEAM) is None
    clock.now += ALLOWED_SECONDS + 1
    found = [await gate.admit(TokenCaller(f"bad{n}"), TEAM) for n in range(200)]
    statuses = [refusal.status for refusal in found if refusal]
    assert statuses.count(401) == UNKNOWN_TOKENS_AT_ONCE
    assert statuses.count(429) == 200 - UNKNOWN_TOKENS_AT_ONCE
    assert found[-1] is not None
    assert found[-1].retry == 1
    assert await gate.admit(GOOD, TEAM) is None
    reviewer.lists = {("ann", "")}
    assert isinstance(await gate.listed(ANN, ["team"]), SeenNamespaces), "whom the proxy has signed in is no stranger"
    clock.now += 1
    again = await gate.admit(TokenCaller("bad"), TEAM)
    assert again is not None
    assert again.status == 401


async def test_reviews_are_few_at_a_time_and_the_queue_is_bounded() -> None:
    clock, reviewer = Time(), Reviewer()
    gate = PageAccess(reviewer, clock=clock)
    reviewer.hold = asyncio.Event()
    asking = []
    for n in range(WAITING + 5):
        clock.now += 1
        asking.append(asyncio.create_task(gate.admit(TokenCaller(f"bad{n}"), TEAM)))
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


ANN, BOB = ProxyCaller("ann", ("ml", "system:authenticated")), ProxyCaller("bob", ())
NAMESPACES = ("a", "b", "c")


@pytest.mark.parametrize(
    ("rights", "seen", "reviews"),
    [
        ({("ann", "")}, "abc", 1),
        ({("ann", "b")}, "b", 4),
        ({("ann", "a"), ("ann", "c"), ("bob", "b")}, "ac", 4),
        ({("bob", "")}, "", 4),
    ],
)
async def test_who_may_list_jobs_everywhere_or_in_some_namespaces(
    rights: set[tuple[str, str]], seen: str, reviews: int
) -> None:
    clock, reviewer = Time(), Reviewer()
    reviewer.lists = rights
    gate = PageAccess(reviewer, clock=clock)
    for _ in range(2):  # the second time from what is remembered
        found = await gate.listed(ANN, NAMESPACES)
        assert isinstance(found, SeenNamespaces)
        assert "".join(name for name in NAMESPACES if name in found) == seen
        assert len(reviewer.attributes) == reviews
    assert reviewer.attributes[0] == {"verb": "list", "group": "bamboo.dev", "resource": "bamboojobs"}
    assert reviewer.tokens == [], "a proxy's word needs no review of a token"


async def test_a_new_namespace_is_reviewed_and_prolongs_nothing() -> None:
    clock, reviewer = Time(), Reviewer()
    reviewer.lists = {("ann", "a"), ("ann", "b")}
    gate = PageAccess(reviewer, clock=clock)
    await gate.listed(ANN, ["a"])
    reviewer.lists = {("ann", "b")}  # the right in a is taken away
    clock.now += ALLOWED_SECONDS - 1
    found = await gate.listed(ANN, ["a", "b"])
    assert isinstance(found, SeenNamespaces)
    assert found.seen == {"a", "b"}
    assert len(reviewer.attributes) == 3
    clock.now += 2
    found = await gate.listed(ANN, ["a", "b"])
    assert isinstance(found, SeenNamespaces)
    assert found.seen == {"b"}


async def test_reviews_of_one_list_are_bounded() -> None:
    reviewer = Reviewer()
    gate = PageAccess(reviewer)
    found = await gate.listed(BOB, [f"n{n:04}" for n in range(MOST_NAMESPACES + 50)])
    assert isinstance(found, SeenNamespaces)
    assert len(found.reviewed) == MOST_NAMESPACES == len(reviewer.attributes) - 1


async def test_whose_a_token_is_is_asked_once_for_the_list_and_all_jobs() -> None:
    clock, reviewer = Time(), Reviewer()
    reviewer.lists = {("good", "")}
    gate = PageAccess(reviewer, clock=clock)
    await gate.listed(GOOD, NAMESPACES)
    for name in NAMESPACES:
        assert await gate.admit(GOOD, ("team", name)) is None
    assert reviewer.tokens == ["GOOD"]


@pytest.mark.parametrize(
    ("audiences", "token", "status"),
    [
        ((PAGE_AUDIENCE,), "GOOD", None),
        ((PAGE_AUDIENCE,), "OIDC", 401),
        ((PAGE_AUDIENCE,), "WORKER", 401),
        ((API,), "OIDC", None),
        ((API,), "GOOD", 401),
        ((API, PAGE_AUDIENCE), "GOOD", None),
        ((API, PAGE_AUDIENCE), "WORKER", 401),
    ],
)
async def test_only_tokens_of_the_audiences_that_were_set_are_valid(
    audiences: tuple[str, ...], token: str, status: int | None
) -> None:
    found = await PageAccess(Reviewer(), audiences).admit(TokenCaller(token), TEAM)
    assert (found.status if found else None) == status
