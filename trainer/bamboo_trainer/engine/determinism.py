"""The determinism guard on a worker: spot checks of microbatches, and checksums of the states held here.

`StateChecks` sends checksums of states, and the coordinator compares those of all holders. A job without
`training.deterministic` sends none, as its copies need not be equal.

`SpotChecks` compute a cell's microbatch again: in the first step on the cell's owner, later on another worker with the
stage's state, if any, else on the owner. They can detect a layer that depends on the process, on its earlier calls, on
running statistics, or on random numbers that nobody seeds. `bamboo_core.planning.spot_checks` decides when and, after
the first step, which worker. No commit waits for a check's result, and a check that is no longer possible is dropped.

See docs/design/determinism.md.
"""

import logging
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import msgspec

from bamboo_core.control.protocol import MOST_DETAIL, SpotCheckDiffers, StateSums
from bamboo_core.planning.plan import Cell, WorkerId
from bamboo_core.planning.spot_checks import checker
from bamboo_trainer.engine.cell_step import CellStep
from bamboo_trainer.engine.ports import EngineContext
from bamboo_trainer.frames import Address, Frame, FrameKind, SpotSums
from bamboo_trainer.stage.checksums import checksum, checksum_of
from bamboo_trainer.stage.forwarding import Forwarding
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.work import Gradients, Work
from bamboo_trainer.task import Parts
from bamboo_trainer.tasks.inspection import Draws
from bamboo_trainer.tasks.running_buffers import Capture
from bamboo_trainer.tasks.task_errors import NotDeterministic, TaskError, ran_out_of_memory

EVERY: Final = 32  # steps; see docs/benchmarks.md
KEPT: Final = 2  # versions of each stage that are sent again: a connection may lose messages


def is_due(version: int) -> bool:
    """Return whether a version is checked for its number alone: a power of 2, or a multiple of EVERY (0 is one)."""
    return version % EVERY == 0 or version & (version - 1) == 0


class StateChecks:
    """The sender of states' checksums to the coordinator. It keeps the newest ones, to send them again (`report`)."""

    def __init__(self, shared: EngineContext) -> None:
        self._states, self._log, self._coordinator = shared.states, shared.log, shared.coordinator
        self._steps, self._deterministic = shared.ports.steps, shared.ports.deterministic
        self._sent: dict[int, dict[int, StateSums]] = {}
        # Version of the newest checkpoint, which the coordinator commits only if its holders agree on the checksums.
        self._checkpoint = 0

    def take_roles(self) -> None:
        """Forget the checksums of stages that are no longer held here."""
        self._sent = {index: sums for index, sums in self._sent.items() if index in self._states}

    def look(self, index: int) -> None:
        """Send the checksums of a stage's state, if its version is checked and not sent yet. Raises TaskError if a
        constant of the stage has changed.
        """
        held = self._states.here(index)
        if held is None or not self._deterministic or not self._is_due(held.version):
            return
        if held.version not in self._sent.get(index, {}):
            self._tell(index)

    def copied(self, index: int) -> None:
        """Send a stage's checksums again after its state was copied for a checkpoint, if they have changed since they
        were sent. Call it before the copies are given to the checkpoint writer.
        """
        held = self._states.here(index)
        if held is not None and held.version in self._sent.get(index, {}):
            self._tell(index)

    def _tell(self, index: int) -> None:
        held, by_version = self._states[index], self._sent.setdefault(index, {})
        sums = {name: f"{number:016x}" for name, number in held.checksums().items()}
        current = StateSums(stage=index, version=held.version, sums=sums)
        if current == by_version.get(held.version):
            return
        if self._is_of_checkpoint(held.version):
            self._checkpoint = max(self._checkpoint, held.version)
        by_version[held.version] = current
        newest = {*sorted(by_version)[-KEPT:], self._checkpoint}
        self._sent[index] = {version: by_version[version] for version in sorted(newest & by_version.keys())}
        self._coordinator.tell(current)

    def _is_due(self, version: int) -> bool:
        """Return whether this version is checked: `is_due`, the job's last version, or a checkpoint's."""
        due = is_due(version) or version in (self._steps, self._log.end)
        return due or self._is_of_checkpoint(version)

    def _is_of_checkpoint(self, version: int) -> bool:
        commit = self._log.commits.get(version - 1)
        return commit is not None and commit.checkpoint is not None

    def report(self) -> None:
        """Send all kept checksums to the coordinator again."""
        for by_version in self._sent.values():
            for sums in by_version.values():
                self._coordinator.tell(sums)


