"""Several operators divide the jobs: the decisions, and operators with shards in virtual time."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_core.kube.errors import ApiError
from bamboo_core.names import shard_of
from bamboo_operator.kube.job_shards import (
    LOOK_SECONDS,
    MOST_SHARDS,
    SeenShard,
    ShardLeases,
    ShardMoves,
    ShardSight,
    next_moves,
    until_undivided,
)
from bamboo_operator.kube.lease import DURATION_SECONDS, NOTICE_SECONDS, RENEW_SECONDS, HolderTerms
from lease_kit import PLACE, LeaseSimulation, Process

NAMESPACES = tuple(f"team-{number}" for number in range(24))


def seen(*holders: str, shards: int | None = None, **claims: str) -> list[SeenShard]:
    """Shards with these holders. claims: who asks for shard sN."""
    number = len(holders) if shards is None else shards
    found = [SeenShard(holder=who, shards=number, claim=claims.get(f"s{k}", "")) for k, who in enumerate(holders)]
    return found + [SeenShard()] * (MOST_SHARDS - len(found))


def test_a_namespace_is_in_the_same_shard_for_ever() -> None:
    """Another version that divided otherwise would look after jobs that an operator of this one has."""
    assert [shard_of(name, 4) for name in NAMESPACES[:8]] == [2, 0, 2, 0, 3, 0, 2, 2]
    assert {shard_of(name, 1) for name in NAMESPACES} == {0}
    spread = Counter(shard_of(f"namespace-{number}", 8) for number in range(800))
    assert min(spread.values()) > 70


@pytest.mark.parametrize(
    ("found", "held", "expected"),
    [
        # nobody has divided the jobs yet: shard 0 first, which says how many there are
        (seen(), set(), ShardMoves(take=(0,), waits="waiting until jobs are divided into 4 and no longer into 0")),
        (seen("me", "", "", ""), {0}, ShardMoves(take=(1,))),
        (seen("x", "", "y", ""), set(), ShardMoves(take=(1,))),
        # what is ours is taken again at once, such as what was handed over
        (seen("me", "me", "", "me"), {0}, ShardMoves(take=(1, 3, 2))),
        # who has two more is asked
        (seen("x", "x", "x", "x"), set(), ShardMoves(claim=(0, 1))),
        (seen("x", "x", "x", "x", s0="me"), set(), ShardMoves(claim=(1,))),
        (seen("x", "x", "x", "x", s0="me", s1="me"), set(), ShardMoves()),
        (seen("x", "x", "x", "me"), {3}, ShardMoves(claim=(0,))),
        (seen("x", "x", "y", "me"), {3}, ShardMoves()),
        (seen("x", "x", "y", "y"), set(), ShardMoves(claim=(0,))),
        (seen("x", "x", "x", "x", s0="y", s1="y"), set(), ShardMoves(claim=(2,))),
        # and gives it
        (seen("me", "me", "me", "me", s0="x", s2="y"), {0, 1, 2, 3}, ShardMoves(give=((0, "x"), (2, "y")))),
        (seen("me", "me", "", "me", s0="x"), {0, 1, 3}, ShardMoves(take=(2,), give=((0, "x"),))),
    ],
)
def test_what_an_operator_of_four_shards_does_next(
    found: list[SeenShard], held: set[int], expected: ShardMoves
) -> None:
    assert next_moves("me", found, 4, frozenset(held)) == expected


def test_another_number_of_shards_is_waited_for() -> None:
    """By those who were told the new one, until nobody works by the old one; and these give back what they have."""
    old = next_moves("me", seen("x", "me", shards=2), 4, frozenset())
    assert old == ShardMoves(waits="waiting until jobs are divided into 4 and no longer into 2")
    free = next_moves("me", seen("", "x", shards=2), 4, frozenset())
    assert free.take == (0,)
    assert free.waits
    mine = seen("me", "", "", "", shards=4)
    mine[1] = SeenShard(holder="x", shards=2)
    assert next_moves("me", mine, 4, frozenset({0})).waits == "waiting until x, with 2 shards, has ended"
    given = next_moves("x", mine, 2, frozenset({1}))
    assert given.give == ((1, ""),)
    assert not given.take


# Several operators in virtual time


class Sharing(Process):
    """An operator that has some of the shards. shards: how many it was told there are; with 1 it has all or none."""

    def __init__(self, simulation: LeaseSimulation, name: str, shards: int) -> None:
        self.shards, self.has = shards, set[int]()
        self.leases = self._leases(simulation, name)
        super().__init__(simulation, name)

    def _leases(self, simulation: LeaseSimulation, name: str) -> ShardLeases:
        terms = HolderTerms(shards=self.shards, workers=f"{name}:1", web=f"{name}:2")
        return ShardLeases(self, PLACE, name, self, terms=terms, clock=lambda: simulation.now, sleep=self.sleep)

    @property
    def namespaces(self) -> set[str]:
        """Those whose jobs it looks after."""
        return {name for name in NAMESPACES if shard_of(name, self.shards) in self.has}

    async def take(self, shard: int) -> None:
        await self._reach()
        self.has.add(shard)

    async def give(self, shard: int) -> None:
        self.has.discard(shard)

    async def _live(self) -> None:
        if self.shards > 1:
            self.leases = self._leases(self.simulation, self.name)
            try:
                await self.leases.run()
            finally:
                await self.leases.stop_work()
        else:
            await super()._live()

    async def _settle(self) -> None:
        await super()._settle()
        if self.lease.divided:
            sight = ShardSight(self, PLACE, self.name, HolderTerms(), lambda: self.simulation.now, self.sleep)
            await until_undivided(sight, self.sleep)

    async def end(self) -> None:
        if self.shards == 1:
            await super().end()
            return
        await self.kill()
        with contextlib.suppress(TimeoutError, ApiError):
            await self.leases.release()


class Sharers(LeaseSimulation):
    """An API server and operators. It is wrong as soon as two that reach it look after one namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.names = (f"pod-{number}" for number in count())
        self.checks.append(self._check)

    def another(self, shards: int) -> Sharing:
        name = next(self.names)
        self.api.put("pods", {"metadata": {"name": name}, "status": {"phase": "Running"}})
        process = Sharing(self, name, shards)
        self.processes.append(process)
        return process

    @property
    def sharing(self) -> list[Sharing]:
        return [process for process in self.processes if isinstance(process, Sharing)]

    def _check(self) -> None:
        for process in self.sharing:
            if process.shards == 1:
                process.has = {0} if process.works else set()
        calm = [p for p in self.sharing if not p.cut and not p.frozen and self.now - p.disturbed > 13]
        twice = [name for name, n in Counter(name for p in calm for name in p.namespaces).items() if n > 1]
        assert not twice, f"at {self.now}: {[(p.name, p.shards, p.has) for p in calm]}"

    def spread(self) -> list[int]:
        return sorted(len(process.has) for process in self.sharing if process.has)


