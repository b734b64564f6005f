"""Sums of what a cell comes to: its owner tells them to the shadow, which compares them with those of what it has
computed in advance. See docs/design/verify.md.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from bamboo_core.control.verification import ForwardDiffers, ForwardPlace, ForwardSum, Result
from bamboo_core.job.spec import RedundancyMode
from bamboo_core.planning.plan import Cell, WorkerId
from bamboo_trainer.commit.coordinator import Coordinator
from bamboo_trainer.frames.frame import Address, FrameKind
from bamboo_trainer.frames.payloads import SumsOfForwards
from bamboo_trainer.routing.outbox import Outbox
from bamboo_trainer.routing.plan_state import PlanState
from bamboo_trainer.stage.checksums import checksum_of, in_hexadecimal
from bamboo_trainer.stage.work import Work
from bamboo_trainer.task import Parts

Step = tuple[Cell, int]
Key = tuple[Result, int]  # what of, and of which microbatch; of a gradient, which is of all, 0


def forward_sums(outputs: Parts, work: Work, microbatch: int) -> dict[Key, int]:
    """The checksum of what a forward returns; a last stage returns nothing, and its checksum is of what its last layer
    gave, and of the loss.
    What its last layer gave is used up. Empty if the work was not watched when it was run, so that it is not there.
    """
    if outputs:
        return {(Result.FORWARD, microbatch): checksum_of(outputs)}
    if microbatch not in work.answers:
        return {}
    work.read(work.figures())
    values = (work.losses.get(microbatch), work.weights.get(microbatch))
    return {(Result.FORWARD, microbatch): checksum_of(work.answers.pop(microbatch), values)}


def backward_sums(inputs: Parts, work: Work, microbatch: int) -> dict[Key, int]:
    """The checksums of a backward: of what the loss has sent back, on a last stage, and of the inputs' gradients."""
    sums = sent_back_sums(work, microbatch)
    if inputs:
        sums[Result.BACKWARD, microbatch] = checksum_of(inputs)
    return sums


def sent_back_sums(work: Work, microbatch: int) -> dict[Key, int]:
    """The checksum of what the loss has sent back to the last layer, which is used up; empty if nothing has come by."""
    sent_back = work.sent_back.pop(microbatch, {})
    return {(Result.LOSS_GRADIENT, microbatch): checksum_of((), sorted(sent_back.items()))} if sent_back else {}


def gradient_sums(work: Work) -> dict[Key, int]:
    """The checksum of the sum of all gradients of a cell's microbatches."""
    return {(Result.GRADIENT, 0): checksum_of(total for _, total in work.gradients.nodes())}


class Difference(NamedTuple):
    place: ForwardPlace
    owner: WorkerId
    theirs: int
    mine: int


@dataclass(slots=True)
class _Compared:
    """The checksums of one step of a cell that is shadowed here: computed here, and told by the owner."""

    mine: dict[Key, int] = field(default_factory=dict)
    told: dict[Key, int] = field(default_factory=dict)
    owner: WorkerId = ""
    done: set[Key] = field(default_factory=set)


