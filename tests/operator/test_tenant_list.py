"""The file of tenants: read strictly, all mistakes at once, and read anew while jobs run."""

import logging
from decimal import Decimal
from pathlib import Path

import pytest

from bamboo_core.job.fields import ManifestError
from bamboo_operator.tenants.tenant_list import TenantReader, TenantSource, parse_tenants

GOOD = """format: bamboo-tenants
version: 1
order: {afterSeconds: 5}
tenants:
- name: research
  namespaces: [vision, speech]
  weight: 2
  most: {workers: 32, devices: 64, moneyPerHour: "20.5"}
  mostPerJob: {workers: 16}
- {name: rest, namespaces: ["*"]}
"""


async def test_a_file_is_read_again_and_a_bad_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tenants.yaml"
    source = TenantSource(TenantReader(str(file), 1.0))
    await source.read()
    assert source.current is None
    assert source.age is None
    file.write_text(GOOD)
    await source.read()
    assert source.current is not None
    research = source.current.of("speech")
    assert (research.name, research.weight, research.most.workers) == ("research", 2.0, 32)
    assert research.most.money_per_hour == Decimal("20.5")
    assert source.current.of("elsewhere").name == "rest"
    for bad in (GOOD.replace("32", "0"), "tenants: {", GOOD + "more: 1\n", ""):
        file.write_text(bad)
        caplog.clear()
        for _ in range(2):
            await source.read()
        (told,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
        assert told.startswith(f"no new tenants: {file}: ")
        assert told.endswith("; those of before stay in force")
        assert source.current.of("speech") == research


def test_a_namespace_of_no_tenant_is_one_by_itself() -> None:
    alone = parse_tenants({"format": "bamboo-tenants", "version": 1}).of("mine")
    assert (alone.name, alone.namespaces, alone.weight) == ("mine", ("mine",), 1.0)


def test_all_mistakes_are_told_at_once() -> None:
    tenants = [
        {"name": "A", "namespaces": ["x_"], "weight": 0, "most": {"wrkers": 3, "moneyPerHour": 3}},
        {"name": "b", "namespaces": ["x", "x"]},
        {"name": "b", "namespaces": []},
    ]
    with pytest.raises(ManifestError) as raised:
        parse_tenants({"version": 2, "tenants": tenants})
    assert [problem.path for problem in raised.value.problems] == [
        "format",
        "version",
        "tenants[0].name",
        "tenants[0].namespaces[0]",
        "tenants[0].weight",
        "tenants[0].most.moneyPerHour",
        "tenants[0].most.wrkers",
        "tenants[2].name",
        "tenants[1].namespaces[1]",
        "tenants[2].namespaces",
    ]
