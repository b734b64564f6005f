"""Price files: reading and refusals."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from bamboo.profiles.devices import device_table
from bamboo.sizing.price_list import PriceError, of_devices, parse_prices, read_prices, shipped_prices
from sizing_kit import PRICES


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": "prices"}, "expected format 'bamboo-prices' version 1; found 'prices' version 1"),
        ({"machines": {}}, "not a price file: expected `object` of length >= 1"),
        ({"machines": {"m": {}}}, "machines.m: object missing required field `spot`"),
        ({"machines": {"a": {"spot": 1}, "m": {"spot": -1}}}, "machines.m: expected `float` >= 0.0 - at `$.spot`"),
        ({"machines": {"m": {"spot": "1"}}}, "expected `float`, got `str`"),
        ({"machines": {"m": {"spot": 1, "cost": 2}}}, "unknown field `cost`"),
        ({"network": {"betweenZones": -0.1}}, "expected `float` >= 0"),
    ],
)
def test_a_wrong_price_file_gets_one_sentence(change: dict[str, Any], told: str) -> None:
    with pytest.raises(PriceError) as error:
        parse_prices("p.yaml", {**PRICES, **change})
    assert str(error.value).startswith("p.yaml: ")
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_a_price_files_profiles_are_seen_from_its_folder(tmp_path: Path) -> None:
    machines = {"a": {"spot": 1, "profile": "sub/a.json"}, "b": {"spot": 1, "profile": "bert-v100"}}
    (tmp_path / "p.yaml").write_text(yaml.safe_dump({**PRICES, "machines": machines}))
    found = read_prices(str(tmp_path / "p.yaml")).machines
    assert [found[name].profile for name in "ab"] == [str(tmp_path / "sub" / "a.json"), "bert-v100"]
    with pytest.raises(PriceError, match=r"nothing\.yaml: no such file"):
        read_prices("nothing.yaml")
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(PriceError, match=r"list\.yaml: expected an object, got a list"):
        read_prices(str(tmp_path / "list.yaml"))


def test_a_list_that_comes_with_bamboo_is_read_by_its_name() -> None:
    """A shipped list has machines with all known devices; each costs at least as much on demand as spot."""
    name = shipped_prices()[-1]
    found = read_prices(name)
    assert name in found.source or "2026-11" in found.source
    assert {one.profile for one in found.machines.values()} == {f"@{device}" for device in device_table().devices}
    assert all(one.on_demand is not None and one.on_demand >= one.spot > 0 for one in found.machines.values())
    assert all(one.source for one in found.machines.values())


def test_only_machines_with_the_wanted_devices() -> None:
    known = read_prices(shipped_prices()[-1])
    found = of_devices("p", known, ("T4", "h100"))
    assert sorted(one.profile or "" for one in found.machines.values()) == ["@h100", "@t4"]
    with pytest.raises(PriceError, match=r"p: no machine has the profile '@b900'; devices with prices are a100, a10g"):
        of_devices("p", known, ("t4", "b900"))
