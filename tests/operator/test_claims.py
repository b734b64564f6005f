"""A tenant's bounds hold over jobs of several operators, by what they claim: first by values, then as they go on."""

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.names import shard_of
from bamboo_operator.kube.lease import LeaseName
from bamboo_operator.tenants.bounds import Share, shares
from bamboo_operator.tenants.claims import (
    SeenClaims,
    claim_of,
    divided_shares,
    is_divided,
    read_claims,
    within_reach,
    written,
)
from bamboo_operator.tenants.controller import SETTLED_LOOKS, TenantController
from bamboo_operator.tenants.demand import Grant, JobDemand
from bamboo_operator.tenants.record import TenantRecord
from bamboo_operator.tenants.spending import JobMoney, MoneyStanding
from bamboo_operator.tenants.tenant_list import TenantList, TenantSource
from tenant_kit import ConfigMaps, any_jobs, any_tenants, job, running, tenants

SHARDS = 4
PLACE = LeaseName("system", "operator-spending")
NAMESPACES = [next(f"n{n}" for n in range(1000) if shard_of(f"n{n}", SHARDS) == shard) for shard in range(SHARDS)]
ONE, OTHER = NAMESPACES[:2]


def bounded(workers: int, **most: Any) -> TenantList:
    return tenants({"name": "t", "namespaces": NAMESPACES, "most": {"workers": workers, **most}})


@pytest.mark.parametrize(
    ("namespaces", "most", "shards", "divided"),
    [
        ([ONE, OTHER], {"workers": 5}, SHARDS, True),
        ([ONE, OTHER], {"devices": 5}, SHARDS, True),
        ([ONE, OTHER], {"moneyPerHour": "5"}, SHARDS, True),
        (["*"], {"workers": 5}, SHARDS, True),
        ([ONE, OTHER], {"workers": 5}, 1, False),
        ([ONE], {"workers": 5}, SHARDS, False),
        ([ONE, OTHER], {"moneyPerDay": "5"}, SHARDS, False),
    ],
)
def test_claims_are_made_for_bounds_over_several_shards(
    namespaces: list[str], most: dict[str, Any], shards: int, divided: bool
) -> None:
    (tenant,) = tenants({"name": "t", "namespaces": namespaces, "most": most}).tenants
    assert is_divided(tenant, shards) is divided


def test_the_older_job_begins_first_whoever_looks_after_it() -> None:
    mine, theirs = job(f"{ONE}/x", made=2), job(f"{OTHER}/y", made=1)
    held, claims = divided_shares([mine], bounded(7), SeenClaims(others=(theirs,)), SHARDS)
    assert (held[mine.name].workers, claims[mine.name].pods) == (0, 0)
    held, claims = divided_shares([theirs], bounded(7), SeenClaims(others=(mine,)), SHARDS)
    assert (held[theirs.name].pods, claims[theirs.name].pods) == (0, 5), "four, and one for a while; not yet claimed"


def test_a_job_gives_back_what_it_grew_by_when_one_of_another_operator_waits() -> None:
    mine, theirs = running(f"{ONE}/x", 8, made=1), job(f"{OTHER}/y", made=2)
    held, claims = divided_shares([mine], bounded(10), SeenClaims(others=(theirs,), reach={mine.name: 8}), SHARDS)
    assert (held[mine.name].workers, claims[mine.name].pods) == (4, 8)
    shrunk = replace(mine, pods=4, placed=4)
    _, claims = divided_shares([shrunk], bounded(10), SeenClaims(others=(theirs,), reach={mine.name: 8}), SHARDS)
    assert claims[mine.name].pods == 5
    _, claims = divided_shares([theirs], bounded(10), SeenClaims(others=(claims[mine.name],)), SHARDS)
    assert claims[theirs.name].pods == 5


@pytest.mark.parametrize(
    ("pods", "begun", "reach", "gets"),
    [
        (0, False, 9, (8, True)),
        (0, False, 8, (8, False)),
        (0, False, 5, (5, False)),  # a grid
        (0, False, 3, (0, False)),  # none
        (2, False, 3, (2, False)),
        (4, True, 6, (6, False)),
        (4, True, 0, (4, False)),
        (9, True, 0, (8, True)),  # what is there is not taken away by a claim that lacks
    ],
)
def test_a_job_has_as_much_as_is_claimed(pods: int, begun: bool, reach: int, gets: tuple[int, bool]) -> None:
    share = Share(workers=8, pods=8, extra=True, told="as bounds say")
    found = within_reach(share, job("a/x", pods=pods, begun=begun), reach, "")
    assert (found.pods, found.extra, found.told) == (*gets, "as bounds say")


def test_a_claim_that_cannot_be_written_is_told() -> None:
    share = Share(workers=8, pods=8, extra=True)
    assert within_reach(share, job("a/x"), 0, "ConfigMap s/c").told == (
        "waits until ConfigMap s/c can be written, by which operators of other shards know what it has"
    )


