"""Fuzzing of messages, recordings and flags: any input is read, or refused by a ValueError."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from functools import cache
from inspect import Parameter, signature
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo.local.scheduling import parse
from bamboo.traces.files import parse_trace as parse_node_trace
from bamboo.traces.trace import removal_times
from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.control import codec, protocol
from bamboo_core.control.platform import Platform
from bamboo_core.control.protocol import Received, WorkerJoined
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.events import Event, Finish, Interrupted, Send, Tick, WorkerLost
from bamboo_core.coordinator.job_status import status
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.planning.plan import Cell, Plan, plan_problems
from world import World

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
KINDS = protocol.ToCoordinator.__args__
TAGS = [msgspec.inspect.type_info(kind).tag for kind in KINDS]
KEYS = ["type", "worker", "host", "port", "plan", "cell", "step", "epoch", "held", "seconds", "loss", "memory", "costs"]
JSON = st.recursive(
    SCALARS | st.sampled_from(TAGS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner),
    max_leaves=10,
)


def read(call: Callable[[], Any]) -> tuple[Any, str]:
    """Return (result, ""), or after a ValueError (None, its message). Other errors fail the test."""
    try:
        return call(), ""
    except ValueError as error:
        return None, str(error) or "an error without a word\n"


@given(st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_message_or_a_value_error(data: bytes) -> None:
    for decode in (codec.decode_from_worker, codec.decode_from_coordinator):
        message, refusal = read(lambda decode=decode: decode(data))
        assert "\n" not in refusal
        assert refusal or decode(codec.encode(message)) == message


@given(st.sampled_from(TAGS), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=6))
def test_any_fields_of_a_message_are_read_or_refused_in_one_way(tag: str, fields: dict[str, Any]) -> None:
    _, refusal = read(lambda: codec.decode_from_worker(json.dumps({**fields, "type": tag})))
    assert refusal == "" or refusal.startswith("malformed message")


def test_a_message_nested_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="malformed message"):
        codec.decode_from_coordinator('{"type":"Welcome","secret":"","manifest":' + '{"a":' * 100_000)


# What a worker of the job may say in its right form, however wrong it is, must not bring the coordinator down.
WORKERS = st.sampled_from(["w0", "w1", "w5", "stranger", ""])
NUMBERS = st.integers(-3, 9) | st.sampled_from([-(2**62), 2**62, 10**30, 10_000, 9_999])
FLOATS = st.floats(-1e9, 1e9) | st.sampled_from([math.inf, -math.inf, math.nan, 1e308, -1e308, 5e-324])
CHECKPOINTS = st.builds(CheckpointId, step=NUMBERS, id=st.sampled_from(["a", "b", "", "A b"]))
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: NUMBERS,
    float: FLOATS,
    bool: st.booleans(),
    str: st.text(max_size=3),
    type(None): st.none(),
    Any: SCALARS,
    CheckpointId: CHECKPOINTS,
}
DIGESTS = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)
BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("digest", "sha256"), DIGESTS),
    **dict.fromkeys(("worker", "peer", "replica", "owner"), WORKERS),
    "replicas": st.lists(WORKERS, max_size=2).map(tuple),
    "costs": st.lists(FLOATS, max_size=9).map(tuple) | st.just((1.0,) * 20_000),
    "passed": st.lists(st.text(), max_size=2).map(tuple) | st.just(("newer",) * 101),
    "reason": st.text(max_size=3) | st.just("HistoryNotWritten"),
    "sums": st.dictionaries(st.text(), st.sampled_from(["0" * 16, "f" * 16, "", "0" * 17]), max_size=3),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a field's type, both within and outside its bounds."""
    if kind in BY_TYPE:
        return BY_TYPE[kind]
    origin, inner = get_origin(kind), [values(part) for part in get_args(kind) if part is not ...]
    if origin in (Union, UnionType):
        return st.one_of(*inner)
    if origin is dict:
        return st.dictionaries(*inner, max_size=3)
    if origin is tuple:
        return st.lists(inner[0], max_size=3).map(tuple) if ... in get_args(kind) else st.tuples(*inner)
    if issubclass(kind, Enum):
        return st.sampled_from(kind)
    given_or_not, always = parts(kind), {}
    for name, parameter in signature(kind).parameters.items():
        if parameter.default is Parameter.empty:
            always[name] = given_or_not.pop(name)
    return st.fixed_dictionaries(always, optional=given_or_not).map(lambda named: kind(**named))


