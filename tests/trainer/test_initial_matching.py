"""What is taken of other weights, and which sentence says what is wrong."""

from typing import Any

import pytest
import torch

from bamboo_core.job.spec import InitialSpec
from bamboo_trainer.checkpoint.state_dict import StateEntry
from bamboo_trainer.initial.matching import Matching, OfferedTensor, WantedTensor, match
from bamboo_trainer.tasks.task_errors import TaskError

THERE = {"embed.weight": (5, 2), "h.0.weight": (2, 2), "h.1.weight": (2, 2), "head.weight": (5, 2)}


def offered(shapes: dict[str, tuple[int, ...]], dtype: str = "F32") -> list[OfferedTensor]:
    entries = (
        StateEntry(name=name, layer=0, tensor=name, dtype=dtype, shape=shape, complex=False, bytes=0)
        for name, shape in shapes.items()
    )
    return [OfferedTensor(name=entry.name, entries=(entry,)) for entry in entries]


def wanted(shapes: dict[str, tuple[int, ...]]) -> list[WantedTensor]:
    """Names with a "+" between them are those of one tensor."""
    return [
        WantedTensor(names=tuple(names.split("+")), places=((0, names),), shape=shape, dtype=torch.float32)
        for names, shape in shapes.items()
    ]


def matched(model: dict[str, tuple[int, ...]], there: dict[str, tuple[int, ...]] = THERE, **fields: Any) -> Matching:
    return match(wanted(model), offered(there), InitialSpec(url="x", **fields), "x")


def taken(matching: Matching) -> dict[str, str]:
    return {take.wanted.names[0]: take.offers[0].name for take in matching.takes}


def test_what_is_dropped_there_and_has_a_name_of_the_model_begins_anew() -> None:
    found = matched(THERE, drop=("h.*", "head.weight"))
    assert (found.left, found.anew) == (("h.0.weight", "h.1.weight", "head.weight"),) * 2
    assert found.in_words("x")[1:] == [
        "left there: h.0.weight, h.1.weight, head.weight",
        "begun anew: h.0.weight, h.1.weight, head.weight",
    ]


def test_values_of_another_width_of_floats_are_taken() -> None:
    found = match(wanted(THERE), offered(THERE, "BF16"), InitialSpec(url="x"), "x")
    assert len(found.takes) == 4


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        (
            {**THERE, "more": (1,)},
            {},
            "task.initialFrom: x does not have more of the model: drop: [more] lets it begin anew",
        ),
        (
            {"embed.weight": (5, 2), "head.weight": (5, 2)},
            {},
            "task.initialFrom: x has h.0.weight, h.1.weight, which the model does not have: drop: "
            "[h.0.weight] leaves it there",
        ),
        (
            {"a": (5, 2)},
            {},
            "task.initialFrom: nothing is taken: x has embed.weight, h.0.weight, h.1.weight, head.weight, and the "
            "model a; write a file with the model's names",
        ),
        (
            THERE | {"head.weight": (3, 2)},
            {},
            "task.initialFrom: head.weight is [5, 2] there and head.weight [3, 2] in the model: drop: [head.weight] "
            "lets it begin anew",
        ),
        (
            THERE | {"head.weight": (5, 3)},
            {},
            "task.initialFrom: head.weight is [5, 2] there and head.weight [5, 3] in the model: drop: [head.weight] "
            "lets it begin anew",
        ),
        (THERE, {"drop": ("hed*",)}, "task.initialFrom.drop: no tensor fits 'hed*'"),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_told(model: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError) as error:
        matched(model, **fields)
    assert str(error.value) == message


def test_whole_numbers_are_no_floats() -> None:
    with pytest.raises(TaskError, match=r"embed.weight is of torch.int64 there, expected torch.float32"):
        match(wanted(THERE), offered(THERE, "I64"), InitialSpec(url="x"), "x")


def test_two_tensors_that_are_one_in_the_model_have_one_shape() -> None:
    model = {"embed.weight+head.weight": (5, 2), "h.0.weight": (2, 2), "h.1.weight": (2, 2)}
    assert len(matched(model).takes[0].offers) == 2
    with pytest.raises(TaskError, match=r"embed.weight is \[4, 2\] there and embed.weight \[5, 2\] in the model"):
        matched(model, THERE | {"embed.weight": (4, 2)})
