"""How many workers each job may hold within its tenant's bounds."""

from decimal import Decimal

from hypothesis import given

from bamboo_operator.tenants.bounds import Share, shares
from bamboo_operator.tenants.demand import JobDemand
from bamboo_operator.tenants.tenant_list import TenantList
from tenant_kit import any_jobs, any_tenants, job, running, tenants

TEN = tenants({"name": "t", "namespaces": ["a", "b"], "most": {"workers": 10}})


def held(jobs: list[JobDemand], listed: TenantList = TEN) -> list[tuple[int, int]]:
    """Workers and pods of each."""
    found = shares(jobs, listed)
    return [(found[one.name].workers, found[one.name].pods) for one in jobs]


def test_a_job_that_begins_takes_what_others_grew_by_once_they_have_given_it_back() -> None:
    grown, new = running("a/old", 8, made=1), job("b/new", made=2)
    assert held([grown]) == [(8, 8)]
    assert held([grown, new]) == [(4, 4), (4, 0)]
    assert shares([grown, new], TEN)["b/new"].told == "waits until other jobs of its tenant have given workers back"
    assert held([running("a/old", 4, made=1), new]) == [(4, 4), (4, 4)]


def test_jobs_wait_whole_and_the_older_one_begins_first() -> None:
    busy = running("a/busy", 4, most=4, made=1)
    large, small = job("a/large", fewest=8, made=2), job("b/small", fewest=2, step=2, most=2, made=3)
    assert held([busy, large, small]) == [(4, 4), (0, 0), (0, 0)]
    told = shares([busy, large, small], TEN)
    assert told["a/large"].told == (
        "waits until its smallest grid of 8 workers fits beside the tenant's other jobs: tenant t may have 10 workers"
    )
    assert told["b/small"].told.startswith("waits until a/large of its tenant begins, which is older")
    assert held([large, small]) == [(8, 8), (2, 2)]


def test_who_can_never_begin_holds_up_nobody() -> None:
    vast, small = job("a/vast", fewest=12, most=12, made=1), job("b/small", made=2)
    assert held([vast, small]) == [(0, 0), (8, 8)]
    assert shares([vast], TEN)["a/vast"].told == "its smallest grid has 12 workers, and tenant t may have 10 workers"


def test_what_is_left_is_dealt_out_evenly_a_pipeline_at_a_time() -> None:
    wide, narrow = job("a/wide", fewest=2, step=2, most=20), job("b/narrow", fewest=3, step=3, most=20, made=1)
    assert held([wide, narrow]) == [(4, 4), (6, 6)]


def test_a_job_that_runs_keeps_its_smallest_grid_when_its_bound_falls() -> None:
    less = tenants({"name": "t", "namespaces": ["a"], "most": {"workers": 3}})
    assert held([running("a/old", 8)], less) == [(4, 4)]
    assert (
        shares([running("a/old", 8)], less)["a/old"].told == "it may have 4 of 8 workers: tenant t may have 3 workers"
    )


def test_devices_money_and_bounds_of_a_job_count() -> None:
    devices = tenants({"name": "t", "namespaces": ["a"], "most": {"devices": 12}})
    assert held([job("a/x", devices=2)], devices) == [(4, 4)]
    money = tenants({"name": "t", "namespaces": ["a"], "most": {"moneyPerHour": "9"}})
    assert held([job("a/x", price=Decimal("1.5"))], money) == [(4, 4)]
    each = tenants({"name": "t", "namespaces": ["a"], "mostPerJob": {"workers": 7}})
    assert held([job("a/x")], each) == [(4, 4)]
    assert shares([job("a/x")], each)["a/x"].told == "it may have 4 of 8 workers: tenant t may have 7 workers for a job"


def test_other_tenants_and_namespaces_of_none_do_not_count() -> None:
    assert held([running("a/x", 8), running("other/y", 8)]) == [(8, 8), (8, 8)]


def _sums(jobs: list[JobDemand], workers: dict[str, int]) -> list[Decimal]:
    own = [one for one in jobs if one.namespace in "ab"]
    return [
        sum((Decimal(workers[one.name]) * each(one) for one in own), Decimal(0))
        for each in (lambda one: 1, lambda one: one.devices, lambda one: one.price)
    ]


@given(any_jobs(), any_tenants)
def test_no_bound_is_ever_passed_but_by_the_smallest_grids_of_those_that_have_begun(
    jobs: list[JobDemand], listed: TenantList
) -> None:
    most = listed.tenants[0].most
    bounds = [Decimal(most.workers), Decimal(most.devices), most.money_per_hour or Decimal(0)]
    found = shares(jobs, listed)
    least = _sums(jobs, {one.name: one.fewest if one.begun else 0 for one in jobs})
    there = _sums(jobs, {one.name: one.pods for one in jobs})
    held = _sums(jobs, {name: share.workers for name, share in found.items()})
    pods = _sums(jobs, {name: share.pods + share.extra for name, share in found.items()})
    if any(before > bound for before, bound in zip(least, bounds, strict=True)):
        assert held == least
    else:
        assert all(sum_ <= bound for sum_, bound in zip(held, bounds, strict=True))
    assert all(now <= max(bound, before) for now, bound, before in zip(pods, bounds, there, strict=True))


@given(any_jobs(), any_tenants)
def test_a_job_has_its_smallest_grid_or_waits_whole_and_gives_up_nothing_without_a_reason(
    jobs: list[JobDemand], listed: TenantList
) -> None:
    for one in jobs:
        share = shares(jobs, listed)[one.name]
        assert share.workers == 0 or share.workers >= one.fewest
        assert share.workers >= one.fewest or not one.begun
        assert share.workers <= one.most
        assert share.pods >= min(one.pods, share.workers)
        assert one.begun or share.pods <= one.pods or share.pods >= one.fewest
        assert bool(share.told) or share.workers == one.most


@given(any_jobs(), any_tenants)
def test_the_order_in_which_jobs_are_listed_means_nothing(jobs: list[JobDemand], listed: TenantList) -> None:
    assert shares(jobs, listed) == shares(jobs[::-1], listed)
    assert all(isinstance(share, Share) for share in shares(jobs, listed).values())
