"""Copies of layers in memory: made, held and given up; and re-splits with the same bits after workers are lost."""

import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import pytest
import torch
from torch import nn

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.control.protocol import CopiesHeld, WorkerWarning
from bamboo_core.planning.plan import Peer, Plan
from bamboo_trainer.engine.layer_copies import LayerCopies, LayerExchange
from bamboo_trainer.frames import (
    NO_CELL,
    Address,
    CheckpointMark,
    CommonState,
    Frame,
    FrameKind,
    LayerPayload,
    LayersWanted,
)
from bamboo_trainer.memory.limits import HostMemory
from bamboo_trainer.stage.layer_state import LayerState
from bamboo_trainer.stage.stage import Stage
from branching_job import BranchingJob, Kind, each_way, of_name, sweep
from manifest_kit import bamboojob, gpt_task, mlp_task, training
from recording_transport import RecordingTransport, Told
from replica_kit import copies
from stage_kit import small_task
from training_job import Fault, Job, MemoryStore

ONE, TWO, THREE = (CheckpointId(step=step, id="a") for step in (2, 4, 6))


def states(step: int, *layers: int) -> dict[int, LayerState]:
    return {
        layer: LayerState(layer=layer, version=step, tensors={"x": torch.full((3,), 1.0)}, scalars={}, names={})
        for layer in layers
    }


def plan(**changes: Any) -> Plan:
    usual = {"epoch": 1, "origin": 1, "stages": ((0, 2),), "pipelines": (), "layouts": (), "workers": ()}
    return Plan(**(usual | changes))


class Files:
    """A fake checkpoint writer that records the copies it gets.

    written: step, layers, and the seconds for which training has waited.
    """

    def __init__(self) -> None:
        self.written: list[tuple[int, list[int], float]] = []

    def keep(self, checkpoint: CheckpointId, states: Mapping[int, LayerState], seconds: float) -> None:
        self.written.append((checkpoint.step, sorted(states), seconds))

    def restore(self, *_: object) -> NoReturn:
        raise AssertionError("nothing is read")


def made(memory: Callable[[], HostMemory | None] = lambda: None) -> tuple[LayerCopies, Told]:
    said = Told()
    return LayerCopies("w", Files(), said, lambda: 0.0, memory), said


ATTEMPTS = tuple(CheckpointId(step=6, id=name) for name in ("f", "c", "a"))


@pytest.mark.parametrize("checkpoints", [(ONE, TWO, THREE), ATTEMPTS])
def test_of_checkpoints_at_most_two_are_held(checkpoints: tuple[CheckpointId, ...]) -> None:
    """A worker holds copies of at most two checkpoints, however many begin before it hears which were given up."""
    copies, said = made()
    last = checkpoints[-1]
    for one in checkpoints:
        copies.keep(one, states(one.step, 0))
        copies.keep(one, states(one.step, 3))
    assert (copies.of(last).keys(), sum(bool(copies.of(one)) for one in checkpoints)) == ({0, 3}, 2)
    assert said[-1] == CopiesHeld(checkpoint=last, layers=(0, 3))
    copies.drop([one for one in checkpoints if one != last])
    said.clear()
    copies.report()
    assert said == [CopiesHeld(checkpoint=last, layers=(0, 3))]


def test_copies_for_which_the_container_has_no_memory_are_not_kept_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A worker keeps copies, here of 12 bytes, only if memory also suffices for the next checkpoint's copies."""
    memory = [HostMemory(limit=100, used=70)]
    copies, said = made(lambda: memory[0])
    copies.keep(ONE, states(2, 0))
    assert copies.of(ONE).keys() == {0}
    memory = [HostMemory(limit=100, used=90)]
    copies.keep(TWO, states(4, 0))
    assert copies.of(TWO).keys() == {0}, "the copies of the one before are given up by then"
    memory = [HostMemory(limit=100, used=91)]
    for one in (THREE, THREE):
        copies.keep(one, states(6, 0, 1))
    assert copies.of(THREE) == {}
    (warning,) = [message for message in said if isinstance(message, WorkerWarning)]
    assert warning.reason == "CopiesNotKept"
    assert (
        "copies of 24 B of the checkpoint of step 6 are not kept in memory: 91 B of 100 B are used" in warning.message
    )
    assert [record.message for record in caplog.records] == [warning.message]
    assert CopiesHeld(checkpoint=THREE, layers=(0, 1)) not in said