def parts(kind: type) -> dict[str, st.SearchStrategy[Any]]:
    return {
        name: BY_NAME[name] if name in BY_NAME else values(of)
        for name, of in get_type_hints(kind).items()
        if name[0] != "_"
    }


SAYING = st.builds(Received, WORKERS, st.one_of(*(values(k) for k in KINDS if k is not protocol.Hello)))

# Plans: valid ones in which parts were reversed, left out or doubled, or are of random values.
PARTS = parts(Plan)


@cache
def phases() -> dict[str, World]:
    """Return a world for each situation of a coordinator, by name: a phase, or a wait within a phase."""
    names = ("Running", "Asking", "Recovering", "Over", "Profiling", "Restoring", "Writing")
    often = {"everySteps": 5}
    found = {name: World(2, 2, 1, checkpoint=often if name in names[-2:] else None) for name in names}
    for name, world in found.items():
        if name != "Profiling":
            world.settle()
    found["Pending"] = World(2, 2, 1)
    found["Looking"] = World(2, 2, 1, checkpoint=often)
    while found["Looking"].state.layers.costs is None:
        found["Looking"].deliver()
    while found["Profiling"].state.layers.asked is None:
        found["Profiling"].deliver()
    writing, restoring = found["Writing"], found["Restoring"]
    while not writing.state.checkpoints.writers:
        writing.commit()
    restoring.found = None
    for worker in list(restoring.state.workers):
        restoring.lose(worker)
    restoring.settle()
    asking, over, back = found["Asking"], found["Over"], found["Recovering"]
    plan = found["Running"].state.plan
    assert plan is not None
    for worker in sorted({plan.at(c).owner for c in plan.cells() if c.stage == 1} | {*plan.at(Cell(0, 1)).replicas}):
        asking.lose(worker)
    over.tell(Interrupted())
    begun = coordinator.initial(back.spec, back.document, secret="", now=back.now, resumed=True)
    back.state = replace(begun, membership=replace(begun.membership, requested=5))
    states = {
        name: (world.state.phase, world.state.phase == "Running" and world.state.inquiry.began_at is not None)
        for name, world in found.items()
    }
    assert states == {name: (name, False) for name in ("Running", "Recovering", "Over", "Pending", "Restoring")} | {
        "Asking": ("Running", True),
        "Writing": ("Running", False),
        "Looking": ("Pending", False),
        "Profiling": ("Pending", False),
    }
    return found


@st.composite
def hellos(draw: st.DrawFn) -> WorkerJoined:
    """Draw the event of a worker's hello, with a valid, damaged or random plan, or with none."""
    plan = draw(st.none() | st.just(phases()["Running"].state.plan) | st.builds(Plan, **PARTS))
    if plan and draw(st.booleans()):
        changed = draw(st.lists(st.sampled_from(sorted(PARTS)), max_size=2, unique=True))
        plan = msgspec.structs.replace(plan, **{name: draw(damaged(getattr(plan, name), name)) for name in changed})
    return WorkerJoined(
        protocol.Hello(
            worker=draw(WORKERS | st.just("w9")),
            host=draw(st.text(max_size=3)),
            port=draw(NUMBERS),
            zone=draw(st.text(max_size=3)),
            pid=draw(NUMBERS),
            plan=plan,
            platform=Platform(torch=draw(st.sampled_from(["", "2", "x" * 300])), data_plane=draw(st.just(0) | NUMBERS)),
        )
    )