@contextlib.asynccontextmanager
async def sharers(*shards: int) -> AsyncIterator[tuple[Sharers, list[Sharing]]]:
    """Operators that were told these numbers of shards, a little after each other."""
    simulation = Sharers()
    try:
        for number in shards:
            simulation.another(number)
            await simulation.run(0.3)
        await simulation.run(60)
        yield simulation, simulation.sharing
    finally:
        await simulation.close()


async def test_shards_are_spread_evenly_and_nobody_writes_more_than_renewals() -> None:
    async with sharers(4, 4) as (simulation, operators):
        assert simulation.spread() == [2, 2]
        before = [operator.writes for operator in operators]
        await simulation.run(10 * RENEW_SECONDS)
        assert [operator.writes - b for operator, b in zip(operators, before, strict=True)] == [20, 20]


async def test_one_that_comes_gets_its_part_and_the_jobs_are_looked_after_at_once() -> None:
    async with sharers(6) as (simulation, (first,)):
        assert len(first.has) == 6
        second, third = simulation.another(6), simulation.another(6)
        longest, since = 0.0, simulation.now
        while len(simulation.spread()) < 3 or simulation.spread() != [2, 2, 2]:
            await simulation.run(0.5)
            if set().union(*(o.namespaces for o in simulation.sharing)) == set(NAMESPACES):
                since = simulation.now
            longest = max(longest, simulation.now - since)
            assert simulation.now < 200
        assert longest <= 4, "seconds"
        await simulation.run(100)
        assert simulation.spread() == [2, 2, 2]
        assert len(second.has) == len(third.has) == 2