logger = logging.getLogger(__name__)

CAUSES: Final = (
    "usual causes: random numbers of Python or numpy, or of a generator that is kept (torch's global one is seeded "
    "before each layer), something kept from an earlier call, the time, the order of a set, "
    "a GPU kernel that adds in any order"
)
WARNING: Final = "the check of %s in step %d was left out, since there is not enough memory for it; so are later ones"


class ForwardSums(NamedTuple):
    """Checksums of a forward; see `SpotSums`."""

    data: int
    layers: tuple[int, ...]
    outputs: int


@dataclass(slots=True)
class _CheckedForward:
    """A forward to be checked, run by the owner. taken: the frame of its inputs; None on the first stage."""

    work: Work
    taken: Frame | None
    sums: ForwardSums


class SpotChecks:
    """A worker's part in spot checks: as a cell's owner it provides work to check, as a checker it repeats work."""

    def __init__(self, shared: EngineContext) -> None:
        self._plan, self._outbox, self._states, self._log = shared.plan, shared.outbox, shared.states, shared.log
        ports = shared.ports
        self._coordinator, self._observer, self._schedule = shared.coordinator, ports.observer, ports.spots
        self._made: dict[Cell, _CheckedForward] = {}
        self._asked: dict[Cell, tuple[WorkerId, Frame]] = {}  # the newest of each cell

    # as the owner

    def wants(self, cell_step: CellStep, microbatch: int) -> bool:
        """Return whether to check the forward of this microbatch, which runs next: at most a cell's first in a step."""
        cell, layout, stage = cell_step.cell, cell_step.layout, self._states.stage(cell_step.cell.stage)
        if layout is None or stage is None:
            return False
        if cell_step.is_portion or cell_step.portions or cell_step.takeover:
            return False
        if cell_step.step in self._log.commits or microbatch != layout.split[cell.pipeline][0]:
            return False
        return self.checks(cell_step)

    def checks(self, cell_step: CellStep) -> bool:
        """Return whether the schedule checks this cell in this step: its first microbatch and, when the step is
        applied, the stage's optimizer.
        """
        layout, step = cell_step.layout, cell_step.step
        if self._schedule is None or layout is None:
            return False
        return self._schedule.checks(cell_step.cell, self._plan.stages, layout, step)

    def forward(self, cell_step: CellStep, stage: Stage, microbatch: int, taken: Frame | None) -> Parts:
        """Run a forward to be checked, with the bits of `Stage.forward`. taken: its inputs' frame; None on stage 0."""
        assert cell_step.work is not None
        place = (cell_step.step, microbatch)
        outputs, sums = forward_by_layer(stage, cell_step.work, place, taken.inputs if taken else None)
        self._made[cell_step.cell] = _CheckedForward(cell_step.work, taken, sums)
        return outputs

    def is_made(self, cell_step: CellStep, microbatch: int) -> bool:
        """Return whether this microbatch's backward belongs to a checked forward; if so, it must postpone nothing."""
        made, layout = self._made.get(cell_step.cell), cell_step.layout
        if made is None or layout is None or made.work is not cell_step.work:
            return False
        return microbatch == layout.split[cell_step.cell.pipeline][0]

    def backward(self, cell_step: CellStep, microbatch: int, given: Frame | None, inputs: Gradients) -> None:
        """Pass a microbatch's work on to its checker, unless other gradients have been added to its own.
        given: the frame that the backward took, if any. inputs: the gradients of the stage's inputs that it returned.
        """
        made, cell = self._made.pop(cell_step.cell), cell_step.cell
        alone = made.work.gradients.alone
        if alone is None:
            return
        sums = SpotSums(
            **made.sums._asdict(),
            inputs=len(made.taken.tensors) if made.taken else 0,
            taken=made.taken.payload if made.taken else None,
            given=given.payload if given else None,
            gradients=checksum_of(inputs),
            parameters=checksum(alone),
        )
        address = Address(FrameKind.SPOT_CHECK, *cell, cell_step.step, microbatch)
        tensors = tuple(tensor for one in (made.taken, given) if one for tensor in one.tensors)
        worker = checker(self._plan.current, cell) if cell_step.step > 0 else self._plan.worker
        if worker == self._plan.worker:
            self._asked[cell] = (worker, self._outbox.frame(address, tensors, sums))
        else:
            self._outbox.post(worker, address, tensors, sums)

    # as the checker

    def asked(self, sender: WorkerId, frame: Frame) -> None:
        """Keep a check from a cell's owner for `turn`, unless its step is committed or this worker runs no checks."""
        if self._schedule is not None and frame.address.step > self._log.newest:
            self._asked[frame.address.cell] = (sender, frame)

    def committed(self, step: int) -> None:
        """After a step's commit, drop checked forwards, checks of earlier steps, and checks of stages that have no
        state here, or already a later one.
        """
        self._made = {}
        for cell, (_, frame) in list(self._asked.items()):
            stage = self._stage(cell)
            if frame.address.step < step or stage is None or stage.values.version > frame.address.step:
                del self._asked[cell]

    def asked_of(self) -> list[Cell]:
        """Return the cells whose spot check waits to be run by this worker."""
        return list(self._asked)

    def turn(self, cells: Container[Cell]) -> bool:
        """Run a waiting check of one of these cells; return False if none can run now. Raises TaskError."""
        for cell, (owner, frame) in self._asked.items():
            stage = self._stage(cell)
            if stage is not None and stage.values.version == frame.address.step and cell in cells:
                del self._asked[cell]
                self._check(stage, owner, frame)
                return True
        return False

    def turn_at_last(self) -> bool:
        """Run a waiting check of a committed step, before the state changes; return False if none can run."""
        if not self._asked:
            return False
        return self.turn({cell for cell, (_, frame) in self._asked.items() if frame.address.step in self._log.commits})

    def _stage(self, cell: Cell) -> Stage | None:
        return self._states.stage(cell.stage)

    def _check(self, stage: Stage, owner: WorkerId, frame: Frame) -> None:
        place = (frame.address.cell, frame.address.step, frame.address.microbatch)
        self._observer.started("SpotCheck", *place)
        try:
            self._compare(stage, owner, frame)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            logger.warning(WARNING, place[0], place[1] + 1)
            self._schedule, self._asked = None, {}
        self._observer.finished("SpotCheck", *place)

    def _compare(self, stage: Stage, owner: WorkerId, frame: Frame) -> None:
        theirs, worker = frame.payload, self._plan.worker
        cell, step, microbatch = frame.address.cell, frame.address.step, frame.address.microbatch
        draws = stage.draws() if step == 0 else None
        anew = compute_anew(stage, frame, draws)
        mine = compute_again(stage, frame, draws) if draws is not None or anew != theirs else theirs
        for layer, drawn in (draws or {}).items():
            if source := drawn.each_time():
                raise NotDeterministic(
                    f"{stage.named_layer(layer)} is not deterministic: it draws from {source}; use torch's global "
                    "generator, which is seeded before each layer"
                )
        if anew == theirs == mine:
            return
        again = compute_again(stage, frame)
        what = differing(stage, theirs, anew if mine == theirs and anew is not None else mine)
        place = f"in step {step + 1}, microbatch {microbatch} of stage {cell.stage} of pipeline {cell.pipeline}"
        if anew is not None and theirs == mine == again:
            raise NotDeterministic(f"{what} is not deterministic: {place}, other bits come out {_when_anew(stage)}")
        if again == theirs:  # this worker was wrong once, and nothing has used it
            text = "%s %s came to other bits here than on %s, and to the same ones when repeated"
            logger.warning(text, what, place, owner)
            return
        whose = f"{owner} came to" if owner != worker else "it came to at first"
        if again != mine:
            raise NotDeterministic(
                f"{what} is not deterministic: {place}, {worker} came to other bits than {whose}, and to others "
                f"whenever it repeated it; {CAUSES}"
            )
        other = f"{worker} came to other bits than {whose}, and to the same when it repeated it"
        self._coordinator.tell(SpotCheckDiffers(cell=cell, step=step, message=f"{what} {place}: {other}"[:MOST_DETAIL]))