def damaged(value: Any, part: str) -> st.SearchStrategy[Any]:
    """Return a strategy for a damaged field of a plan: shorter, longer, reversed, or of a random value."""
    if not isinstance(value, tuple) or not value:
        return PARTS[part]
    changes = [value[1:], (*value, value[-1]), value[::-1]]
    if isinstance(value[0], tuple):
        changes += [(value[0][1:], *value[1:]), (*value[:-1], (*value[-1], value[-1][-1]) if value[-1] else ())]
    return st.sampled_from(changes) | PARTS[part]


def heard(event: WorkerJoined | Received) -> WorkerJoined | Received | None:
    """Return the event after encoding and decoding; None if the server would refuse the message."""
    message = event.hello if isinstance(event, WorkerJoined) else event.message
    try:
        sent = codec.decode_from_worker(codec.encode(message))
    except ValueError:
        return None
    return WorkerJoined(sent) if isinstance(sent, protocol.Hello) else Received(event.worker, sent)  # type: ignore[union-attr]


def step(state: CoordinatorState, event: Event, now: float) -> CoordinatorState:
    """Return the coordinator's next state; check its messages, reasons and plan, and that its status is finite."""
    state, commands = coordinator.step(state, event, now)
    for command in commands:
        if isinstance(command, Send):
            assert codec.decode_from_coordinator(codec.encode(command.message)) == command.message
        if isinstance(command, Finish):
            assert re.fullmatch("[A-Z][A-Za-z0-9]{,63}", command.reason)
    shown = status(state, now)
    numbers = [getattr(t, name) for t in shown.takeovers for name in ("pause_ms", "reform_ms", "recompute_ms")]
    numbers += [n for n in (shown.loss, shown.eta_seconds, shown.step_seconds) if n is not None]
    assert all(math.isfinite(number) for number in numbers)
    assert state.plan is None or plan_problems(state.plan) == []
    return state


@pytest.mark.parametrize(
    "phase",
    ["Pending", "Profiling", "Looking", "Recovering", "Running", "Asking", "Writing", "Restoring", "Over"],
)
@settings(max_examples=20, deadline=None)
@given(st.lists(SAYING | hellos(), max_size=8), st.sets(WORKERS, max_size=2))
def test_no_worker_brings_the_coordinator_down(phase: str, said: list[WorkerJoined | Received], dead: set[str]) -> None:
    world = phases()[phase]
    state, now = world.state, world.now
    for event in said:
        if (arrived := heard(event)) is not None:
            for what in (arrived, Tick()):
                now += 0.1
                state = step(state, what, now)
    for worker in sorted(dead):
        state = step(state, WorkerLost(worker, "test"), now)
    for name, record in state.workers.items():
        if record.ready and state.plan:
            state = step(state, Received(name, protocol.PlanApplied(epoch=state.plan.epoch)), now)
    for seconds in (0.1, 2, 60, 400):
        state = step(state, Tick(), now + seconds)


LINES = st.lists(st.text(alphabet="0123456789,.-+eadrmov \n", max_size=20), max_size=6).map("\n".join)


@given(st.text(max_size=80) | LINES)
def test_any_text_is_a_recording_or_a_value_error(text: str) -> None:
    found, refusal = read(lambda: parse_node_trace("r.csv", text))
    assert "\n" not in refusal
    assert refusal.startswith("r.csv") or all(math.isfinite(at) and at >= 0 for at in removal_times(found))


ENTRY = st.dictionaries(st.sampled_from(["at", "add", "remove", "price", "zone", "notice", "onDemand"]), SCALARS)


@given(st.lists(ENTRY, max_size=4))
def test_any_lines_are_a_trace_of_nodes_or_are_refused(entries: list[dict[str, object]]) -> None:
    lines = [{"format": "bamboo-trace", "version": 1}, *entries]
    _, refusal = read(lambda: parse_node_trace("r.jsonl", "\n".join(json.dumps(line) for line in lines)))
    assert "\n" not in refusal
    assert not refusal or refusal.startswith("r.jsonl")


@given(st.lists(st.text(alphabet="atrndomce:0123456789.-einf", max_size=20), max_size=3))
def test_any_flag_is_a_schedule_or_a_value_error(texts: list[str]) -> None:
    schedule, refusal = read(lambda: parse(texts))
    assert schedule is not None or "\n" not in refusal
