"""The way to an API server that the command line and the operator share: answers, refusals, limits, counts."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bamboo_core.kube import connection as module
from bamboo_core.kube.connection import Connection, ConnectionOptions
from bamboo_core.kube.errors import ApiError
from bamboo_core.kube.kubeconfig import Access, ClusterServer, User
from remote_kit import Answer, Asked, refusal, server

OPTIONS = ConnectionOptions(agent="test", total_seconds=60.0, connect_seconds=60.0, connections=4)
Ended = tuple[str, str, str]  # verb, path and code


def asked(
    answer: Answer, script: Callable[[Connection], Awaitable[Any]], *, tries: int = 1, token_file: Path | None = None
) -> tuple[list[Asked], list[Ended]]:
    """What the server has seen, and what was told of each request."""
    told: list[Ended] = []

    async def run(url: str) -> None:
        access = Access(context="c", server=ClusterServer(url=url), user=User(token_file=token_file))
        connection = Connection(
            access, replace(OPTIONS, tries=tries), lambda verb, path, code, _: told.append((verb, path, code))
        )
        try:
            await script(connection)
        finally:
            await connection.close()

    with server(answer) as (url, seen):
        asyncio.run(run(url))
    return seen, told


def busy_at_first(times: int) -> Answer:
    left = iter(range(times))
    return lambda _: refusal(429, "TooManyRequests", "busy") if next(left, None) is not None else (200, {"is": "there"})


@pytest.mark.parametrize(("tries", "codes"), [(1, ["429"]), (3, ["429", "429", "200"])])
def test_a_busy_server_is_asked_again_as_often_as_was_chosen_and_each_request_is_counted(
    monkeypatch: pytest.MonkeyPatch, tries: int, codes: list[str]
) -> None:
    monkeypatch.setattr(module, "BUSY_SECONDS", 0.01)

    async def script(connection: Connection) -> None:
        if tries == 1:
            with pytest.raises(ApiError, match=r"^busy$") as error:
                await connection.call("POST", "/pods", {"a": 1})
            assert (error.value.status, error.value.reason) == (429, "TooManyRequests")
        else:
            assert await connection.call("POST", "/pods", {"a": 1}) == {"is": "there"}

    seen, told = asked(busy_at_first(2), script, tries=tries)
    assert told == [("POST", "/pods", code) for code in codes]
    assert [one.body for one in seen] == [{"a": 1}] * len(codes)


def test_an_answer_is_an_object_in_json_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST_ANSWER", 1 << 20)
    answers = {
        "/object": (200, {"a": 1}),
        "/nothing": (200, b""),
        "/list": (200, [1]),
        "/page": (200, b"<html>"),
        "/refused": (503, b"<html>"),
        "/nested": (200, b"[" * 100_000),
        "/large": (200, b" " * (2 << 20)),
    }

    async def script(connection: Connection) -> None:
        assert await connection.call("GET", "/object") == {"a": 1}
        assert await connection.call("GET", "/nothing") == {}
        assert await connection.call("GET", "/list") == {}
        for path, status, reason in (
            ("/page", 200, "NotJson"),
            ("/nested", 200, "NotJson"),
            ("/refused", 503, "Service Unavailable"),
            ("/large", 200, "TooLarge"),
        ):
            with pytest.raises(ApiError) as error:
                await connection.call("GET", path)
            assert (error.value.status, error.value.reason) == (status, reason)

    _, told = asked(lambda one: answers[one.path], script)
    assert [code for _, path, code in told if path in ("/page", "/large")] == ["error", "error"]


def test_a_body_is_written_as_the_api_server_would() -> None:
    """It keeps the very bytes of what it has no type for, and may refuse a change of them."""
    length = 0

    def answer(one: Asked) -> tuple[int, Any]:
        nonlocal length
        length = int(one.headers["Content-Length"])
        return (200, {})

    asked(answer, lambda connection: connection.call("POST", "/x", {"a": [1, 2], "b": {"c": "d"}}))
    assert length == len('{"a":[1,2],"b":{"c":"d"}}')


def test_a_token_that_is_rotated_is_used_with_the_next_request(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("one\n")

    async def script(connection: Connection) -> None:
        await connection.call("GET", "/pods")
        (tmp_path / "token").write_text("two\n")
        await connection.call("GET", "/pods")

    seen, _ = asked(lambda _: (200, {}), script, token_file=tmp_path / "token")
    assert [one.headers["Authorization"] for one in seen] == ["Bearer one", "Bearer two"]
    assert {one.headers["User-Agent"] for one in seen} == {"test"}
