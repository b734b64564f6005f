"""What namespaces have spent is kept in a ConfigMap: it outlives operators, and those of all shards know it."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from bamboo_core.kube.errors import ApiError
from bamboo_operator.kube.lease import LeaseName
from bamboo_operator.tenants.record import FORGOTTEN_AFTER, TenantRecord
from bamboo_operator.tenants.spending import JobMoney, Spending
from tenant_kit import ConfigMaps, job

PLACE = LeaseName("system", "bamboo-operator-spending")
START = datetime(2026, 12, 30, 12, tzinfo=UTC)


class Holder:
    """An operator that looks after some namespaces. money: what their jobs have cost, as their status says; over: which
    of these are over.
    """

    def __init__(self, api: ConfigMaps, money: dict[str, dict[str, Any]], now: datetime = START) -> None:
        self.api, self.money, self.now = api, money, now
        self.over: set[str] = set()
        self.record = TenantRecord(api, PLACE, lambda namespace: namespace in self.money, lambda: self.now)

    async def count(self, seconds: float = 1.0) -> Mapping[str, Decimal]:
        """Once, and then what is known is synchronized; what each namespace has spent by now."""
        self.now += timedelta(seconds=seconds)
        self.record.count(
            JobMoney(uid=uid, namespace=namespace, made=START, total=Decimal(total), over=uid in self.over)
            for namespace, jobs in self.money.items()
            for uid, total in jobs.items()
        )
        await self.record.sync(self.api, PLACE)
        return {namespace: one.day for namespace, one in self.record.current.items()}


async def test_the_next_operator_goes_on_where_the_last_one_has_written() -> None:
    api = ConfigMaps()
    first = Holder(api, {"a": {"x": 0, "y": 0}})
    for _ in range(3):
        await first.count()
    first.money["a"] = {"x": 5, "y": 3}
    await first.count()
    del first.money["a"]["x"]  # it is deleted
    assert await first.count() == {"a": 8}
    second = Holder(api, {"a": {"y": 4}}, first.now)  # y's status has got on since the last write
    assert not second.record.counts("a")
    for _ in range(3):
        found = await second.count()
    assert found == {"a": 9}
    assert second.record.counts("a")


async def test_operators_of_other_shards_know_what_is_spent_and_go_on_with_it() -> None:
    api = ConfigMaps()
    one, other = Holder(api, {"a": {"x": 0}}), Holder(api, {"b": {"z": 0}})
    for _ in range(3):
        await one.count()
        await other.count()
    one.money["a"]["x"], other.money["b"]["z"] = 5, 2
    await one.count()
    for _ in range(2):
        await other.count()
    assert await one.count() == await other.count() == {"a": 5, "b": 2}
    other.money["a"] = {"x": 6}
    del one.money["a"]
    one.money["c"] = {}
    for _ in range(3):
        await other.count()
        found = await one.count()
    assert found == {"a": 6, "b": 2}, "who gives a namespace away knows what another writes"


async def test_nothing_is_written_while_nothing_is_spent() -> None:
    holder = Holder(api := ConfigMaps(), {"a": {"x": 0}})
    for _ in range(4):
        await holder.count()
    holder.money["a"]["x"] = Decimal(1) / 3  # which is kept less exactly
    await holder.count()
    before = api.writes
    for _ in range(5):
        await holder.count()
    assert api.writes == before


async def test_jobs_that_are_over_and_namespaces_without_jobs_do_not_stay_for_good() -> None:
    """A ConfigMap has room for 1 MiB."""
    api = ConfigMaps()
    holder = Holder(api, {"a": {"x": 0, "y": 0}, "b": {"z": 0}})
    for _ in range(3):
        await holder.count()
    holder.money, holder.over = {"a": {"x": 5, "y": 1}, "b": {"z": 2}}, {"x"}
    await holder.count()
    assert Spending.read(api.kept[PLACE.name]["data"]["a"]).jobs == {"y": 1}
    following = Holder(api, holder.money, holder.now)
    following.over = holder.over
    for _ in range(3):
        found = await following.count()
    assert found == {"a": 6, "b": 2}, "what is over does not count twice"
    following.money["b"] = {}
    await following.count()
    await following.count(FORGOTTEN_AFTER.total_seconds() - 60)
    assert api.kept[PLACE.name]["data"].keys() == {"a", "b"}
    await following.count(120)
    assert api.kept[PLACE.name]["data"].keys() == {"a"}
    following.money["b"] = {"new": 3}
    for _ in range(3):
        found = await following.count()
    assert found == {"a": 0, "b": 0}, "a job that is older than the record costs what it costs from now on"


async def test_what_cannot_be_written_is_read_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    api = ConfigMaps()
    holder = Holder(api, {"a": {"x": 0}})
    for _ in range(3):
        await holder.count()
    api.too_long, holder.money["a"]["x"], holder.money["b"] = True, 5, {"y": 0}
    for _ in range(3):
        await holder.count()
    assert holder.record.counts("b"), "its jobs may begin"
    (said,) = [one.getMessage() for one in caplog.records]
    assert "at most 1048576 bytes" in said
    api.too_long = False
    await holder.count()
    assert api.kept[PLACE.name]["data"].keys() == {"a", "b"}


async def test_what_cannot_be_read_is_said_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    holder = Holder(api := ConfigMaps(), {"a": {"x": 3}})
    api.refusing = ApiError(403, "Forbidden", "not allowed")
    for _ in range(3):
        assert await holder.count() == {}
    (said,) = [one.getMessage() for one in caplog.records]
    assert said.startswith("cannot keep what tenants have spent, and may have, in system/bamboo-operator-spending: ")
    assert not holder.record.counts("a")
    api.refusing, api.kept[PLACE.name] = None, {"metadata": {"resourceVersion": "7"}, "data": {"a": "nonsense"}}
    for _ in range(3):
        await holder.count()
    assert "namespace a has spent begins anew" in caplog.records[-1].getMessage()
    holder.money["a"]["x"] = 4
    assert await holder.count() == {"a": 1}


async def test_claims_stay_until_the_next_operator_has_decided_and_are_forgotten_with_their_jobs() -> None:
    api = ConfigMaps()
    first = Holder(api, {"a": {"x": 0}, "b": {"y": 0}})
    for _ in range(3):
        await first.count()
    claims = {"a/x": job("a/x", pods=3), "b/y": job("b/y", pods=2)}
    first.record.claim(claims, first.record.seen_claims())
    assert first.record.seen_claims().reach == {}, "nobody knows of it"
    await first.count()
    assert first.record.seen_claims().reach == {"a/x": 3, "b/y": 2}
    second, other = Holder(api, first.money), Holder(api, {"c": {"z": 0}})
    for holder in (other, second):
        for _ in range(3):
            await holder.count()
    seen = second.record.seen_claims()
    assert (seen.reach, seen.mine, seen.others) == ({}, {"a", "b"}, ())
    assert {one.name: one for one in other.record.seen_claims().others} == claims
    second.money.pop("b")  # which is nobody's for a moment
    assert [one.name for one in second.record.seen_claims().others] == ["b/y"]
    second.record.claim({"a/x": claims["a/x"]}, seen)
    await second.count()
    assert second.record.seen_claims().reach == {"a/x": 3}
    second.money["a"] = {}  # the job is deleted
    second.record.claim({}, second.record.seen_claims())
    await second.count()
    await other.count()
    assert [one.name for one in other.record.seen_claims().others] == ["b/y"]


async def test_a_claim_counts_once_it_is_written_and_one_that_may_not_have_been_is_written_anew() -> None:
    api = ConfigMaps()
    holder = Holder(api, {"a": {"x": 0}})
    for _ in range(3):
        await holder.count()
    holder.record.claim({"a/x": job("a/x", pods=5)}, holder.record.seen_claims())
    await holder.count()
    api.late = True
    holder.record.claim({"a/x": job("a/x", pods=3)}, holder.record.seen_claims())
    await holder.count()
    seen = holder.record.seen_claims()
    assert (seen.reach, seen.trouble) == ({"a/x": 3}, f"ConfigMap {PLACE}")
    holder.record.claim({"a/x": job("a/x", pods=4)}, seen)
    await holder.count()
    assert holder.record.seen_claims().reach == {"a/x": 3}
    api.late = False
    api.arrive()  # the first one is written by now, and the second one refused
    holder.record.claim({"a/x": job("a/x", pods=4)}, holder.record.seen_claims())
    await holder.count()
    assert holder.record.seen_claims().reach == {"a/x": 3}, "it was of another version"
    holder.record.claim({"a/x": job("a/x", pods=4)}, holder.record.seen_claims())
    await holder.count()
    seen = holder.record.seen_claims()
    assert (seen.reach, seen.trouble) == ({"a/x": 4}, "")
    del api.kept[PLACE.name]  # by an administrator
    await holder.count()
    await holder.count()
    assert holder.record.seen_claims().reach == {"a/x": 0}, "others do not see it"
    holder.record.claim({"a/x": job("a/x", pods=4)}, holder.record.seen_claims())
    await holder.count()
    assert holder.record.seen_claims().reach == {"a/x": 4}


async def test_what_is_no_claim_is_said_and_read_without_it(caplog: pytest.LogCaptureFixture) -> None:
    api = ConfigMaps()
    text = json.dumps({"until": START.isoformat(), "day": "1", "month": "1", "jobs": {}, "claims": {"x": 3}})
    api.kept[PLACE.name] = {"metadata": {"resourceVersion": "1"}, "data": {"a": text}}
    holder = Holder(api, {"b": {}})
    await holder.count()
    assert "namespace a" in caplog.records[-1].getMessage()
    assert holder.record.seen_claims().others == ()
