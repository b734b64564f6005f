"""Several operators at work: jobs are divided into shards by their namespace, and each shard has a Lease of its own.

All jobs of a namespace are in one shard, so that what is decided over a tenant's jobs is decided by one operator. Each
operator looks at all Leases every few seconds, and does what `next_moves` says. A free shard is taken at once, one at a
time, so that others get theirs. Who has at least two less than another asks for one by a claim on its Lease; the holder
stops the jobs of that shard, and writes the other's name into the Lease.

How many shards there are, the Lease of shard 0 says, as its last holder was told. Operators that were told another
number, as while a new number is rolled out, take no other shard than that one, and only when it is free; they give back
what they have. Who has taken a shard looks at all Leases once more, and begins with its jobs only when shard 0 is of
its own number, and whatever another operator still holds as well: of two that take shards of different numbers at the
same time, at least one sees the other.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from bamboo_core.kube.request_parts import Object
from bamboo_core.names import shard_of
from bamboo_operator.kube.client import API_ERRORS, described
from bamboo_operator.kube.lease import HolderTerms, Lease, LeaseApi, LeaseLost, LeaseName, LeaseRecord

logger = logging.getLogger(__name__)

MOST_SHARDS = 16
LOOK_SECONDS = 5.0  # between two looks at all Leases
SOON_SECONDS = 1.0  # the same while something is free, or is not settled
FRESH_SECONDS = 1.0  # for which what is known of a holder's address serves all who ask
RETRY_SECONDS = 2.0  # until jobs that could not be listed are listed again


# Decisions


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenShard:
    """A shard's Lease, as it was seen. holder: who holds it and may work, "" for nobody. shards: how many there are,
    as its last holder was told; 0 if there is no such Lease. claim: who asks for it, "" for nobody.
    """

    holder: str = ""
    shards: int = 0
    claim: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMoves:
    """What an operator does next. take, claim: shards. give: a shard, and to whom; "" for nobody. waits: what for, a
    sentence, if another number of shards keeps it from working.
    """

    take: tuple[int, ...] = ()
    claim: tuple[int, ...] = ()
    give: tuple[tuple[int, str], ...] = ()
    waits: str | None = None


def settled(seen: Sequence[SeenShard], shards: int) -> str | None:
    """None if jobs may be looked after by that number of shards; else who does it by another number."""
    if seen[0].shards != shards:
        return f"waiting until jobs are divided into {shards} and no longer into {seen[0].shards}"
    other = next((one for one in seen if one.holder and one.shards != shards), None)
    return f"waiting until {other.holder}, with {other.shards} shards, has ended" if other else None


def next_moves(me: str, seen: Sequence[SeenShard], shards: int, held: frozenset[int]) -> ShardMoves:
    """seen: all MOST_SHARDS of them. held: what this operator has by now, whose Leases it renews."""
    waits = settled(seen, shards)
    if seen[0].shards not in (0, shards) and seen[0].holder not in ("", me):
        return ShardMoves(give=tuple((shard, "") for shard in sorted(held)), waits=waits)
    give = tuple((k, seen[k].claim) for k in sorted(held) if seen[k].claim not in ("", me))
    usable = range(shards) if seen[0].shards == shards else range(1)
    ours = tuple(k for k in usable if k not in held and seen[k].holder == me)
    free = tuple(k for k in usable if k not in held and not seen[k].holder)
    if ours or free:
        return ShardMoves(take=(*ours, *free[:1]), give=give, waits=waits)
    claims = () if waits else _claims(me, seen[:shards])
    return ShardMoves(claim=claims, give=give, waits=waits)


def _claims(me: str, seen: Sequence[SeenShard]) -> tuple[int, ...]:
    """The shards to ask for, until nobody has two more than this operator. What is claimed counts as the claimant's."""
    owners = [one.claim or one.holder for one in seen]
    claims = list[int]()
    while True:
        counts = Counter(owners)
        askable = [k for k, one in enumerate(seen) if not one.claim and owners[k] != me]
        shard = max(askable, key=lambda k: (counts[owners[k]], -k), default=None)
        if shard is None or counts[owners[shard]] < counts[me] + 2:
            return tuple(claims)
        owners[shard] = me
        claims.append(shard)


# The Leases


