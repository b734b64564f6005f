"""Whose turn it is when nodes are few."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_operator.tenants.bounds import shares
from bamboo_operator.tenants.decision import grants, grants_unread
from bamboo_operator.tenants.demand import Grant, HeldBack, JobDemand
from bamboo_operator.tenants.line import NO_LINES, Line, Lines, NodeRequest, NodeUrgency, ask_of, in_order, used_shares
from bamboo_operator.tenants.tenant_list import MANY, TenantList
from tenant_kit import any_jobs, any_tenants, job, running, tenants, waiting

EQUAL = tenants(order={"afterSeconds": 10, "turnSeconds": 100})
HARM = "stage 2 of pipeline 1 has no second copy"


class World:
    """Jobs that are looked at again and again."""

    def __init__(self, *jobs: JobDemand, listed: TenantList = EQUAL) -> None:
        self.jobs, self.lines, self.listed = {one.name: one for one in jobs}, NO_LINES, listed
        self.lines: Lines = NO_LINES

    def change(self, name: str, **more: object) -> None:
        self.jobs[name] = replace(self.jobs[name], **more)  # type: ignore[arg-type]

    def look(self, now: float) -> dict[str, Grant]:
        jobs = self.jobs.values()
        found, self.lines = grants(jobs, self.listed, self.lines, now, shares(jobs, self.listed))
        return found

    def pods(self, now: float) -> list[int]:
        return [grant.pods for grant in self.look(now).values()]


def test_there_is_no_order_until_a_pod_has_found_no_node_for_a_while_and_two_jobs_wait() -> None:
    world = World(waiting("a/x"), waiting("b/y", made=1))
    assert world.pods(0.0) == [8, 8]
    assert world.pods(9.0) == [8, 8]
    assert world.pods(10.0) == [4, 0]
    world.change("a/x", pods=8, placed=8, wanting=0, runs=True, begun=True)
    assert world.pods(11.0) == [8, 8], "who is left waits alone"
    alone = World(waiting("a/x"))
    assert [alone.pods(now) for now in (0.0, 50.0)] == [[8], [8]]


def test_other_nodes_are_another_line_and_kueue_orders_its_own_jobs() -> None:
    world = World(waiting("a/x"), waiting("b/y", nodes="gpu"), waiting("c/z", queued=True))
    world.look(0.0)
    assert world.pods(20.0) == [8, 8, 8]


def test_what_is_broken_comes_before_what_begins_and_that_before_growth() -> None:
    world = World(
        running("a/grows", 4, wanting=4, lacks_nodes=True),
        waiting("b/begins"),
        running("c/broken", 6, broken=2, wanting=2),
        running("d/endangered", 7, broken=1, wanting=1, harm=HARM),
    )
    world.look(0.0)
    found = world.look(10.0)
    assert [grant.pods for grant in found.values()] == [4, 0, 6, 8]
    told = f"waits for nodes behind d/endangered: it has lost 1 worker, and {HARM}"
    assert {grant.held_back for grant in found.values()} == {None, HeldBack("WaitsInLine", told)}
    world.change("d/endangered", pods=8, placed=8, wanting=0, broken=0, harm="")
    assert world.pods(11.0) == [4, 0, 8, 8]
    world.change("c/broken", pods=8, placed=8, wanting=0, broken=0)
    found = world.look(12.0)
    assert [grant.pods for grant in found.values()] == [4, 4, 8, 8]
    told = "waits for nodes behind b/begins: it has no grid yet, for which it needs 4 workers"
    assert found["a/grows"].held_back == HeldBack("WaitsInLine", told)


def test_only_the_workers_that_a_grid_lacks_come_first_and_not_its_growth() -> None:
    world = World(running("a/broken", 3, broken=1, wanting=5, lacks_nodes=True), waiting("b/begins"))
    world.look(0.0)
    assert world.pods(10.0) == [4, 0]
    world.change("a/broken", pods=4, placed=4, broken=0, wanting=4)
    assert world.pods(11.0) == [4, 4]


def test_a_job_without_a_grid_gives_back_its_nodes_if_it_is_not_the_first() -> None:
    """Else two jobs may hold half of what each needs, for ever."""
    world = World(waiting("a/x", placed=2), waiting("b/y", placed=2, made=1))
    world.look(0.0)
    assert world.pods(10.0) == [4, 0]


def test_the_tenant_that_has_less_for_its_weight_comes_first() -> None:
    heavy = tenants({"name": "heavy", "namespaces": ["a"], "weight": 3})
    jobs = [running("a/has", 6, most=6), running("b/has", 4, most=4), waiting("a/x", made=2), waiting("b/y", made=1)]
    assert used_shares(jobs, EQUAL) == {"a": pytest.approx(0.6), "b": pytest.approx(0.4)}
    for listed, first in ((EQUAL, "b/y"), (heavy, "a/x")):
        asks = [ask for one in jobs if (ask := ask_of(one, MANY))]
        assert in_order(asks, listed, used_shares(jobs, listed))[0].job.name == first


def test_whose_turn_brings_nothing_is_passed_over_until_all_have_had_one() -> None:
    world = World(waiting("a/x"), waiting("b/y", made=1), running("c/z", 4, wanting=4, lacks_nodes=True, made=2))
    world.look(0.0)
    assert world.pods(10.0) == [4, 0, 4]
    world.change("a/x", placed=2)
    assert world.pods(100.0) == [4, 0, 4]
    assert world.pods(199.0) == [4, 0, 4], "its last node came later"
    found = world.look(200.0)
    assert [grant.pods for grant in found.values()] == [0, 4, 4]
    assert found["a/x"].held_back == HeldBack(
        "WaitsInLine", "waits for nodes behind b/y: no node came in this job's own turn"
    )
    world.change("a/x", placed=0, pods=0)
    assert world.pods(300.0) == [0, 0, 8]
    assert world.pods(400.0) == [4, 0, 4], "all have had their turn"


def test_who_has_a_grid_goes_on_trying_after_its_turn() -> None:
    world = World(running("a/broken", 3, broken=1, wanting=1, lacks_nodes=True), waiting("b/y"))
    world.look(0.0)
    assert world.pods(10.0) == [4, 0]
    assert world.pods(110.0) == [4, 4]


def test_a_bound_counts_in_a_line_and_is_told() -> None:
    world = World(
        waiting("a/x", most=8),
        waiting("b/y", made=1),
        listed=tenants({"name": "t", "namespaces": ["a"], "most": {"workers": 5}}),
    )
    world.look(0.0)
    told = HeldBack("TenantBound", "it may have 4 of 8 workers: tenant t may have 5 workers")
    assert world.look(200.0)["a/x"] == Grant(bound=4, pods=4, in_line=True, held_back=told)


def test_without_a_list_only_those_go_on_that_have_begun() -> None:
    found = grants_unread([running("a/x", 4), job("b/y")])
    assert [(grant.pods, bool(grant.held_back)) for grant in found.values()] == [(MANY, False), (0, True)]


@given(any_jobs(), any_tenants, st.randoms(use_true_random=False))
def test_the_order_is_total_and_stable(jobs: list[JobDemand], listed: TenantList, rng: random.Random) -> None:
    used = used_shares(jobs, listed)
    asks = [ask for one in jobs if (ask := ask_of(one, MANY))]
    ordered, mixed = in_order(asks, listed, used), rng.sample(asks, len(asks))
    assert in_order(mixed, listed, used) == ordered
    assert [ask.urgency for ask in ordered] == sorted(ask.urgency for ask in ordered)


@given(any_jobs(), any_tenants)
def test_in_a_line_one_job_has_pods_that_wait_and_no_running_job_loses_a_node(
    jobs: list[JobDemand], listed: TenantList
) -> None:
    held = shares(jobs, listed)
    _, lines = grants(jobs, listed, NO_LINES, 0.0, held)
    found, lines = grants(jobs, listed, lines, 1000.0, held)
    again, same = grants(jobs, listed, lines, 1000.0, held)
    assert (again, same) == (found, lines)
    for nodes, line in lines.items():
        there = [one for one in jobs if one.nodes == nodes]
        asking = [one.name for one in there if ask_of(one, MANY) and found[one.name].pods > one.placed]
        assert not line.first or asking == [line.first]
    for one in jobs:
        assert not one.runs or found[one.name].pods >= min(one.placed, found[one.name].bound)


@given(st.integers(2, 5), st.integers(0, 3), st.randoms(use_true_random=False))
def test_everybody_gets_a_turn(number: int, spare: int, rng: random.Random) -> None:
    """Nodes are enough for the largest job, and go to any pod that waits for one. Each job trains for a while."""
    sizes = [rng.randint(1, 4) for _ in range(number)]
    world = World(
        *(job(f"n{i}/x", fewest=size, step=size, most=size, wanting=size, made=i) for i, size in enumerate(sizes))
    )
    nodes, ends, done = max(sizes) + spare, dict[str, int](), set[str]()
    for now in range(200 * number):
        found = world.look(float(now))
        for name, grant in found.items():
            one = world.jobs[name]
            pods = max(min(one.fewest, grant.pods), one.placed if one.runs else 0)
            placed = min(one.placed, pods)
            world.change(name, pods=pods, placed=placed, wanting=one.fewest - placed)
        for _ in range(nodes - sum(one.placed for one in world.jobs.values())):
            if waits := [one for one in world.jobs.values() if one.pods > one.placed]:
                one = rng.choice(waits)
                world.change(one.name, placed=one.placed + 1, wanting=one.wanting - 1)
        for one in list(world.jobs.values()):
            world.change(one.name, lacks_nodes=one.pods > one.placed)
            if one.placed == one.fewest and not one.runs:
                world.change(one.name, runs=True, begun=True)
                ends[one.name] = now + rng.randint(1, 50)
            if now >= ends.get(one.name, now + 1):
                done.add(one.name)
                del world.jobs[one.name]
        if not world.jobs:
            return
    raise AssertionError(f"{sorted(world.jobs)} never began, {sorted(done)} did")


def test_an_ask_is_for_what_it_lacks() -> None:
    broken = running("a/x", 6, broken=1, wanting=2)
    assert ask_of(broken, 8) == NodeRequest(broken, NodeUrgency.BROKEN, 1)
    assert ask_of(broken, 6) is None
    assert ask_of(job("a/x"), 8) is None, "it wants nothing now"
    assert Line(lacking=0.0).first == ""