def test_only_who_was_asked_can_say_that_it_has_nothing_and_only_of_what_is_wanted() -> None:
    copies, _ = made()
    sent = RecordingTransport()
    exchange = LayerExchange("w", sent, copies)
    peers = tuple({"worker": w, "host": "h", "port": 1} for w in ("a", "b", "w"))
    workers = msgspec.convert(peers, tuple[Peer, ...])
    back = plan(epoch=5, origin=5, restore=ONE, stages=((0, 3),), workers=workers, sources=(("a",), ("b",), ()))
    exchange.gather(back, (0, 1, 2))
    assert exchange.asked() == ["a", "b"], "what nobody has is not asked for"

    def lacks(sender: str, checkpoint: CheckpointId, *layers: int) -> None:
        payload = LayersWanted(checkpoint=checkpoint, layers=layers)
        exchange.take(sender, Frame(address=Address(FrameKind.LAYERS_LACKED, 0, 0, 2), epoch=0, payload=payload))

    lacks("b", ONE, 0)
    lacks("a", TWO, 0)
    assert exchange.asked() == ["a", "b"]
    lacks("a", ONE, 0)
    assert exchange.asked() == ["b"]
    held = LayerPayload(checkpoint=ONE, tensors=("x",), scalars={}, names={}, common=CommonState())
    frame = Frame(
        address=Address(FrameKind.LAYER, NO_CELL, NO_CELL, 2, part=1), epoch=0, tensors=(torch.ones(1),), payload=held
    )
    exchange.take("a", frame)
    assert exchange.missing
    exchange.take("b", frame)
    assert not exchange.missing
    assert set(copies.of(ONE)) == {1}


# made while the worker waits for others

PIECE_SECONDS = 0.5


class Values:
    """The values of a stage in pieces, each of which takes PIECE_SECONDS to copy."""

    def __init__(self, clock: list[float], version: int) -> None:
        self.clock, self.version = clock, version

    def late_copies(self, layers: Collection[int]) -> Any:
        left = [(layer, piece) for layer in sorted(layers) for piece in range(2)]

        def copy_piece() -> None:
            left.pop()
            self.clock[0] += PIECE_SECONDS
            copying.done = not left

        copying = SimpleNamespace(layers=dict.fromkeys(layers, self.version), done=not left, copy_piece=copy_piece)
        return copying


class Writer:
    """A worker that writes stage 0 (two layers) and half of stage 1 (four layers) to a checkpoint."""

    def __init__(self, version: int = 3) -> None:
        self.clock, self.files = [0.0], Files()
        self.copies = LayerCopies("w", self.files, Told(), lambda: self.clock[0])
        self.values: Any = Values(self.clock, version)
        self.mark = CheckpointMark(number=1, id="a", writers=(("w",), ("w", "x")))
        self.plan = plan(stages=((0, 2), (2, 6)))

    def reached(self, stage: int) -> None:
        self.copies.reached(stage, self.values, self.mark, self.plan)
        self.copies.hand_over()

    def advance(self) -> bool:
        copied = self.copies.advance()
        self.copies.hand_over()
        return copied

    def finish(self, stage: int) -> None:
        self.copies.finish(stage)
        self.copies.hand_over()


def test_what_is_copied_while_the_worker_waits_costs_no_time_of_the_training() -> None:
    writer = Writer()
    for stage in (0, 1):
        writer.reached(stage)
    assert not writer.files.written
    while writer.advance():
        pass
    assert writer.files.written == [(3, [0, 1], 0.0), (3, [2, 4], 0.0)]
    assert not writer.advance()


