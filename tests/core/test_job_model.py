"""The generic reader of the API's types, by their annotations."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

import pytest

from bamboo_core.job.fields import Fields, Problem
from bamboo_core.job.forms import Integer, Number, Tree
from bamboo_core.job.model import (
    ListOf,
    Mark,
    Values,
    api_fields,
    completes,
    read_object,
)
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.text_patterns import DNS_LABEL


class Colour(StrEnum):
    RED = "Red"
    GREEN = "Green"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    name: Annotated[str, DNS_LABEL]
    spokes: Annotated[int, Integer(1, 99)] = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Light:
    colour: Colour = Colour.RED


@dataclass(frozen=True, slots=True, kw_only=True)
class Bicycle:
    owner: Annotated[str, Mark.NOT_IN_SPEC]
    gears: Annotated[int, Integer(1, 30)]
    price: Annotated[float | None, Number()] = None
    weight_kg: Annotated[int, Integer()]
    heavy: bool | None = None
    front_light: Light = field(default_factory=Light)
    rear_light: Light | None = None
    wheels: Annotated[tuple[Wheel, ...], ListOf(2)] = ()
    speed: Annotated[int, Integer(), Mark.FOLLOWS]
    more: Annotated[Mapping[str, Any], Tree()] = field(default_factory=dict)


@completes(Bicycle)
def _speed_follows_from_gears(values: Values) -> None:
    values["speed"] = values["speed"] or (values["gears"] or 1) * 2


def read(document: Any) -> tuple[Bicycle, list[str]]:
    problems: list[Problem] = []
    bicycle: Bicycle = read_object(Bicycle, Fields(document, "bike", problems), [], owner="me")
    return bicycle, [str(problem) for problem in problems]


def test_what_is_absent_has_its_default_or_follows() -> None:
    bicycle, problems = read({"gears": 3, "weightKg": 9})
    assert problems == []
    assert bicycle == Bicycle(owner="me", gears=3, weight_kg=9, speed=6)
    assert bicycle.front_light == Light()
    assert bicycle.rear_light is None


def test_every_form_of_field_is_read() -> None:
    document = {
        "gears": 3,
        "price": 0.5,
        "weightKg": 9,
        "heavy": True,
        "frontLight": {"colour": "Green"},
        "rearLight": {},
        "wheels": [{"name": "a", "spokes": 9}, {"name": "b"}],
        "speed": 7,
        "more": {"a": [1]},
    }
    assert read(document) == (
        Bicycle(
            owner="me",
            gears=3,
            price=0.5,
            weight_kg=9,
            heavy=True,
            front_light=Light(colour=Colour.GREEN),
            rear_light=Light(),
            wheels=(Wheel(name="a", spokes=9), Wheel(name="b")),
            speed=7,
            more={"a": [1]},
        ),
        [],
    )


def test_all_problems_are_found_at_once_and_reading_goes_on() -> None:
    bicycle, problems = read(
        {
            "gears": 31,
            "price": 0,
            "weightKg": 9,
            "heavy": "yes",
            "frontLight": {"colour": "Blue", "color": "Red"},
            "rearLight": 3,
            "wheels": [{"name": "a"}, {"name": "a"}],
            "speed": None,
            "more": {"a": {1}},
        }
    )
    assert problems == [
        "bike.gears: expected an integer <= 30, got 31",
        "bike.price: expected a number > 0 and <= 1e9, got 0",
        'bike.heavy: expected true or false, got "yes"',
        "bike.frontLight.color: unknown field, did you mean colour?",
        'bike.frontLight.colour: expected one of Red, Green, got "Blue"',
        "bike.rearLight: expected an object, got 3",
        'bike.wheels[1].name: "a" is already used by bike.wheels[0].name',
        "bike.more.a: expected a JSON value, got a set",
    ]
    assert (bicycle.gears, bicycle.price, bicycle.front_light) == (1, None, Light())


@pytest.mark.parametrize(
    ("document", "missing"),
    [
        ({}, ["bike.gears: required, expected an integer >= 1", "bike.weightKg: required, expected an integer >= 1"]),
        ([], ["bike: expected an object, got a list"]),
    ],
)
def test_what_has_to_be_there_is_missed(document: Any, missing: list[str]) -> None:
    assert read(document)[1] == missing


def test_marks_say_what_they_can_say() -> None:
    """FREE marks fields of an object that is not free itself; no field is both FIXED and WHILE_SUSPENDED."""
    for one in api_fields(JobSpec):
        inside = api_fields(one.form.kind) if hasattr(one.form, "kind") else ()
        assert not one.marks >= {Mark.FIXED, Mark.WHILE_SUSPENDED}
        assert Mark.FREE not in one.marks
        stays = bool(one.marks & {Mark.FIXED, Mark.WHILE_SUSPENDED})
        assert all(stays for inner in inside if Mark.FREE in inner.marks)
