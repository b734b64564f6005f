"""Workers' tokens: which ones the API server reviews, and the pods that they identify."""

import asyncio
import base64

import pytest

from bamboo_core.control.server import Unauthorized
from bamboo_operator.auth.pod_tokens import (
    REVIEWS_AT_ONCE,
    REVIEWS_WAITING,
    PodIdentity,
    TokenReviewer,
    claimed_identity,
)
from gateway_kit import ApiServer, _part, house, token


@pytest.mark.parametrize(
    ("header", "status", "why"),
    [
        (None, 403, "there is no token"),
        ("Basic abc", 403, "there is no token"),
        ("Bearer nonsense", 403, "the token is not that of a pod"),
        ("Bearer a.b.c", 403, "the token is not that of a pod"),
        (f"Bearer {token(namespace='other')}", 403, "the token is that of pod other/job-w0"),
        (f"Bearer {token(pod='job-w1')}", 403, "job-w1 is not a running pod of this job"),
        (f"Bearer {token(uid='u9')}", 403, "job-w0 is not a running pod of this job"),
        (f"Bearer {token(pod='job-w7')}", 503, None),
    ],
)
async def test_no_strangers_word_gets_as_far_as_the_api_server(header: str | None, status: int, why: str) -> None:
    async with house() as place:
        assert await place.knock(header) == (status, why)
        assert (place.server.asked, place.events) == (0, [])


async def test_what_the_api_server_does_not_vouch_for_stays_outside() -> None:
    async with house() as place:
        assert await place.knock(f"Bearer {token()}") == (503, None)
        place.server.good[token()] = PodIdentity("team", "job-w5", "u5")
        assert await place.knock(f"Bearer {token()}") == (403, "the token does not belong to the pod that it names")
        assert await place.knock(f"Bearer {token()}", "/v1/jobs/team/other/workers") == (404, None)
        assert (place.server.asked, place.events) == (2, [])


async def test_a_pod_comes_in_as_itself_only() -> None:
    async with house() as place:
        async with place.greeted("job-w1") as socket:
            assert "this is job-w0, not job-w1" in (await socket.receive()).data
        assert place.events == []


async def test_many_callers_wait_for_their_turn_and_too_many_are_sent_away() -> None:
    server = ApiServer()
    server.seconds = 0.05
    reviews = TokenReviewer(server)
    found = await asyncio.gather(
        *(reviews.of(token(salt=str(n))) for n in range(REVIEWS_WAITING + 20)), return_exceptions=True
    )
    assert server.most == REVIEWS_AT_ONCE
    assert sum(isinstance(answer, dict) for answer in found) == REVIEWS_WAITING
    assert {str(answer) for answer in found if isinstance(answer, Exception)} == {"too many callers"}
    assert await reviews.of("later") == {"authenticated": False}


DEEP = base64.urlsafe_b64encode(b'{"aud":' + b"[" * 5000).decode()


@pytest.mark.parametrize("pod", ["a\nb", "A", "", "x" * 300, "job-w0\r\nX: y"])
def test_a_token_that_names_what_is_no_name_is_refused(pod: str) -> None:
    with pytest.raises(Unauthorized, match="not that of a pod"):
        claimed_identity(token(pod=pod))


@pytest.mark.parametrize("text", ["", "a.b", ".".join([_part({}), _part({"aud": []}), ""]), "x" * 9000, f"a.{DEEP}.b"])
def test_a_token_that_names_no_pod_is_refused(text: str) -> None:
    with pytest.raises(Unauthorized, match="not that of a pod"):
        claimed_identity(text)