def test_what_is_left_when_the_state_is_about_to_change_is_copied_then() -> None:
    writer = Writer()
    for stage in (0, 1):
        writer.reached(stage)
    writer.advance()
    writer.finish(0)
    assert writer.files.written == [(3, [0, 1], 3 * PIECE_SECONDS)]
    writer.finish(0)
    writer.finish(7)
    assert writer.clock == [4 * PIECE_SECONDS]
    writer.reached(1)
    assert writer.files.written[1] == (3, [2, 4], 4 * PIECE_SECONDS), "what was begun is complete before the next one"


def test_copies_of_states_that_are_given_up_are_not_written() -> None:
    writer = Writer()
    writer.reached(0)
    writer.copies.forget_states()
    assert not writer.advance()
    assert not writer.files.written


def test_complete_copies_wait_until_they_are_handed_over() -> None:
    """Complete copies wait for `hand_over`, while the worker compares the state with the checksums it has sent."""
    writer = Writer()
    writer.reached(0)
    writer.copies.finish(0)
    assert (writer.copies.complete(), writer.files.written) == ([0], [])
    writer.copies.hand_over()
    assert (writer.copies.complete(), len(writer.files.written)) == ([], 1)


STAGES, STEPS = 4, 24
LATE = 18  # a step before the last few, in which no step begins anew
LAYER_SECONDS = 0.1  # the time of each layer that workers report
MLP = mlp_task(blocks=6)


def manifest(task: dict[str, Any], every: int | None = None, **elastic: int) -> dict[str, Any]:
    document = bamboojob(
        task=task,
        training=training(STEPS, 4, 2, gradientGroups=2),
        topology={"pipelines": 1},
        elastic={"maxWorkers": STAGES, "stabilizationSeconds": 1, **elastic},
    )
    if every:
        document["spec"]["checkpoint"] = {"storage": "memory://x", "everySteps": every}
    return document


def _job(document: dict[str, Any], **more: Any) -> Job:
    return Job(document, layer_seconds=LAYER_SECONDS, **more)


@cache
def undisturbed(tied: bool = False) -> tuple[str, dict[int, float]]:
    return result(_job(manifest(gpt(tied) if tied else MLP)).run())


def gpt(tied: bool) -> dict[str, Any]:
    return gpt_task(dModel=16, blocks=6, context=8, tieEmbeddings=tied)


def result(job: Job) -> tuple[str, dict[int, float]]:
    return job.bits, dict(job.state.progress.losses)


def alive(job: Job) -> int:
    return sum(node.alive for node in job.nodes.values())


@dataclass
class Shortage:
    """A hook that kills a worker at step `lost_at`, and lets no new one start until step `over_at`; None: for ever.

    turns: the number of calls since the re-split began.
    """

    lost_at: int = 12
    over_at: int | None = None
    stages: list[int] = field(default_factory=list)
    turns: int = -1
    _lost: bool = False
    _step: int = 0

    def __call__(self, job: Job) -> None:
        state, plan = job.state, job.state.plan
        if plan is None:
            return
        if not self.stages or self.stages[-1] != len(plan.stages):
            self.stages.append(len(plan.stages))
        if state.stragglers.estimate is None and state.step > self._step:
            self._step, job.now = state.step, job.now + 1.0  # until it is measured what layers take
        if not self._lost and state.step >= self.lost_at:
            self._lost, job.capacity = True, alive(job) - 1
            job.kill(plan.pipelines[-1][1].owner)
        if self.over_at is not None and state.step >= self.over_at:
            job.capacity = 1000
        calm = state.grids.resize and all(copies(plan, state.plans.synced, c) > 0 for c in plan.cells())
        if calm and not state.splits.resplit and not plan.sources:
            job.now += 1.0  # the workers have been too few for long enough
        if state.splits.resplit is not None or self.turns >= 0:
            self.turns += 1


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_fewer_workers_than_stages_train_on_with_fewer_stages_and_the_same_bits(tied: bool) -> None:
    shortage = Shortage(over_at=18)
    job = _job(manifest(gpt(tied) if tied else MLP), decide=shortage).run()
    assert shortage.stages == [4, 3, 4]
    assert result(job) == undisturbed(tied)
    assert job.state.checkpoints.counts.repeated == 0
    forwards = [fault for fault in job.executed if fault.name == "Forward" and not fault.after]
    assert {f.step for f in forwards} == set(range(STEPS))


