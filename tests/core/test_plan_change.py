"""Plans go to workers whole once, and then as what differs; each worker has exactly the plan that was made."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.control import codec
from bamboo_core.control.plan_change import (
    PLAIN,
    HeardPlans,
    NewLayout,
    PlanChange,
    SendPlan,
    UnusableChange,
    change_between,
    changed_plan,
)
from bamboo_core.control.protocol import Stop
from bamboo_core.job.spec import RedundancyMode
from bamboo_core.planning.plan import CheckpointId, Layout, Plan
from world import World


def history(**shape: Any) -> list[Plan]:
    """The plans of a job that grows, heals, loses workers one after the other, and shrinks."""
    world = World(2, 3, 1, chooses=("pipelines",), **shape)
    world.settle()
    for worker in ("w0", "w4", "w6", "w2"):
        world.away = 1
        world.lose(worker)
        world.settle()
    return world.plans


PLANS = {"plain": history(), "nodes": history(per_node=2)}


def carried(change: PlanChange) -> PlanChange:
    """As it comes out of a channel."""
    found = codec.decode_from_coordinator(codec.frame_of(change))
    assert isinstance(found, PlanChange)
    return found


@pytest.mark.parametrize("name", PLANS)
def test_each_plan_of_a_job_is_rebuilt_from_the_one_before(name: str) -> None:
    plans = PLANS[name]
    assert {plan.reason for plan in plans} >= {"Takeover", "Replicating", "Shrinking", "Resized"}
    for base, plan in pairwise(plans):
        change = change_between(base, plan)
        assert change is not None
        assert changed_plan(base, carried(change)) == plan


@given(st.data())
def test_any_plan_is_rebuilt_from_any_other(data: st.DataObject) -> None:
    everything = [plan for plans in PLANS.values() for plan in plans]
    base, plan = (data.draw(st.sampled_from(everything)) for _ in range(2))
    others = {
        "mode": RedundancyMode.NONE,
        "origin": 7,
        "restore": CheckpointId(step=3, id="a"),
        "moved": True,
        "stages": ((0, 8),),
        "sources": (("w0",), ()),
        "device_layers": ((0, 4), (4, 8)),
        "boundary": not plan.boundary,
        "reason": "Other",
        "message": "é",
        "layouts": (Layout(generation=9, split=((0, 3), (), (1, 2, 4)), groups=(0, 2, 5)),),
    }
    chosen = data.draw(st.lists(st.sampled_from(sorted(others)), unique=True))
    plan = msgspec.structs.replace(plan, **{name: others[name] for name in chosen})
    if "stages" in chosen:
        plan = msgspec.structs.replace(plan, pipelines=tuple(row[:1] for row in plan.pipelines))
    change = change_between(base, plan)
    assert change is None or changed_plan(base, carried(change)) == plan


def test_a_change_to_another_plan_than_the_last_one_is_refused() -> None:
    first, second, third = PLANS["plain"][:3]
    change = change_between(second, third)
    assert change is not None
    with pytest.raises(UnusableChange, match="to a plan that is not here"):
        HeardPlans().heard(change)
    heard = HeardPlans()
    heard.heard(SendPlan(plan=first))
    with pytest.raises(UnusableChange, match="of epoch 2, and here is that of 1"):
        heard.heard(change)
    heard.heard(SendPlan(plan=third))
    assert heard.heard(Stop(reason="X")) == Stop(reason="X")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"digest": "0" * 32}, "comes out as another one"),
        ({"gone": ("w1",)}, "comes out as another one"),
        ({"rows": 1 << 53}, "does not say who runs each of 9007199254740992 pipelines"),
        ({"rows": 4}, "does not say who runs each of 4 pipelines"),
        ({"stages": ((0, 2), (2, 4), (4, 8))}, "does not say who runs each stage of pipeline 0"),
        ({"layouts": (99,)}, "names the layout of generation 99"),
        ({"layouts": ({"generation": 1, "split": (((0, 1 << 50),),)},)}, "too many microbatches"),
        ({"layouts": ({"generation": 1, "split": (((3, 3),),)},)}, "empty ranges"),
    ],
)
def test_a_change_that_does_not_lead_to_its_plan_is_refused(wrong: dict[str, Any], why: str) -> None:
    first, second = PLANS["plain"][:2]
    change = change_between(first, second)
    assert change is not None
    said = {**msgspec.to_builtins(change), "cells": (), **wrong}
    found = codec.decode_from_coordinator(msgspec.json.encode(said))
    assert isinstance(found, PlanChange)
    with pytest.raises(UnusableChange, match=why):
        changed_plan(first, found)


def test_a_frame_that_is_cut_or_grows_without_end_is_refused() -> None:
    frame = codec.frame_of(Stop(reason="X" * 3000))
    assert isinstance(frame, bytes)
    assert len(frame) < 100
    endless = codec.frame_of(Stop(reason="X" * (codec.MAX_MESSAGE_BYTES + 1)))
    assert isinstance(endless, bytes)
    assert len(endless) < codec.MAX_MESSAGE_BYTES
    for bad in (frame[:-1], frame + b"x", b"\x78", b"\x78\x9cnothing", endless):
        with pytest.raises(ValueError, match="malformed message"):
            codec.decode_from_coordinator(bad)


def test_a_change_can_say_every_field_of_a_plan_and_of_a_layout() -> None:
    assert _names(NewLayout) == _names(Layout)
    assert {*PLAIN, "epoch", "pipelines", "layouts", "workers"} == _names(Plan)


def _names(of: type[msgspec.Struct]) -> set[str]:
    return {field.name for field in msgspec.structs.fields(of)}
