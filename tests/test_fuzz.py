"""What comes from outside is read or refused in one way: messages, traces, recordings. Nothing else may be raised."""

import json
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo import coordinator, protocol
from bamboo.events import Received, Tick, WorkerJoined
from bamboo.local.preempt import parse
from bamboo.local.recording import removals
from bamboo.local.trace_summary import TraceError, parse_trace, summarize_trace
from bamboo.memory import Memory
from bamboo.plan import Cell
from world import World

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
TAGS = [kind.__name__ for kind in protocol.ToCoordinator.__args__]
KEYS = ["type", "worker", "host", "port", "plan", "cell", "step", "epoch", "held", "seconds", "loss", "memory", "costs"]
JSON = st.recursive(
    SCALARS | st.sampled_from(TAGS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner),
    max_leaves=10,
)


def read(call: Callable[[], Any]) -> tuple[Any, str]:
    """What it gives, or the sentence with which it refuses. Any other exception fails the test."""
    try:
        return call(), ""
    except ValueError as error:
        return None, str(error) or "an error without a word\n"


@given(st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_message_or_a_value_error(data: bytes) -> None:
    for decode in (protocol.decode_from_worker, protocol.decode_from_coordinator):
        message, refusal = read(lambda decode=decode: decode(data))
        assert "\n" not in refusal
        assert refusal or decode(protocol.encode(message)) == message


@pytest.mark.parametrize("tag", TAGS)
@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=6))
@settings(max_examples=30)
def test_any_fields_of_a_message_are_read_or_refused_in_one_way(tag: str, fields: dict[str, Any]) -> None:
    _, refusal = read(lambda: protocol.decode_from_worker(json.dumps({**fields, "type": tag})))
    assert refusal == "" or refusal.startswith("malformed message")


def test_a_message_nested_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="malformed message"):
        protocol.decode_from_coordinator('{"type":"Welcome","secret":"","manifest":' + '{"a":' * 100_000)


# What a worker of the job may say in its right form, however wrong it is, must not bring the coordinator down.
WORKERS = st.sampled_from(["w0", "w1", "w5", "stranger", ""])
NUMBERS = st.integers(-3, 9) | st.sampled_from([-(2**62), 2**62])
FLOATS = st.floats(-1e9, 1e9) | st.sampled_from([math.inf, -math.inf, math.nan])
CELLS = st.builds(Cell, NUMBERS, NUMBERS)
SAID = st.one_of(
    st.just(protocol.WorkerReady()),
    st.builds(protocol.Profile, costs=st.lists(FLOATS, max_size=9).map(tuple)),
    st.builds(protocol.Heartbeat, step=NUMBERS, doing=st.text(), memory=st.none() | st.builds(Memory, log=NUMBERS)),
    st.builds(protocol.PeerDown, peer=WORKERS),
    st.builds(protocol.PeerUp, peer=WORKERS),
    st.builds(protocol.PlanApplied, epoch=NUMBERS),
    st.builds(protocol.ReplicaSynced, cell=CELLS, replica=WORKERS),
    st.builds(protocol.Report, committed=NUMBERS, held=st.dictionaries(NUMBERS, NUMBERS, max_size=3)),
    st.builds(
        protocol.StepCommitted, step=NUMBERS, generation=NUMBERS, loss=st.none() | FLOATS, gradient_norm=FLOATS,
        microbatches=NUMBERS, seconds=FLOATS,
    ),
    st.builds(
        protocol.TakenOver, epoch=NUMBERS, cell=CELLS, step=NUMBERS, reform_ms=FLOATS, recompute_ms=FLOATS,
        forwards=NUMBERS, backwards=NUMBERS, reused=NUMBERS,
    ),
    st.builds(protocol.CellFinished, cell=CELLS, digest=st.text(max_size=4)),
    st.builds(protocol.NoticeReceived, seconds=FLOATS),
    st.builds(protocol.Saved, stage=NUMBERS),
    st.just(protocol.Bye()),
)  # fmt: skip


@settings(max_examples=300)
@given(st.lists(st.tuples(WORKERS, SAID), max_size=12))
def test_no_worker_brings_the_coordinator_down(said: list[tuple[str, protocol.Message]]) -> None:
    world = World(2, 2, 1)
    world.settle()
    state = world.state
    for number, (worker, message) in enumerate(said):
        try:
            sent = protocol.decode_from_worker(protocol.encode(message))
        except ValueError:
            continue
        for event in (Received(worker, sent), Tick()):
            state, _ = coordinator.step(state, event, world.now + 0.1 * number)
    coordinator.step(state, WorkerJoined(protocol.Hello(worker="w9", host="h", port=1)), world.now + 2)


EVENT_KEYS = ["ph", "cat", "name", "ts", "dur", "pid", "tid", "args"]
EVENTS = st.lists(st.dictionaries(st.sampled_from(EVENT_KEYS), JSON | st.sampled_from(["X", "M", "i"])), max_size=4)


@given(st.binary(max_size=200) | EVENTS.map(lambda events: json.dumps({"traceEvents": events}).encode()))
def test_any_file_is_a_trace_or_not(data: bytes) -> None:
    events, refusal = read(lambda: parse_trace(data, "t.json"))
    assert "\n" not in refusal
    assert refusal.startswith("t.json") or summarize_trace(events)


def test_a_trace_nested_without_end_is_none() -> None:
    with pytest.raises(TraceError):
        parse_trace(b'{"traceEvents":[{"args":{"name":' + b"[" * 100_000, "t.json")


LINES = st.lists(st.text(alphabet="0123456789,.-+eadrmov \n", max_size=20), max_size=6).map("\n".join)


@given(st.text(max_size=80) | LINES)
def test_any_text_is_a_recording_or_a_value_error(text: str) -> None:
    found, refusal = read(lambda: removals("r.csv", text))
    assert "\n" not in refusal
    assert refusal or all(math.isfinite(seconds) and seconds >= 0 for seconds in found)


@given(st.lists(st.text(alphabet="atrndomce:0123456789.-einf", max_size=20), max_size=3))
def test_any_flag_is_a_schedule_or_a_value_error(texts: list[str]) -> None:
    def nothing(path: str) -> str:
        raise ValueError(f"there is no {path}")

    schedule, refusal = read(lambda: parse(texts, read=nothing))
    assert schedule is not None or "\n" not in refusal


def test_the_tags_are_those_of_the_protocol() -> None:
    assert {msgspec.inspect.type_info(kind).tag for kind in protocol.ToCoordinator.__args__} == set(TAGS)