def test_nobody_keeps_a_place_for_a_while_that_another_operators_job_could_begin_with() -> None:
    """Or two of them would wait for each other's."""
    mine, theirs = running(f"{ONE}/x", 1, fewest=1, most=1), job(f"{OTHER}/y", fewest=5, most=5, made=1)
    third = running(f"{NAMESPACES[2]}/z", 2, fewest=1, most=1)  # one that it has for a while
    _, claims = divided_shares([mine], bounded(7), SeenClaims(others=(theirs, third)), SHARDS)
    assert claims[mine.name].pods == 1
    _, claims = divided_shares([mine], bounded(7), SeenClaims(others=(replace(theirs, pods=3), third)), SHARDS)
    assert claims[mine.name].pods == 1, "also when that one waits with some of its pods"
    _, claims = divided_shares([mine], bounded(7), SeenClaims(others=(third,)), SHARDS)
    assert claims[mine.name].pods == 2


@given(any_jobs())
def test_claims_are_read_as_they_were_written(jobs: list[JobDemand]) -> None:
    own = [one for one in jobs if one.namespace == "a"]
    claims = {one.name: claim_of(one, Share(workers=3, pods=3, extra=True)) for one in own}
    assert read_claims("a", json.loads(json.dumps(written(claims)))) == claims
    told = tenants({"name": "t", "namespaces": ["a"], "most": {"workers": 9}})
    known = [replace(one, pods=claims[one.name].pods) for one in own]
    assert shares(claims.values(), told) == shares(known, told), "it is all that bounds look at"


@pytest.mark.parametrize("found", [[], "x", {"x": 1}, {"x": {"made": 1.0}}, {"x": {"made": "soon", "fewest": 1}}])
def test_claims_that_nobody_has_written_are_refused(found: object) -> None:
    with pytest.raises(ValueError, match="not what was written"):
        read_claims("a", found)


@given(any_jobs(), any_tenants, st.data())
def test_claims_never_come_to_more_than_the_bound(
    jobs: list[JobDemand], listed: TenantList, data: st.DataObject
) -> None:
    """But by what others claim, and what is there, already."""
    mine = [one for one in jobs if data.draw(st.booleans())]
    others = tuple(one for one in jobs if one not in mine)
    _, claims = divided_shares(mine, listed, SeenClaims(others=others), 5)
    most = listed.tenants[0].most
    own = [one for one in jobs if one.namespace in "ab"]
    for bound, each in (
        (Decimal(most.workers), lambda one: Decimal(1)),
        (Decimal(most.devices), lambda one: Decimal(one.devices)),
        (most.money_per_hour or Decimal(0), lambda one: one.price),
    ):
        before = sum((one.pods * each(one) for one in own), Decimal(0))
        after = sum((claims.get(one.name, one).pods * each(one) for one in own), Decimal(0))
        assert after <= max(bound, before)


class ClusterJob:
    """A job and its pods, which outlive who looks after it. grant: what that one has told it; it makes or gives back a
    pod at a time.
    """

    def __init__(self, wants: JobDemand) -> None:
        self.wants = wants
        self.grant: Grant | None = None

    def demand(self) -> JobDemand:
        return self.wants

    def granted(self, grant: Grant) -> None:
        self.grant = grant

    def money(self) -> JobMoney:
        return JobMoney(uid=self.wants.name, namespace=self.wants.namespace, made=datetime.now(UTC), total=Decimal(0))

    def money_told(self, standing: MoneyStanding) -> None:
        """It costs nothing."""

    @property
    def allowed(self) -> int:
        """The most pods that it may have without anybody being asked again."""
        grant = self.grant
        return max(self.wants.pods, grant.pods + grant.extra if grant else 0)

    def act(self, *, greedy: bool) -> None:
        """greedy: with the one that it may have for a while."""
        if self.grant is None:
            return
        pods, wants = self.wants.pods, self.wants
        most = min(self.grant.pods, wants.most) + (self.grant.extra if greedy else 0)
        pods += (pods < most) - (pods > most)
        begun = wants.begun or pods >= wants.fewest
        self.wants = replace(wants, pods=pods, placed=pods, begun=begun, runs=begun)


class Shard:
    """An operator that looks after some namespaces."""

    def __init__(self, cluster: "Cluster") -> None:
        self.cluster, self.held = cluster, set[str]()
        self.source = TenantSource()
        self.source.current = cluster.listed
        self.record = TenantRecord(cluster.api, PLACE, lambda namespace: namespace in self.held)
        self.controller = TenantController(self.source, self, self.record, SHARDS)

    def running(self) -> list[ClusterJob]:
        return [one for one in self.cluster.jobs.values() if one.wants.namespace in self.held]