def _changed(stage: Stage) -> str:
    """Return the names of up to three attributes of layers that have changed since they were built; "" if none."""
    return " and ".join(stage.as_built.changed()[:3]) if stage.as_built else ""


def _when_anew(stage: Stage) -> str:
    if changed := _changed(stage):
        return f"when {changed} is as it was built, as on a worker that takes over"
    return (
        "with other running statistics: a module that is derived from BatchNorm or InstanceNorm has to update them as "
        "these do, with its momentum, and must not read them in training"
    )


def forward_by_layer(
    stage: Stage,
    work: Work,
    place: tuple[int, int],
    inputs: Parts | None,
    capture: Capture | None = None,
    draws: Mapping[int, Draws] | None = None,
) -> tuple[Parts, ForwardSums]:
    """Run a forward layer by layer, and return its outputs and checksums. place: step and microbatch. capture: replaces
    the forward's own, for other running statistics. draws: record each layer's use of random number generators.
    """
    layers = list[int]()

    def run() -> Forwarding:
        forwarding = stage.start(*place, inputs)
        forwarding.capture = capture or forwarding.capture
        forwarding.draws = draws or {}
        while not forwarding.done:
            stage.advance(forwarding)
            layers.append(checksum_of(forwarding.parts))
        return forwarding

    forwarding = stage.checked(run)
    outputs = stage.complete(work, forwarding)
    data = (*(() if inputs is not None else forwarding.leaves), *(forwarding.targets or ()))
    m = place[1]
    passed = (*outputs, *(work.unread[m].values if m in work.unread else ()))
    return outputs, ForwardSums(checksum_of(data), tuple(layers), checksum_of(passed))


