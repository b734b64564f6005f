"""Profiles of models on machines: reading, refusal, scaling, and the profiles that Bamboo ships."""

from pathlib import Path
from typing import Any

import pytest

from bamboo.profiles.files import read_profile, shipped_names
from bamboo_core.planning.profile import SOURCES, ProfileError, for_microbatch, parse_profile, to_json
from job_simulation_kit import parsed


def test_a_profile_is_read_and_written_again() -> None:
    profile = parsed()
    assert profile.costs == pytest.approx((0.03, 0.03, 0.03))
    assert profile.state_bytes == 3 * 1200
    assert parse_profile("again.json", to_json(profile)) == profile


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, r"p\.json: not a profile: expected `int` >= 1 - at `\$\.samples`"),
        ({"colour": 1}, r"object contains unknown field `colour`"),
        ({"version": 2}, r"p\.json: expected format 'bamboo-profile' version 1; found 'bamboo-profile' version 2"),
        ({"sources": {}}, r"sources: expected one for layers\.seconds; every number needs to say where it comes from"),
        (
            {"sources": {key: {"text": "x"} for key in [*SOURCES, "gossip"]}},
            r"sources: 'gossip' is not one of layers\.seconds, ",
        ),
        ({"prices": {"spot": 0.9, "onDemand": 3.0}}, r"sources: expected one for prices"),
        ({"network": {"flow": 2e9, "machine": 1e9}}, r"network\.machine: must be at least network\.flow"),
    ],
)
def test_what_is_wrong_is_told_in_a_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        parsed(**changes)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b'{"name": NaN}', b"[" * 100_000])
def test_a_file_that_is_no_profile_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=r"p\.json: not a profile: "):
        read_profile(str(path))


def test_another_microbatch_takes_its_part_of_the_time_and_says_so() -> None:
    profile = for_microbatch(parsed(), 2)
    first = profile.layers[0]
    assert (first.forward, first.backward) == (0.005, 0.01)
    assert (first.activations, first.boundary) == (50, 32)
    assert (first.parameters, first.optimizer) == (400, 800)
    assert profile.samples == 2
    assert "layers.seconds" in profile.estimated
    assert for_microbatch(parsed(), 4) == parsed()


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_profiles_say_where_each_number_comes_from(name: str) -> None:
    profile = read_profile(name)
    assert profile.name == name
    assert profile.prices is not None
    assert profile.published is not None
    assert all(len(source.text) > 20 for source in profile.sources.values())
    assert "layers.seconds" in profile.estimated
