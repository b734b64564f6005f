"""What is asked for again after a watch was interrupted."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from bamboo_core.kube.errors import ApiError
from bamboo_operator.cluster import resync
from bamboo_operator.cluster.resync import Resync
from opsim_loop import VirtualLoop
from watched_api_kit import Server, body, managed, uids, until


def test_a_deletion_that_was_not_told_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resync, "SETTLE_SECONDS", 0.05)
    server = Server()

    async def check() -> None:
        async with managed(server) as jobs:
            jobs.job_event("ADDED", body("old", suspend=True))
            other = body("other", suspend=True)
            other["metadata"]["name"] = "other"
            jobs.job_event(None, other)  # a listing in which the first one is not
            await until(lambda: uids(jobs) == ["other"])
            assert [line for line in server.asked if line.startswith("GET")] == [
                "GET /apis/bamboo.dev/v1alpha1/namespaces/default/bamboojobs"
            ]

    asyncio.run(check())


class Things:
    """there: what there is; known: what is thought to be; both uids by name."""

    def __init__(self, there: dict[str, str], known: dict[str, str], failures: int = 0) -> None:
        self.there, self.known, self.failures = there, known, failures
        self.asked: list[str] = []
        self.resync = Resync(lambda: self.known, self._uid_of, lambda name: self.known.pop(name))

    async def _uid_of(self, name: str) -> str | None:
        self.asked.append(name)
        if self.failures:
            self.failures -= 1
            raise ApiError(503, "ServiceUnavailable", "busy")
        return self.there.get(name)


def listed(things: Things, script: Callable[[Things], Awaitable[None]]) -> Things:
    """The things after what the script lets be observed, and a minute later, by a clock of its own."""

    async def play() -> None:
        await script(things)
        await asyncio.sleep(60.0)
        await things.resync.stop()

    loop = VirtualLoop(0.0)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(play())
    return things


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resync, "SETTLE_SECONDS", 0.05)


@pytest.mark.usefixtures("quick")
def test_only_what_was_not_listed_is_asked_for() -> None:
    async def script(things: Things) -> None:
        for name in ("a", "b"):
            things.resync.observed(None, name)

    things = listed(Things({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "2", "c": "3", "d": "4"}), script)
    assert (things.asked, sorted(things.known)) == (["c", "d"], ["a", "b", "c"])


@pytest.mark.usefixtures("quick")
def test_a_watch_without_interruption_asks_for_nothing() -> None:
    async def script(things: Things) -> None:
        things.resync.observed(None, "a")
        await asyncio.sleep(0.2)
        for kind in ("MODIFIED", "MODIFIED", "DELETED"):
            things.resync.observed(kind, "a")
        things.resync.observed("ADDED", "b")
        await asyncio.sleep(0.2)

    assert listed(Things({}, {"a": "1"}), script).asked == []


@pytest.mark.usefixtures("quick")
def test_an_api_server_that_is_busy_is_asked_again() -> None:
    async def script(things: Things) -> None:
        things.resync.observed(None, "a")
        await until(lambda: "b" not in things.known)

    things = listed(Things({"a": "1"}, {"a": "1", "b": "2"}, failures=2), script)
    assert (things.asked, things.known) == (["b", "b", "b"], {"a": "1"})