async def test_what_a_dead_one_had_is_taken_at_once_if_its_pod_is_gone_else_after_its_time() -> None:
    async with sharers(4, 4) as (simulation, (first, second)):
        await first.kill()
        await simulation.run(DURATION_SECONDS - RENEW_SECONDS - LOOK_SECONDS)
        assert len(second.has) == 2
        await simulation.run(RENEW_SECONDS + 3 * LOOK_SECONDS)
        assert second.has == {0, 1, 2, 3}
        third = simulation.another(4)
        await simulation.run(60)
        await second.kill()
        del simulation.pods[second.name]
        await simulation.run(2 * LOOK_SECONDS)
        assert third.has == {0, 1, 2, 3}


async def test_who_ends_leaves_its_shards_to_others() -> None:
    async with sharers(4, 4) as (simulation, (first, second)):
        await first.end()
        await simulation.run(LOOK_SECONDS + 4)
        assert second.has == {0, 1, 2, 3}


async def test_where_the_operator_of_a_namespace_is() -> None:
    async with sharers(4, 4) as (_, (first, second)):
        for name in NAMESPACES:
            mine = name in first.namespaces
            assert (await first.leases.holder_of(name) is None) == mine
            other = await (second if mine else first).leases.holder_of(name)
            owner = first if mine else second
            assert other == HolderTerms(shards=4, workers=f"{owner.name}:1", web=f"{owner.name}:2")


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (2, 4), (4, 1)])
async def test_the_number_of_shards_changes_by_a_rollout(before: int, after: int) -> None:
    """As a Deployment does it: one pod after the other, each new one ready before the next old one ends."""
    async with sharers(before, before) as (simulation, operators):
        for old in operators:
            await old.end()
            del simulation.pods[old.name]
            simulation.another(after)
            await simulation.run(20)
        await simulation.run(60)
        working = [process for process in simulation.sharing if process.has]
        assert set().union(*(process.namespaces for process in working)) == set(NAMESPACES)
        assert {process.shards for process in working} == {after}
        assert simulation.spread() == ([1] if after == 1 else [after // 2, after // 2])


ACTIONS = st.sampled_from(("again", "end", "evict", "vanish", "cut", "join", "freeze", "thaw"))
STEPS = st.lists(st.tuples(st.floats(0, 40), ACTIONS, st.integers(0, 3), st.sampled_from((1, 2, 4))), max_size=10)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_never_do_two_look_after_one_job_and_at_last_each_is_looked_after(
    steps: list[tuple[float, str, int, int]],
) -> None:
    """Though each operator may have been told another number of shards, until all have been told 4."""
    asyncio.run(_play(steps))


async def _play(steps: list[tuple[float, str, int, int]]) -> None:
    simulation = Sharers()
    simulation.another(2)
    simulation.another(2)
    for pause, action, index, shards in steps:
        await simulation.run(pause)
        process = simulation.processes[index % len(simulation.processes)]
        await process.meet(action)
        if action == "evict":
            simulation.another(shards)
    for process in simulation.sharing:
        process.cut_off(cut=False)
        process.freeze(frozen=False)
    await simulation.run(DURATION_SECONDS)
    for process in simulation.sharing:
        if process.shards != 4:
            await process.end()
            simulation.pods.pop(process.name, None)
    simulation.another(4)
    await simulation.run(DURATION_SECONDS + 2 * NOTICE_SECONDS + 60)
    working = [process for process in simulation.sharing if process.has]
    assert set().union(*(process.namespaces for process in working)) == set(NAMESPACES)
    await simulation.close()