class Cluster:
    """Operators of one release, their jobs, and the API server."""

    def __init__(self, rng: random.Random, workers: int, operators: int) -> None:
        self.rng, self.api, self.listed = rng, ConfigMaps(), bounded(workers, devices=2 * workers)
        self.jobs: dict[str, ClusterJob] = {}
        self.operators = [Shard(self) for _ in range(operators)]
        for namespace in NAMESPACES:
            rng.choice(self.operators).held.add(namespace)

    def arrive(self) -> None:
        number, rng = len(self.jobs), self.rng
        step = rng.randint(1, 3)
        sizes = {"fewest": step * rng.randint(1, 2), "step": step, "devices": rng.randint(1, 2)}
        name = f"{rng.choice(NAMESPACES)}/job-{number}"
        self.jobs[name] = ClusterJob(job(name, made=number, most=sizes["fewest"] + step * rng.randint(0, 3), **sizes))

    def pass_on(self) -> None:
        """A namespace gets another operator, which knows nothing; or an operator dies, and another one begins."""
        rng = self.rng
        if rng.random() < 0.3:
            dies = rng.randrange(len(self.operators))
            going, self.operators[dies] = self.operators[dies].held, Shard(self)
            self.operators[dies].held = going
        else:
            before = rng.choice(self.operators)
            going = {rng.choice(sorted(before.held))} if before.held else set[str]()
            before.held -= going
            rng.choice(self.operators).held |= going
        for one in self.jobs.values():
            if one.wants.namespace in going:
                one.grant = None

    def bounds(self) -> tuple[int, int]:
        """The largest that any operator knows, of workers and devices."""
        known = [one.source.current.tenants[0].most for one in self.operators if one.source.current]
        return max(one.workers for one in known), max(one.devices for one in known)

    def allowed(self) -> tuple[int, int]:
        jobs = self.jobs.values()
        return sum(one.allowed for one in jobs), sum(one.allowed * one.wants.devices for one in jobs)

    async def something(self) -> None:
        rng = self.rng
        operator = rng.choice(self.operators)
        match rng.choices(range(8), (8, 8, 8, 1, 0.5, 1, 0.3, 1))[0]:
            case 0:
                await operator.controller.look()
            case 1:
                await operator.record.sync(self.api, PLACE)
            case 2 if self.jobs:
                rng.choice(list(self.jobs.values())).act(greedy=rng.random() < 0.3)
            case 3 if len(self.jobs) < 7:
                self.arrive()
            case 4:
                self.pass_on()
            case 5:
                self.api.late = not self.api.late
            case 6:
                workers = rng.randint(2, 14)
                self.listed = bounded(workers, devices=2 * workers)
                operator.source.current = self.listed
            case _:
                self.api.arrive()

    async def rest(self) -> None:
        """All goes well from now on."""
        self.api.late = False
        self.api.arrive()
        for operator in self.operators:
            operator.source.current = self.listed
        for _ in range(60 + SETTLED_LOOKS):
            for operator in self.operators:
                await operator.controller.look()
                await operator.record.sync(self.api, PLACE)
            for one in self.jobs.values():
                one.act(greedy=False)


async def test_of_two_that_want_the_last_workers_at_the_same_moment_one_gets_them() -> None:
    cluster = Cluster(random.Random(1), 6, 2)
    one, other = cluster.operators
    one.held, other.held = {ONE}, {OTHER}
    for _ in range(SETTLED_LOOKS + 2):
        for operator in cluster.operators:
            await operator.controller.look()
            await operator.record.sync(cluster.api, PLACE)
    jobs = [ClusterJob(job(f"{namespace}/x", made=made)) for made, namespace in enumerate((ONE, OTHER))]
    cluster.jobs = {one.wants.name: one for one in jobs}
    for operator in cluster.operators:
        await operator.controller.look()  # that there is such a namespace
    for operator in cluster.operators:
        await operator.record.sync(cluster.api, PLACE)
    for operator in cluster.operators:
        await operator.controller.look()
    assert [one.allowed for one in jobs] == [0, 0], "nothing is claimed yet"
    await other.record.sync(cluster.api, PLACE)
    await one.record.sync(cluster.api, PLACE)  # is refused, and reads what was claimed
    await one.record.sync(cluster.api, PLACE)  # what was found without that is claimed no more
    for operator in cluster.operators:
        await operator.controller.look()
    assert [one.allowed for one in jobs] == [0, 5]
    kept = [json.loads(text).get("claims", {}) for text in cluster.api.kept[PLACE.name]["data"].values()]
    assert sum(claim["pods"] for claims in kept for claim in claims.values()) == 5
    await cluster.rest()
    assert [one.wants.pods for one in jobs] == [4, 0], "the older one comes first as long as the other has not begun"


@pytest.mark.parametrize("seed", range(25))
async def test_whatever_happens_bounds_hold_and_in_the_end_all_is_as_with_one_operator(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster(rng, rng.randint(2, 14), rng.randint(1, 3))
    before = cluster.allowed()
    for _ in range(300):
        await cluster.something()
        after = cluster.allowed()
        for has, had, bound in zip(after, before, cluster.bounds(), strict=True):
            assert has <= max(bound, had), f"{has} after {had}, and {bound} are allowed"
        before = after
    await cluster.rest()
    found = [one.wants for one in cluster.jobs.values()]
    alone: Mapping[str, Share] = shares(found, cluster.listed)
    assert {one.name: one.pods for one in found} == {name: share.workers for name, share in alone.items()}
    writes = cluster.api.writes
    await cluster.rest()
    assert cluster.api.writes == writes, "what stays as it is is not written again"
