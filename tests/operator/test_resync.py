"""The resync with the API server: periodic listings, and listings after an interrupted watch."""

import asyncio
from collections.abc import Collection
from functools import partial

import pytest

from bamboo_core.kube.errors import ApiError
from bamboo_operator.cluster.resync import EVERY_SECONDS, LATE_SECONDS, SETTLE_SECONDS, Resync, Watched
from opsim_loop import VirtualLoop, virtual_time


class Things:
    """Objects' UIDs. there: existing. known: indexed. meanwhile: shown during a listing. failures: failed listings."""

    def __init__(self, there: set[str], known: set[str], failures: int = 0, meanwhile: Collection[str] = ()) -> None:
        self.there, self.known, self.failures, self.meanwhile = there, known, failures, meanwhile
        self.listed = list[int]()  # virtual seconds at which listings began

    def forgettable(self) -> dict[str, partial[None]]:
        return {uid: partial(self.known.discard, uid) for uid in self.known}

    async def list(self) -> set[str]:
        self.listed.append(round(asyncio.get_running_loop().time()))
        there = set(self.there)
        await asyncio.sleep(0.1)
        if self.failures:
            self.failures -= 1
            raise ApiError(503, "ServiceUnavailable", "busy")
        self.known.update(self.meanwhile)
        return there


def resynced(*things: Things, seconds: float, soon: float | None = None) -> tuple[str | None, str | None]:
    """Run a resync for `seconds`; return its `waiting` and `problem()`. soon: second of the call of `Resync.soon`."""

    async def play() -> tuple[str | None, str | None]:
        resync = Resync([Watched("things", one.forgettable, one.list) for one in things])
        task = asyncio.create_task(resync.run())
        if soon is not None:
            asyncio.get_running_loop().call_later(soon, resync.soon)
        await asyncio.sleep(seconds)
        task.cancel()
        return resync.waiting, resync.problem()

    loop = VirtualLoop(0.0)
    with virtual_time(loop), asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(play())


def test_what_is_not_listed_is_gone_unless_it_has_come_since() -> None:
    things = Things({"a"}, {"a", "b"}, meanwhile=["c"])
    assert resynced(things, seconds=3) == (None, None)
    assert things.known == {"a", "c"}


def test_after_a_listing_of_kopfs_and_from_time_to_time_it_lists_again() -> None:
    things = Things({"a"}, {"a"})
    resynced(things, seconds=2 * (EVERY_SECONDS + SETTLE_SECONDS), soon=20)
    assert things.listed[1:] == [20 + SETTLE_SECONDS, 20 + EVERY_SECONDS + 2 * SETTLE_SECONDS]


def test_an_api_server_that_is_busy_is_asked_again_and_other_kinds_do_not_wait_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    busy, other = Things({"a"}, {"a", "b"}, failures=3), Things(set(), {"x"})
    waiting, _ = resynced(busy, other, seconds=1)
    assert (other.known, waiting) == (set(), "cannot list things: busy (ServiceUnavailable, 503)")
    assert resynced(busy, other, seconds=10) == (None, None)
    assert busy.known == {"a"}
    assert caplog.text.count("cannot list things") == 2, "once in each"


@pytest.mark.parametrize("turns", range(5))
async def test_a_resync_that_is_wanted_and_ended_at_once_ends(turns: int) -> None:
    """A cancellation counts even if the resync is requested in the turns of the loop just before it."""
    resync = Resync([])
    task = asyncio.create_task(resync.run())
    while resync.waiting:
        await asyncio.sleep(0.01)
    resync.soon()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=60)
    assert done


@pytest.mark.parametrize("shown", [True, False])
def test_what_exists_has_to_be_shown_in_time(shown: bool) -> None:
    things = Things({"a", "b"}, {"a"})
    waiting, problem = resynced(things, seconds=10)
    assert (waiting, problem) == ("waiting for the watches to show 1 objects", None)
    if shown:
        things.known.add("b")
    waiting, problem = resynced(things, seconds=LATE_SECONDS + 10)
    assert (waiting is None, problem is None) == (shown, shown)
