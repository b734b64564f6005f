"""What comes from outside is read or refused in one way: messages, traces, recordings. Nothing else may be raised."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo.preemption.scheduling import parse
from bamboo.traces.files import parse_trace as parse_node_trace
from bamboo.traces.json_lines import to_json_lines
from bamboo.traces.trace import removal_times
from bamboo_core.checkpoint.manifest import CheckpointPart
from bamboo_core.control import codec, guard, protocol, weights
from bamboo_core.control.channel_events import Received, WorkerJoined
from bamboo_core.control.memory import Memory
from bamboo_core.control.platform import Platform
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.events import Event, Finish, Interrupted, Send, Tick, WorkerLost
from bamboo_core.coordinator.job_status import status
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.job.spec import RedundancyMode
from bamboo_core.planning.plan import Assignment, Cell, CheckpointId, Layout, Peer, Plan, plan_problems
from bamboo_core.planning.splits.stage_times import StageTimes
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
    for decode in (codec.decode_from_worker, codec.decode_from_coordinator):
        message, refusal = read(lambda decode=decode: decode(data))
        assert "\n" not in refusal
        assert refusal or decode(codec.encode(message)) == message


@pytest.mark.parametrize("tag", TAGS)
@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=6))
@settings(max_examples=30)
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
DIGESTS = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)
CELLS = st.builds(Cell, NUMBERS, NUMBERS)
CHECKPOINTS = st.builds(CheckpointId, step=NUMBERS, id=st.sampled_from(["a", "b", "", "A b"]))
FILES = st.builds(CheckpointPart, layer=NUMBERS, file=st.text(max_size=3), bytes=NUMBERS, sha256=DIGESTS)
TIMES = st.builds(
    StageTimes,
    layers=st.tuples(NUMBERS, NUMBERS),
    forward=FLOATS,
    backward=FLOATS,
    each=st.lists(FLOATS, max_size=3).map(tuple),
    microbatches=NUMBERS,
)
SUMS = st.sampled_from(["0" * 16, "f" * 16, "", "0" * 17])
SAID: dict[type, st.SearchStrategy[protocol.Message]] = {
    protocol.WorkerReady: st.just(protocol.WorkerReady()),
    protocol.Profile: st.builds(
        protocol.Profile, costs=st.lists(FLOATS, max_size=9).map(tuple) | st.just((1.0,) * 20_000)
    ),
    protocol.Heartbeat: st.builds(
        protocol.Heartbeat,
        step=NUMBERS,
        doing=st.text(),
        busy=FLOATS,
        memory=st.none() | st.builds(Memory, peak=NUMBERS, limit=NUMBERS),
        times=st.none() | st.lists(TIMES, max_size=3).map(tuple),
        headroom=st.none() | FLOATS,
    ),
    protocol.PeerDown: st.builds(protocol.PeerDown, peer=WORKERS),
    protocol.PeerUp: st.builds(protocol.PeerUp, peer=WORKERS),
    protocol.PlanApplied: st.builds(protocol.PlanApplied, epoch=NUMBERS),
    protocol.ReplicaSynced: st.builds(protocol.ReplicaSynced, cell=CELLS, replica=WORKERS),
    protocol.Report: st.builds(protocol.Report, committed=NUMBERS, held=st.dictionaries(NUMBERS, NUMBERS, max_size=3)),
    protocol.LeftBehind: st.builds(protocol.LeftBehind, cell=CELLS),
    protocol.StepCommitted: st.builds(
        protocol.StepCommitted,
        step=NUMBERS,
        generation=NUMBERS,
        loss=st.none() | FLOATS,
        gradient_norm=FLOATS,
        microbatches=NUMBERS,
        seconds=FLOATS,
        learning_rate=st.none() | FLOATS,
        checkpoint=st.none() | st.tuples(NUMBERS, CHECKPOINTS),
        skipped=st.booleans(),
        metrics=st.dictionaries(st.text(), st.none() | FLOATS, max_size=3),
    ),
    protocol.Evaluated: st.builds(
        protocol.Evaluated, step=NUMBERS, metrics=st.dictionaries(st.text(), st.none() | FLOATS, max_size=3)
    ),
    protocol.CheckpointFound: st.builds(
        protocol.CheckpointFound,
        number=NUMBERS,
        checkpoint=st.none() | CHECKPOINTS,
        problem=st.just("") | st.text(),
        passed=st.lists(st.text(), max_size=2).map(tuple) | st.just(("newer",) * 101),
    ),
    protocol.CheckpointBegun: st.builds(protocol.CheckpointBegun, number=NUMBERS, checkpoint=CHECKPOINTS),
    protocol.PartsWritten: st.builds(
        protocol.PartsWritten, checkpoint=CHECKPOINTS, parts=st.lists(FILES, max_size=9).map(tuple)
    ),
    protocol.CheckpointCommitted: st.builds(protocol.CheckpointCommitted, checkpoint=CHECKPOINTS),
    protocol.CheckpointFailed: st.builds(protocol.CheckpointFailed, checkpoint=CHECKPOINTS, message=st.text()),
    protocol.StateHeld: st.builds(protocol.StateHeld, checkpoint=CHECKPOINTS, layers=st.lists(NUMBERS).map(tuple)),
    protocol.CopiesHeld: st.builds(protocol.CopiesHeld, checkpoint=CHECKPOINTS, layers=st.lists(NUMBERS).map(tuple)),
    protocol.RestoreFailed: st.builds(
        protocol.RestoreFailed, origin=NUMBERS, checkpoint=CHECKPOINTS, message=st.text(), damaged=st.booleans()
    ),
    protocol.TakenOver: st.builds(
        protocol.TakenOver,
        epoch=NUMBERS,
        cell=CELLS,
        step=NUMBERS,
        reform_ms=FLOATS,
        recompute_ms=FLOATS,
        forwards=NUMBERS,
        backwards=NUMBERS,
        reused=NUMBERS,
    ),
    protocol.CellFinished: st.builds(protocol.CellFinished, cell=CELLS, digest=DIGESTS),
    protocol.NoticeReceived: st.builds(protocol.NoticeReceived, seconds=FLOATS),
    weights.Saved: st.builds(weights.Saved, stage=NUMBERS, number=NUMBERS),
    weights.WeightsCommitted: st.builds(weights.WeightsCommitted, number=NUMBERS),
    protocol.WholePlanWanted: st.builds(protocol.WholePlanWanted, problem=st.text()),
    protocol.HistoryKept: st.builds(protocol.HistoryKept, source=st.text(), number=NUMBERS),
    protocol.WorkerWarning: st.builds(
        protocol.WorkerWarning, reason=st.text() | st.just("HistoryNotWritten"), message=st.text()
    ),
    protocol.WorkerFailed: st.builds(protocol.WorkerFailed, reason=st.text(), message=st.text()),
    guard.StateSums: st.builds(
        guard.StateSums, stage=NUMBERS, version=NUMBERS, sums=st.dictionaries(st.text(), SUMS, max_size=3)
    ),
    guard.SpotCheckDiffers: st.builds(guard.SpotCheckDiffers, cell=CELLS, step=NUMBERS, message=st.text()),
    protocol.Bye: st.just(protocol.Bye()),
}
SAYING = st.builds(Received, WORKERS, st.one_of(*SAID.values()))

# Plans: sound ones in which something has been put into another one's place, or left out, or doubled.
ASSIGNMENTS = st.builds(Assignment, owner=WORKERS, replicas=st.lists(WORKERS, max_size=2).map(tuple))
LAYOUTS = st.builds(
    Layout, generation=NUMBERS, split=st.lists(st.lists(NUMBERS, max_size=9).map(tuple), max_size=3).map(tuple)
)
PEERS = st.builds(Peer, worker=WORKERS, host=st.text(max_size=3), port=NUMBERS, zone=st.text(max_size=3))
PARTS: dict[str, st.SearchStrategy[Any]] = {
    "epoch": NUMBERS,
    "stages": st.lists(st.tuples(NUMBERS, NUMBERS), max_size=3).map(tuple),
    "pipelines": st.lists(st.lists(ASSIGNMENTS, max_size=3).map(tuple), max_size=3).map(tuple),
    "layouts": st.lists(LAYOUTS, max_size=3).map(tuple),
    "workers": st.lists(PEERS, max_size=4).map(tuple),
    "mode": st.sampled_from(RedundancyMode),
    "origin": NUMBERS,
    "restore": st.none() | CHECKPOINTS,
    "boundary": st.booleans(),
    "reason": st.text(max_size=3),
    "message": st.text(max_size=3),
}


@cache
def phases() -> dict[str, World]:
    """A world in each phase that a coordinator can be in, with whom it waits for."""
    names = ("Running", "Asking", "Recovering", "Saving", "Over", "Profiling", "Restoring", "Writing")
    often = {"everySteps": 5}
    found = {name: World(2, 2, 1, checkpoint=often if name in names[-2:] else None) for name in names}
    for name, world in found.items():
        if name != "Profiling":
            world.settle()
    found["Pending"] = World(2, 2, 1)
    found["Looking"] = World(2, 2, 1, checkpoint=often)
    while found["Looking"].state.profile.costs is None:
        found["Looking"].deliver()
    while found["Profiling"].state.profile.asked is None:
        found["Profiling"].deliver()
    writing, restoring = found["Writing"], found["Restoring"]
    while not writing.state.checkpoints.writers:
        writing.commit()
    restoring.found = None
    for worker in list(restoring.state.workers):
        restoring.lose(worker)
    restoring.settle()
    asking, saving, over, back = found["Asking"], found["Saving"], found["Over"], found["Recovering"]
    plan = found["Running"].state.plan
    assert plan is not None
    for worker in sorted({plan.at(c).owner for c in plan.cells() if c.stage == 1} | {*plan.at(Cell(0, 1)).replicas}):
        asking.lose(worker)
    saving.state = replace(
        saving.state,
        terms=replace(saving.state.terms, save_path="folder"),
        course=replace(saving.state.course, phase="Saving"),
    )
    over.tell(Interrupted())
    begun = coordinator.initial(back.spec, back.document, secret="", save_path=None, now=back.now, resumed=True)
    back.state = replace(begun, membership=replace(begun.membership, requested=5))
    states = {
        name: (world.state.phase, world.state.phase == "Running" and world.state.inquiry.began_at is not None)
        for name, world in found.items()
    }
    assert states == {
        name: (name, False) for name in ("Running", "Recovering", "Saving", "Over", "Pending", "Restoring")
    } | {
        "Asking": ("Running", True),
        "Writing": ("Running", False),
        "Looking": ("Pending", False),
        "Profiling": ("Pending", False),
    }
    return found


@st.composite
def hellos(draw: st.DrawFn) -> WorkerJoined:
    """A worker comes, or comes back, with a plan or without one."""
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
    """The same, shorter, longer, the other way round, with an item changed, or something else altogether."""
    if not isinstance(value, tuple) or not value:
        return PARTS[part]
    changes = [value[1:], (*value, value[-1]), value[::-1]]
    if isinstance(value[0], tuple):
        changes += [(value[0][1:], *value[1:]), (*value[:-1], (*value[-1], value[-1][-1]) if value[-1] else ())]
    return st.sampled_from(changes) | PARTS[part]


def heard(event: WorkerJoined | Received) -> WorkerJoined | Received | None:
    """The event as the server makes it of what arrives; None if that is refused there."""
    message = event.hello if isinstance(event, WorkerJoined) else event.message
    try:
        sent = codec.decode_from_worker(codec.encode(message))
    except ValueError:
        return None
    return WorkerJoined(sent) if isinstance(sent, protocol.Hello) else Received(event.worker, sent)  # type: ignore[union-attr]


def step(state: CoordinatorState, event: Event, now: float) -> CoordinatorState:
    """What it decides can be sent, shown, and read at the other end."""
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
    ["Pending", "Profiling", "Looking", "Recovering", "Running", "Asking", "Writing", "Restoring", "Saving", "Over"],
)
@settings(max_examples=60, deadline=None)
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


def test_every_kind_of_message_is_tried() -> None:
    assert {*SAID, protocol.Hello} == set(protocol.ToCoordinator.__args__)


LINES = st.lists(st.text(alphabet="0123456789,.-+eadrmov \n", max_size=20), max_size=6).map("\n".join)


@given(st.text(max_size=80) | LINES)
def test_any_text_is_a_recording_or_a_value_error(text: str) -> None:
    found, refusal = read(lambda: parse_node_trace("r.csv", text))
    assert "\n" not in refusal
    assert refusal.startswith("r.csv") or all(math.isfinite(at) and at >= 0 for at in removal_times(found))


ENTRY = st.dictionaries(st.sampled_from(["at", "add", "remove", "price", "zone", "notice", "onDemand"]), SCALARS)


@given(st.lists(ENTRY, max_size=4))
def test_any_lines_are_a_trace_of_nodes_that_can_be_written_or_are_refused(entries: list[dict[str, object]]) -> None:
    lines = [{"format": "bamboo-trace", "version": 1}, *entries]
    found, refusal = read(lambda: parse_node_trace("r.jsonl", "\n".join(json.dumps(line) for line in lines)))
    assert "\n" not in refusal
    assert refusal.startswith("r.jsonl") or parse_node_trace("r.jsonl", "".join(to_json_lines(found))) == found


@given(st.lists(st.text(alphabet="atrndomce:0123456789.-einf", max_size=20), max_size=3))
def test_any_flag_is_a_schedule_or_a_value_error(texts: list[str]) -> None:
    def nothing(path: str) -> str:
        raise ValueError(f"there is no {path}")

    schedule, refusal = read(lambda: parse(texts, read=nothing))
    assert schedule is not None or "\n" not in refusal


def test_the_tags_are_those_of_the_protocol() -> None:
    assert {msgspec.inspect.type_info(kind).tag for kind in protocol.ToCoordinator.__args__} == set(TAGS)
