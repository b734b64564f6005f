"""What is listed again after a watch was interrupted, and from time to time."""

import asyncio
from collections.abc import Collection
from functools import partial

from bamboo_core.kube.errors import ApiError
from bamboo_operator.cluster.resync import EVERY_SECONDS, SETTLE_SECONDS, Resync
from opsim_loop import VirtualLoop


class Things:
    """there: the UIDs of what exists; known: what the operator knows; meanwhile: comes while the list is read."""

    def __init__(self, there: set[str], known: set[str], failures: int = 0, meanwhile: Collection[str] = ()) -> None:
        self.there, self.known, self.failures, self.meanwhile = there, known, failures, meanwhile
        self.listed = list[int]()  # when

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


def resynced(*things: Things, seconds: float, soon: bool = False) -> None:
    """Lets a resync run for that long."""

    async def play() -> None:
        resync = Resync([(one.forgettable, one.list) for one in things])
        if soon:
            resync.soon()
        task = asyncio.create_task(resync.run())
        await asyncio.sleep(seconds)
        task.cancel()

    loop = VirtualLoop(0.0)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(play())


def test_what_is_not_listed_is_gone_unless_it_has_come_since() -> None:
    things = Things({"a", "unheard"}, {"a", "b"}, meanwhile=["c"])
    resynced(things, Things(set(), set()), seconds=SETTLE_SECONDS + 1, soon=True)
    assert (things.known, things.listed) == ({"a", "c"}, [SETTLE_SECONDS])


def test_a_watch_that_says_nothing_is_not_trusted_for_long() -> None:
    things = Things(set(), {"a"})
    resynced(things, seconds=2 * (EVERY_SECONDS + SETTLE_SECONDS) + 1)
    assert (things.known, things.listed) == (set(), [EVERY_SECONDS + SETTLE_SECONDS]), "once: then none is known"


def test_an_api_server_that_is_busy_is_asked_again_and_other_kinds_do_not_wait_for_it() -> None:
    busy, other = Things({"a"}, {"a", "b"}, failures=2), Things(set(), {"x"})
    resynced(busy, other, seconds=4 * SETTLE_SECONDS, soon=True)
    assert (busy.known, len(busy.listed)) == ({"a"}, 3)
    assert (other.known, len(other.listed)) == (set(), 1)
