"""Sums of what forwards return: the owner of a cell tells its own to the shadow, which compares them with those of the
forwards that it has computed in advance. See docs/design/verify.md.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from bamboo.control.protocol import Message
from bamboo.control.verification import ForwardDiffers, ForwardPlace, ForwardSum
from bamboo.job.spec import RedundancyMode
from bamboo.planning.plan import Cell, WorkerId
from bamboo_trainer.routing.outbox import Outbox
from bamboo_trainer.routing.plan_state import PlanState
from bamboo_trainer.stage.checksums import checksum_of, in_hexadecimal
from bamboo_trainer.stage.work import Work
from bamboo_trainer.task import Parts
from bamboo_trainer.transport.frames import Address, FrameKind
from bamboo_trainer.transport.payloads import SumsOfForwards

Step = tuple[Cell, int]
EAGER = (RedundancyMode.EAGER_FORWARD, RedundancyMode.EAGER_BACKWARD)


def forward_sum(outputs: Parts, work: Work, microbatch: int) -> int:
    """Of what a forward returns; of a last stage, which returns nothing, of its loss."""
    if not outputs:
        work.read(work.figures())
    values = () if outputs else (work.losses.get(microbatch), work.weights.get(microbatch))
    return checksum_of(outputs, values)


class Difference(NamedTuple):
    place: ForwardPlace
    owner: WorkerId
    theirs: int
    mine: int


@dataclass(slots=True)
class _Compared:
    """Of one step of a cell that is shadowed here: by microbatch. told: by the owner."""

    mine: dict[int, int] = field(default_factory=dict)
    told: dict[int, int] = field(default_factory=dict)
    owner: WorkerId = ""
    done: set[int] = field(default_factory=set)


class ForwardSums:
    """made: by the owner; compared: as a shadow, by cell and step. count: forwards that were compared so far."""

    def __init__(
        self,
        plan: PlanState,
        outbox: Outbox,
        tell: Callable[[Message], None],
        questions: Collection[ForwardPlace],
        *,
        verifies: bool,
    ) -> None:
        """questions: forwards of which the coordinator wants to know what they come to; they change."""
        self._plan, self._outbox, self._tell, self._questions = plan, outbox, tell, questions
        self._verifies = verifies
        self._made: dict[Step, dict[int, int]] = {}
        self._compared: dict[Step, _Compared] = {}
        self.count = 0

    @property
    def active(self) -> bool:
        return self._verifies and not self._plan.current.mixed

    @property
    def wanted(self) -> bool:
        """May somebody want to know what a forward comes to?"""
        return self._verifies or bool(self._questions)

    def is_asked(self, cell: Cell, step: int, microbatch: int) -> bool:
        return bool(self._questions) and ForwardPlace(cell, step, microbatch) in self._questions

    # as the owner

    def ran(self, cell: Cell, step: int, microbatch: int, outputs: Parts, work: Work) -> None:
        """A forward of a cell that is run here is done, computed now or in advance."""
        asked = self.is_asked(cell, step, microbatch)
        if not asked and not (self.active and self._has_shadow(cell)):
            return
        made = self._made.setdefault((cell, step), {})
        made[microbatch] = forward_sum(outputs, work, microbatch)
        if asked:
            self._answer(cell, step, microbatch, made[microbatch])

    def ran_all(self, cell: Cell, step: int) -> None:
        """So are all forwards of its step."""
        made, shadow = self._made.pop((cell, step), None), self._plan.current.at(cell).shadow
        if made and shadow is not None and self._has_shadow(cell) and self.active:
            address = Address(FrameKind.FORWARD_SUMS, *cell, step)
            self._outbox.send(shadow, self._outbox.frame(address, payload=SumsOfForwards(by_microbatch=made)))

    def _has_shadow(self, cell: Cell) -> bool:
        plan = self._plan.current
        return plan.mode in EAGER and plan.at(cell).shadow not in (None, self._plan.worker)

    # as the shadow

    def computed(self, cell: Cell, step: int, microbatch: int, outputs: Parts, work: Work) -> list[Difference]:
        """A forward of a cell that is shadowed here is done in advance; what it shows."""
        asked = self.is_asked(cell, step, microbatch)
        if not (self.active or asked):
            return []
        mine = forward_sum(outputs, work, microbatch)
        if asked:
            self._answer(cell, step, microbatch, mine)
        compared = self._compared.setdefault((cell, step), _Compared())
        compared.mine[microbatch] = mine
        return self._compare(cell, step, compared)

    def told(self, owner: WorkerId, cell: Cell, step: int, sums: dict[int, int]) -> list[Difference]:
        """The owner tells what its forwards came to; what that shows. After a takeover another one may tell anew."""
        if not self.active:
            return []
        compared = self._compared.setdefault((cell, step), _Compared())
        compared.told, compared.owner = {**compared.told, **sums}, owner
        return self._compare(cell, step, compared)

    def _compare(self, cell: Cell, step: int, compared: _Compared) -> list[Difference]:
        new = (compared.mine.keys() & compared.told.keys()) - compared.done
        compared.done |= new
        self.count += len(new)
        return [
            Difference(ForwardPlace(cell, step, m), compared.owner, compared.told[m], compared.mine[m])
            for m in sorted(new)
            if compared.told[m] != compared.mine[m]
        ]

    def report(self, found: Difference, again: int | None) -> None:
        """Tell the coordinator. again: what the forward came to here a second time; None if it cannot be repeated."""
        self._tell(
            ForwardDiffers(
                place=found.place, owner=found.owner, theirs=in_hexadecimal(found.theirs),
                mine=in_hexadecimal(found.mine), again=None if again is None else in_hexadecimal(again),
            )
        )  # fmt: skip

    def _answer(self, cell: Cell, step: int, microbatch: int, found: int) -> None:
        self._tell(ForwardSum(place=ForwardPlace(cell, step, microbatch), sum=in_hexadecimal(found)))

    # what happens elsewhere

    def committed(self, step: int) -> None:
        """What is told of the step before may still be on its way."""
        for table in (self._made, self._compared):
            for key in [key for key in table if key[1] < step]:
                del table[key]