class ShardApi(LeaseApi, Protocol):
    async def list_leases(self, namespace: str) -> list[Object]: ...


class ShardWork(Protocol):
    """What is done with a shard. take may raise what is in API_ERRORS, and is tried again; give comes after each."""

    async def take(self, shard: int) -> None: ...

    async def give(self, shard: int) -> None: ...


class ShardSight:
    """What one operator sees of all Leases. leases: by shard, to be taken after look(), and before the next one."""

    def __init__(
        self,
        api: ShardApi,
        place: LeaseName,
        me: str,
        terms: HolderTerms,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api, self._place, self._me, self._terms = api, place, me, terms
        self.leases = [
            Lease(api, place.of_shard(shard), me, terms=terms, clock=clock, sleep=sleep) for shard in range(MOST_SHARDS)
        ]

    async def look(self, held: Collection[int]) -> list[SeenShard]:
        """Reads the leases of all shards; of those that are held only the claims, which who renews them writes. May
        raise what is in API_ERRORS.
        """
        by_name = {lease["metadata"]["name"]: lease for lease in await self._api.list_leases(self._place.namespace)}
        found = [by_name.get(self._place.of_shard(shard).name) for shard in range(MOST_SHARDS)]
        return [
            self._own(lease) if shard in held else await self._others(self.leases[shard], lease)
            for shard, lease in enumerate(found)
        ]

    def _own(self, lease: Object | None) -> SeenShard:
        claim = LeaseRecord.of(lease).claim if lease is not None else ""
        return SeenShard(holder=self._me, shards=self._terms.shards, claim=claim)

    async def _others(self, watched: Lease, lease: Object | None) -> SeenShard:
        decision = await watched.judge(lease)
        if lease is None:
            return SeenShard()
        record = LeaseRecord.of(lease)
        holder = "" if decision.take and record.holder != self._me else record.holder
        if not holder and decision.notice and record.terms.shards != self._terms.shards and not watched.expired:
            holder = decision.notice[-1]  # nobody takes that Lease, and waits for those who may not have noticed
        return SeenShard(holder=holder, shards=record.terms.shards, claim=record.claim)


async def until_undivided(sight: ShardSight, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
    """Until no operator looks after a shard any more; for one that holds shard 0 as the only one."""
    while True:
        try:
            if (waits := settled(await sight.look(held=(0,)), 1)) is None:
                return
            logger.info("%s", waits)
        except API_ERRORS as error:
            logger.warning("cannot look at the leases of shards: %s", described(error))
        await sleep(RETRY_SECONDS)


@dataclass(eq=False, slots=True)
class _HeldShard:
    """A shard whose Lease is ours, and the task that renews it and looks after the jobs."""

    lease: Lease
    task: "asyncio.Task[None] | None" = None
    works: bool = False

    async def end(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _KnownHolder:
    """Where a shard's holder was reached, and when that was read."""

    terms: HolderTerms
    at: float


class ShardLeases:
    """The shards of one operator among several. place: the Lease of shard 0. me: the name of its pod. terms: the number
    of shards, and its addresses.
    """

    def __init__(
        self,
        api: ShardApi,
        place: LeaseName,
        me: str,
        work: ShardWork,
        *,
        terms: HolderTerms,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.waiting: str | None = None  # for what, while another number of shards keeps it from working
        self._api, self._place, self._me, self._work, self._terms = api, place, me, work, terms
        self._clock, self._sleep = clock, sleep
        self._sight = ShardSight(api, place, me, terms, clock, sleep)
        self._seen: list[SeenShard] = []
        self._looks = 0
        self._held: dict[int, _HeldShard] = {}
        self._known: dict[int, _KnownHolder] = {}
        self._complaint: str | None = None

    @property
    def held(self) -> frozenset[int]:
        """The shards whose jobs this operator looks after."""
        return frozenset(shard for shard, one in self._held.items() if one.works)

    async def run(self) -> None:
        """For ever; release() once it is cancelled."""
        while True:
            try:
                moves = await self._turn()
                self._complaint = None
            except API_ERRORS as error:
                self._complain("cannot look at the leases of shards", error)
                await self._sleep(RETRY_SECONDS)
                continue
            await self._sleep(SOON_SECONDS if self._expects_more(moves) else LOOK_SECONDS)

    def _expects_more(self, moves: ShardMoves) -> bool:
        """Is something about to become ours, or to begin?"""
        asked = moves.claim or any(one.claim == self._me for one in self._seen)
        return bool(moves.take or moves.waits or asked or len(self.held) < len(self._held))

    async def _turn(self) -> ShardMoves:
        for held in self._held.values():
            if held.task is not None and held.task.done():
                held.task.result()  # raises what ended it
        self._seen = await self._sight.look(self._held)
        self._looks += 1
        moves = next_moves(self._me, self._seen, self._terms.shards, frozenset(self._held))
        if moves.waits and moves.waits != self.waiting:
            logger.info("%s", moves.waits)
        self.waiting = moves.waits
        for shard, other in moves.give:
            await self._give(shard, other)
        for shard in moves.take:
            lease = self._sight.leases[shard]
            if await lease.take():
                held = self._held[shard] = _HeldShard(lease)
                held.task = asyncio.create_task(self._serve(shard, held), name=f"shard {shard}")
        for shard in moves.claim:
            logger.info("asks for shard %d, which %s holds", shard, self._seen[shard].holder)
            await self._sight.leases[shard].claim()
        return moves

    # a shard that is ours

    async def _serve(self, shard: int, held: _HeldShard) -> None:
        """Looks after the shard's jobs until this is cancelled, or the Lease is another's."""
        keeping = asyncio.create_task(held.lease.keep())
        working = asyncio.create_task(self._begin(shard, held))
        try:
            await asyncio.wait((keeping, working), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            await keeping
        except LeaseLost as error:
            logger.error("%s: its jobs are another operator's", error)
            self._held.pop(shard, None)
        finally:
            held.works = False
            for task in (keeping, working):
                task.cancel()
            await asyncio.gather(keeping, working, return_exceptions=True)
            await self._work.give(shard)

    async def _begin(self, shard: int, held: _HeldShard) -> None:
        """Begins with the shard's jobs, once nobody can look after them any more, be it by another number of shards."""
        looks = self._looks
        while self._looks == looks or settled(self._seen, self._terms.shards) is not None:
            await self._sleep(SOON_SECONDS)
        await held.lease.settle()
        while True:
            try:
                await self._work.take(shard)
                break
            except API_ERRORS as error:
                self._complain(f"cannot begin with shard {shard}", error)
            await self._sleep(RETRY_SECONDS)
        held.works = True
        logger.info("looks after shard %d of %d", shard, self._terms.shards)

    async def _give(self, shard: int, other: str) -> None:
        """other: whose it is from now on; "" for nobody. First its jobs are looked after no more."""
        if (held := self._held.pop(shard, None)) is not None:
            await held.end()
            await (held.lease.hand_to(other) if other else held.lease.release())

    async def stop_work(self) -> None:
        """Looks after no job any more. May be called again."""
        await asyncio.gather(*(held.end() for held in tuple(self._held.values())))

    async def release(self) -> None:
        """All that are ours are nobody's. May raise what is in API_ERRORS."""
        for shard in sorted(self._held):
            await self._give(shard, "")

    # where others are

    async def holder_of(self, namespace: str) -> HolderTerms | None:
        """Where the operator is reached that looks after a namespace's jobs; None if it is this one. Without addresses
        if there is none at the moment, or it is not known.
        """
        shard = shard_of(namespace, self._terms.shards)
        if shard in self.held:
            return None
        known = self._known.get(shard)
        if known is None or self._clock() - known.at > FRESH_SECONDS:
            known = self._known[shard] = _KnownHolder(await self._holders_terms(shard), self._clock())
        return known.terms

    async def _holders_terms(self, shard: int) -> HolderTerms:
        place = self._place.of_shard(shard)
        try:
            lease = await self._api.read_lease(place.namespace, place.name)
        except API_ERRORS as error:
            self._complain(f"cannot read who holds shard {shard}", error)
            return HolderTerms()
        record = LeaseRecord.of(lease) if lease is not None else None
        return HolderTerms() if record is None or record.holder in ("", self._me) else record.terms

    def _complain(self, what: str, error: BaseException) -> None:
        """Once for each new trouble."""
        said = f"{what}: {described(error)}"
        if said != self._complaint:
            logger.warning("%s", said)
        self._complaint = said