class ForwardSums:
    """made: by the owner; compared: as a shadow, by cell and step. count: forwards that were compared so far.

    taken: the inputs of the owner's forwards, by microbatch, as they have arrived: those are computed again with what
    they were computed with, in case that the shadow has others.
    """

    def __init__(
        self,
        plan: PlanState,
        outbox: Outbox,
        coordinator: Coordinator,
        *,
        verifies: bool,
    ) -> None:
        self._plan, self._outbox, self._coordinator, self._verifies = plan, outbox, coordinator, verifies
        self._questions: tuple[ForwardPlace, ...] = ()
        self._made: dict[Step, dict[Key, int]] = {}
        self._taken: dict[Step, dict[int, Parts | None]] = {}
        self._compared: dict[Step, _Compared] = {}
        self.count = 0

    def ask(self, questions: tuple[ForwardPlace, ...]) -> None:
        """The forwards of which the coordinator wants to know what they come to, and no earlier ones."""
        self._questions = questions

    @property
    def active(self) -> bool:
        return self._verifies and not self._plan.current.mixed

    @property
    def wanted(self) -> bool:
        """May somebody want to know what a cell comes to?"""
        return self._verifies or bool(self._questions)

    @property
    def follows_backwards(self) -> bool:
        """Do shadows compute whole backwards, so that these can be compared?"""
        return self._plan.current.mode is RedundancyMode.EAGER_BACKWARD

    def asked(self, cell: Cell, step: int) -> set[Key]:
        """What of that step the coordinator wants to know."""
        return {
            (place.result, place.microbatch) for place in self._questions if (place.cell, place.step) == (cell, step)
        }

    # as the owner

    def took(self, cell: Cell, step: int, microbatch: int, inputs: Parts | None) -> None:
        """A forward is about to be run, with these inputs."""
        if self._has_shadow(cell):
            self._taken.setdefault((cell, step), {})[microbatch] = inputs

    def has_taken(self, cell: Cell, step: int, microbatch: int) -> bool:
        return microbatch in self._taken.get((cell, step), {})

    def taken(self, cell: Cell, step: int, microbatch: int) -> Parts | None:
        return self._taken[cell, step][microbatch]

    def ran(self, cell: Cell, step: int, microbatch: int, outputs: Parts, work: Work) -> None:
        """A forward of a cell that is run here is done, computed now or in advance."""
        if self._is_summed(cell, step):
            self._make(cell, step, forward_sums(outputs, work, microbatch))

    def ran_backward(self, cell: Cell, step: int, microbatch: int, inputs: Parts, work: Work) -> None:
        """So is a backward. inputs: the gradients of the cell's inputs."""
        if self._is_summed(cell, step):
            compared = self.follows_backwards or self.asked(cell, step)
            self._make(cell, step, backward_sums(inputs if compared else (), work, microbatch))

    def ran_backwards(self, cell: Cell, step: int, work: Work) -> None:
        """So is all that its gradient is summed from."""
        if self._is_summed(cell, step) and (self.follows_backwards or self.asked(cell, step)):
            self._make(cell, step, gradient_sums(work))

    def tell_shadow(self, cell: Cell, step: int) -> None:
        """What was made since the last time: of all forwards of a step, then of what followed from them."""
        made, shadow = self._made.pop((cell, step), {}), self._plan.current.at(cell).shadow
        if shadow is None or not self._has_shadow(cell) or not self.active:
            return
        for result in Result:
            sums = {m: found for (of, m), found in made.items() if of is result}
            if sums:
                payload = SumsOfForwards(by_microbatch=sums, of=result)
                self._outbox.send(
                    shadow, self._outbox.frame(Address(FrameKind.FORWARD_SUMS, *cell, step), payload=payload)
                )

    def _is_summed(self, cell: Cell, step: int) -> bool:
        return (self.active and self._has_shadow(cell)) or bool(self.asked(cell, step))

    def _has_shadow(self, cell: Cell) -> bool:
        plan = self._plan.current
        return plan.mode is not RedundancyMode.NONE and plan.at(cell).shadow not in (None, self._plan.worker)

    def _make(self, cell: Cell, step: int, sums: dict[Key, int]) -> None:
        self._made.setdefault((cell, step), {}).update(sums)
        self._answer(cell, step, sums)

    # as the shadow

    def computed(self, cell: Cell, step: int, sums: dict[Key, int]) -> list[Difference]:
        """Something of a cell that is shadowed here has been computed in advance. Returns where it differs from the
        owner's.
        """
        self._answer(cell, step, sums)
        if not self.active:
            return []
        compared = self._compared.setdefault((cell, step), _Compared())
        compared.mine.update(sums)
        return self._compare(cell, step, compared)

    def told(self, owner: WorkerId, cell: Cell, step: int, sums: SumsOfForwards) -> list[Difference]:
        """The owner tells what it came to; what that shows. After a takeover another one may tell anew."""
        if not self.active:
            return []
        compared = self._compared.setdefault((cell, step), _Compared())
        compared.told.update({(sums.of, m): found for m, found in sums.by_microbatch.items()})
        compared.owner = owner
        return self._compare(cell, step, compared)

    def _compare(self, cell: Cell, step: int, compared: _Compared) -> list[Difference]:
        new = (compared.mine.keys() & compared.told.keys()) - compared.done
        compared.done |= new
        self.count += sum(result is Result.FORWARD for result, _ in new)
        return [
            Difference(
                ForwardPlace(cell, step, m, result=result),
                compared.owner,
                compared.told[result, m],
                compared.mine[result, m],
            )
            for result, m in sorted(new, key=lambda key: (list(Result).index(key[0]), key[1]))
            if compared.told[result, m] != compared.mine[result, m]
        ]

    def report(self, found: Difference, again: int | None) -> None:
        """Tell the coordinator, and have the owner compute it again, unless it is this worker that is wrong.

        again: what it came to here a second time; None if it cannot be repeated.
        """
        self._coordinator.tell(
            ForwardDiffers(
                place=found.place,
                owner=found.owner,
                theirs=in_hexadecimal(found.theirs),
                mine=in_hexadecimal(found.mine),
                again=None if again is None else in_hexadecimal(again),
            )
        )
        place = found.place
        if again in (None, found.mine) and place.result in (Result.FORWARD, Result.LOSS_GRADIENT):
            address = Address(FrameKind.COMPUTE_AGAIN, *place.cell, place.step, place.microbatch)
            self._outbox.send(found.owner, self._outbox.frame(address, payload=place.result))

    def say(self, place: ForwardPlace, found: int) -> None:
        """What it came to when it was computed again."""
        self._coordinator.tell(ForwardSum(place=place, sum=in_hexadecimal(found)))

    def _answer(self, cell: Cell, step: int, sums: dict[Key, int]) -> None:
        for result, m in self.asked(cell, step) & sums.keys():
            self.say(ForwardPlace(cell, step, m, result=result), sums[result, m])

    # what happens elsewhere

    def committed(self, step: int) -> None:
        """What is told of the step before may still be on its way."""
        for table in (self._made, self._compared):
            for key in [key for key in table if key[1] < step]:
                del table[key]
        self._taken = {key: inputs for key, inputs in self._taken.items() if key[1] > step}