def compute_anew(stage: Stage, frame: Frame, draws: Mapping[int, Draws] | None = None) -> SpotSums | None:
    """Return the results of `compute_again` with the layers' attributes as built (`Stage.as_built`, if any) and, with
    `draws`, also with other running statistics. None if the layers fail with these attributes, as they may rely on
    other things that they keep. Raises NotDeterministic if a layer then writes to its parameters.
    """
    capture, changed = Capture() if draws is None else Capture(fill=0.0, count=1 << 30, momentum=0.5), _changed(stage)
    if stage.as_built is None or not changed:
        return compute_again(stage, frame, draws, capture)
    before = stage.values.checksums()
    try:
        with stage.as_built.lent():
            found = compute_again(stage, frame, draws, capture)
    except TaskError as error:
        logger.info("layers cannot be run with %s as built: %s", changed, error)
        found = None
    if stage.values.checksums() != before:
        raise NotDeterministic(
            f"a layer writes to its parameters in a forward when {changed} is as it was built, as on a worker that "
            "takes over"
        )
    return found


def compute_again(
    stage: Stage, frame: Frame, draws: Mapping[int, Draws] | None = None, capture: Capture | None = None
) -> SpotSums:
    """Repeat the frame's forward and backward here; return the checksums. draws, capture: see `forward_by_layer`."""
    theirs: SpotSums = frame.payload
    step, microbatch, count = frame.address.step, frame.address.microbatch, theirs.inputs
    work = stage.begin([microbatch], [microbatch, microbatch + 1])
    taken = replace(frame, tensors=frame.tensors[:count], payload=theirs.taken)
    given = replace(frame, tensors=frame.tensors[count:], payload=theirs.given)
    inputs = taken.inputs if stage.values.first else None
    _, sums = forward_by_layer(stage, work, (step, microbatch), inputs, capture, draws)
    gradients = stage.backward(work, step, microbatch, work.received(None if stage.values.last else given))
    alone = work.gradients.alone
    assert alone is not None
    mine = sums._asdict() | {"gradients": checksum_of(gradients), "parameters": checksum(alone)}
    return msgspec.structs.replace(theirs, **mine)


def differing(stage: Stage, one: SpotSums, other: SpotSums) -> str:
    """Describe the first result in which the sums of two unequal checks differ. stage: the checked stage."""
    layers = range(stage.values.first, stage.values.end)
    whole = f"layers {layers[0]} to {layers[-1]}"
    if one.data != other.data:
        return "the dataset's batch"
    for layer, first, second in zip(layers, one.layers, other.layers, strict=False):
        if first != second:
            loss = ", or the loss of it," if stage.values.last and layer == layers[-1] else ""
            return f"the output of {stage.named_layer(layer)}{loss}"
    if one.outputs != other.outputs:
        return f"what {whole} pass on, or add to the loss,"
    if one.gradients != other.gradients:
        return f"the gradient of the inputs of {whole}"
    return f"the gradient of the parameters, or running statistics, of {whole}"
