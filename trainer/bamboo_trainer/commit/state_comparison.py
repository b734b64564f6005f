"""Do all who hold a stage hold the same bits? Compared at versions that all agree on, by the owner in pipeline 0.

Not if the plan says that workers of different platforms hold states: then they need not.
"""

from dataclasses import dataclass, field
from typing import Final

from bamboo_core.control.verification import PROVEN
from bamboo_core.planning.plan import Cell, WorkerId
from bamboo_trainer.commit.state_sums import EVERY, StateSums, is_due
from bamboo_trainer.frames.frame import Address, FrameKind
from bamboo_trainer.frames.payloads import Check
from bamboo_trainer.routing.outbox import Outbox
from bamboo_trainer.routing.plan_state import PlanState
from bamboo_trainer.stage.stage_states import StageStates
from bamboo_trainer.tasks.inspection.determinism import NotDeterministic

KEPT: Final = 2  # versions: nobody lags by more than one
CAUSES: Final = (
    "usual causes: a layer's factory or the optimizer uses random numbers of Python or numpy, the time, or the order "
    "of a set; tensors are changed without torch's knowledge; the workers' hardware or images differ"
)


@dataclass(slots=True)
class _Sums:
    """own: of the newest versions that are compared; claimed: by others, of versions that are not reached here yet."""

    own: dict[int, dict[str, int]] = field(default_factory=dict)
    claimed: dict[int, dict[WorkerId, bytes]] = field(default_factory=dict)


class StateComparison:
    """Sums of each stage's tensors, by stage."""

    def __init__(self, plan: PlanState, outbox: Outbox, states: StageStates, told: StateSums) -> None:
        """told: sums of whole states for the coordinator, which compares them then, but for the first versions."""
        self._plan, self._outbox, self._states, self._told = plan, outbox, states, told
        self._sums: dict[int, _Sums] = {}

    def take_roles(self) -> None:
        """What is not held here any more is not compared."""
        self._told.take_roles()
        self._sums = {index: self._sums.get(index) or _Sums() for index in self._states}

    def look(self, index: int) -> None:
        """The state of a stage is new here: if it is to be compared, tell its sums, or compare them with the others'.

        Raises NotDeterministic.
        """
        self._told.look(index)
        held, sums = self._states.here(index), self._sums[index]
        if held is None or not is_due(held.version) or held.version in sums.own or self._plan.current.mixed:
            return
        if self._told.verifies and held.version > PROVEN:
            return
        version, own = held.version, held.checksums()
        sums.own = dict(sorted({**sums.own, version: own}.items())[-KEPT:])
        comparing = self._plan.owner(Cell(0, index))
        if comparing != self._plan.worker:
            told = b"".join(number.to_bytes(8, "little") for number in own.values())
            frame = self._outbox.frame(Address(FrameKind.CHECK, 0, index, version), payload=Check(sums=told))
            self._outbox.send(comparing, frame)
        for worker, claimed in sums.claimed.pop(version, {}).items():
            self._compare(index, version, worker, claimed)
        sums.claimed = {v: claims for v, claims in sums.claimed.items() if v > version}

    def told(self, sender: WorkerId, index: int, version: int, claimed: bytes) -> None:
        """Another holder of a stage has told its sums. Who is not as far yet compares them later.

        Raises NotDeterministic.
        """
        sums, reached = self._sums[index], self._states.version(index)
        if version in sums.own:
            self._compare(index, version, sender, claimed)
        elif reached < version <= reached + EVERY:
            sums.claimed.setdefault(version, {})[sender] = claimed

    def report(self) -> None:
        """To the coordinator, which may have missed it."""
        self._told.report()

    def _compare(self, index: int, version: int, worker: WorkerId, claimed: bytes) -> None:
        if self._plan.current.mixed:
            return
        own = self._sums[index].own[version]
        other = [int.from_bytes(claimed[i : i + 8], "little") for i in range(0, len(claimed), 8)]
        if list(own.values()) == other:
            return
        pairs = zip(own, own.values(), other, strict=False)
        first = next((name for name, mine, theirs in pairs if mine != theirs), "the number of tensors")
        when = f"after {version} steps" if version else "as they were built"
        raise NotDeterministic(
            f"{worker} and {self._plan.worker} hold other bits of stage {index} {when}; first difference: {first}; "
            f"{CAUSES}"
        )
