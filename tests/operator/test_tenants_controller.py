"""What jobs may have is decided again and again, once all jobs are known."""

import asyncio
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from bamboo_operator.kube.lease import LeaseName
from bamboo_operator.tenants import controller as controller_module
from bamboo_operator.tenants.controller import SETTLED_LOOKS, TenantController
from bamboo_operator.tenants.demand import UNBOUND, Grant, JobDemand
from bamboo_operator.tenants.record import TenantRecord
from bamboo_operator.tenants.spending import JobMoney, MoneyStanding
from bamboo_operator.tenants.tenant_list import TenantSource
from tenant_kit import ConfigMaps, job, running, tenants


class Listed:
    """A job of an operator."""

    def __init__(self, wants: JobDemand | None) -> None:
        self.wants = wants
        self.grants: list[Grant] = []
        self.cost = Decimal(0)
        self.told = MoneyStanding()

    def money(self) -> JobMoney:
        name = self.wants.name if self.wants else "a/idle"
        return JobMoney(uid=name, namespace=name[0], made=datetime.now(UTC), total=self.cost)

    def money_told(self, standing: MoneyStanding) -> None:
        self.told = standing

    def demand(self) -> JobDemand | None:
        return self.wants

    def granted(self, grant: Grant) -> None:
        self.grants.append(grant)


class Operator:
    def __init__(self, *jobs: Listed) -> None:
        self.jobs = list(jobs)

    def running(self) -> list[Listed]:
        return self.jobs


def deciding(*jobs: Listed) -> tuple[TenantController, Operator, TenantSource]:
    operator, source = Operator(*jobs), TenantSource()
    source.current = tenants({"name": "t", "namespaces": ["a"], "most": {"workers": 5}})
    return TenantController(source, operator), operator, source


async def test_nothing_is_decided_before_as_many_jobs_are_known_for_a_while() -> None:
    first, second = Listed(running("a/x", 4)), Listed(job("a/y", made=1))
    controller, operator, _ = deciding(first)
    for _ in range(SETTLED_LOOKS):
        await controller.look()
    operator.jobs.append(second)
    for _ in range(SETTLED_LOOKS):
        await controller.look()
    assert (first.grants, second.grants) == ([], [])
    await controller.look()
    assert [grant.pods for grant in (*first.grants, *second.grants)] == [4, 0]
    operator.jobs.append(third := Listed(job("a/z", made=2)))
    await controller.look()
    assert len(third.grants) == 1, "an operator that works decides at once for a new job"


async def test_a_job_that_is_not_to_train_is_told_nothing() -> None:
    idle = Listed(None)
    controller, _, _ = deciding(idle)
    for _ in range(SETTLED_LOOKS + 2):
        await controller.look()
    assert idle.grants == []


async def test_without_a_list_that_can_be_read_only_those_go_on_that_have_begun() -> None:
    old, new = Listed(running("a/x", 8)), Listed(job("a/y"))
    controller, _, source = deciding(old, new)
    source.current = None
    for _ in range(SETTLED_LOOKS + 1):
        await controller.look()
    assert old.grants == [UNBOUND]
    assert [grant.pods for grant in new.grants] == [0]
    source.current = tenants()
    await controller.look()
    assert [grant.pods for grant in (old.grants[-1], new.grants[-1])] == [8, 8]


async def test_jobs_are_told_when_their_tenant_has_spent_its_money_also_those_that_want_nothing() -> None:
    spender, idle, other = Listed(running("a/x", 4)), Listed(None), Listed(running("b/x", 4))
    controller, _, source = deciding(spender, idle, other)
    source.current = tenants({"name": "t", "namespaces": ["a"], "most": {"moneyPerDay": "5"}})
    for _ in range(SETTLED_LOOKS + 1):
        await controller.look()
    spender.cost = other.cost = Decimal("4.99")
    await controller.look()
    assert spender.told == idle.told == MoneyStanding("", "tenant t has spent 4.99 of 5 in this day")
    assert controller.spent()["t"].day == Decimal("4.99")
    spender.cost = Decimal(5)
    await controller.look()
    assert spender.told.spent.startswith("tenant t has spent its 5 of this day; its jobs go on")
    assert (idle.told, other.told) == (spender.told, MoneyStanding())
    source.current = None
    await controller.look()
    assert spender.told.spent, "a list that cannot be read changes nothing"
    source.current = tenants({"name": "t", "namespaces": ["a"], "most": {"moneyPerDay": "6"}})
    await controller.look()
    assert not spender.told.spent


async def test_a_tenant_that_is_called_as_a_namespace_of_none_has_its_own_money() -> None:
    of_tenant, of_namespace = Listed(running("a/x", 4)), Listed(running("b/x", 4))
    for jobs in ((of_tenant, of_namespace), (of_namespace, of_tenant)):
        controller, _, source = deciding(*jobs)
        source.current = tenants({"name": "b", "namespaces": ["a"], "most": {"moneyPerDay": "5", "workers": 5}})
        of_tenant.cost = of_namespace.cost = Decimal(0)
        for _ in range(SETTLED_LOOKS + 1):
            await controller.look()
        of_tenant.cost = of_namespace.cost = Decimal(4)
        await controller.look()
        assert of_tenant.told == MoneyStanding("", "tenant b has spent 4.00 of 5 in this day")
        assert of_namespace.told == MoneyStanding()
        assert of_namespace.grants[-1].bound >= 8, "and no bounds"


async def test_no_job_begins_before_it_is_known_what_its_tenants_have_spent() -> None:
    old, new = Listed(running("a/x", 4)), Listed(job("a/y"))
    source = TenantSource()
    record = TenantRecord(ConfigMaps(), LeaseName("system", "spending"))
    controller = TenantController(source, Operator(old, new), record)
    for most, pods in (({"moneyPerMonth": "5"}, 0), ({"workers": 50}, 8)):
        source.current = tenants({"name": "t", "namespaces": ["a"], "most": most})
        for _ in range(SETTLED_LOOKS + 1):
            await controller.look()
        assert (old.grants[-1].bound >= 8, new.grants[-1].pods) == (True, pods)


async def test_a_look_that_fails_is_said_once_and_the_next_one_is_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken, good = Listed(running("a/x", 4)), Listed(running("a/y", 4))
    controller, operator, _ = deciding(broken, good)
    monkeypatch.setattr(controller_module, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(broken, "demand", lambda: 1 / 0)
    deciding_again = asyncio.create_task(controller.run())
    await asyncio.sleep(0.1)
    operator.jobs.remove(broken)
    async with asyncio.timeout(5):
        while not good.grants:
            await asyncio.sleep(0.01)
    deciding_again.cancel()
    assert [one.getMessage() for one in caplog.records] == ["what jobs may have could not be decided"]