@pytest.mark.parametrize("strike", [3, 8])
def test_when_all_are_lost_meanwhile_the_job_goes_back_to_its_checkpoint(strike: int) -> None:
    shortage = Shortage()

    def decide(job: Job) -> None:
        shortage(job)
        if shortage.turns == strike and not struck:
            struck.append(True)
            for worker in list(job.nodes):
                job.kill(worker)
            job.capacity = 3  # and so many are left: it goes on with three stages

    struck: list[bool] = []
    job = _job(manifest(MLP, every=2), decide=decide, store=MemoryStore()).run()
    assert struck
    digest, losses = result(job)
    assert (digest, losses) == undisturbed()
    assert job.state.checkpoints.counts.restores
    assert len(job.plan.stages) == 3


def test_the_stages_before_are_gone_when_the_new_ones_are_built() -> None:
    """A re-split frees the old stages before it builds new ones, since memory may not suffice for both."""
    shortage = Shortage()
    before: dict[str, list[weakref.ref[Stage]]] = {}
    looked: list[str] = []

    def decide(job: Job) -> None:
        shortage(job)
        for node in job.nodes.values():
            if node.alive and node.engine.components:
                states = node.engine.components.states.by_stage.values()
                before[node.name] = [weakref.ref(state.stage) for state in states if state.stage]
            elif node.alive and node.engine.reported_plan and node.name in before:
                looked.append(node.name)
                assert [ref() for ref in before[node.name]] == [None] * len(before[node.name])

    job = _job(manifest(MLP), decide=decide).run()
    assert looked
    assert result(job) == undisturbed()


def test_a_state_that_only_the_state_dict_shows_is_not_sent() -> None:
    """Extra state in a state dict is not sent: it need not be a tensor, and nothing is restored from it."""

    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 1}

        def set_extra_state(self, state: object) -> None:
            pass

    task = small_task(layers=[partial(Extra, 2, 2)] * 6)
    job = _job(manifest({"entrypoint": "given:build"}), task=task, decide=Shortage()).run()
    assert len(job.plan.stages) == 3


ANEW = "begins again there"


def slow_steps(job: Job, fault: Fault) -> None:
    """Let two layers' time pass on the job's clock when a worker reports a step, and none at other instructions."""
    if fault.name == "ReportReady" and not fault.after:
        job.now += LAYER_SECONDS * 2


def begun_anew(job: Job) -> int:
    """Check that a job has the bits of an undisturbed one. Return how often a step began anew."""
    assert result(job) == undisturbed()
    return sum(ANEW in event.message for event in job.emitted)


@sweep(of_name)
def test_a_step_in_which_a_worker_is_lost_begins_anew_with_the_same_bits(kind: Kind | None) -> None:
    class Killed(BranchingJob):
        def strikes(self, fault: Fault) -> bool:
            slow_steps(self, fault)
            if fault.step != LATE or not self.branch(fault, kind and kind(fault)):
                return False
            self.capacity = alive(self) - 1
            return True

    def make() -> Killed:
        return Killed(manifest(MLP), layer_seconds=LAYER_SECONDS, decide=Shortage(lost_at=STEPS))

    answers = each_way(make, begun_anew)
    assert set(answers.values()) <= {0, 1}, "once at most"
    assert sum(answers.values()) > len(answers) / 2
