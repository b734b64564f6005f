"""Do all who hold a stage hold the same bits? Compared at versions that all agree on, by the owner in pipeline 0."""

from typing import TYPE_CHECKING, Final

from bamboo.plan import Cell, WorkerId
from bamboo_trainer.tasks.determinism import NotDeterministic
from bamboo_trainer.transport.frames import Address, Kind
from bamboo_trainer.transport.payloads import Check

if TYPE_CHECKING:
    from bamboo_trainer.engine.engine import Engine

EVERY: Final = 32  # steps; see docs/benchmarks.md
KEPT: Final = 2  # versions: nobody lags by more than one
CAUSES: Final = (
    "usual causes: a layer's factory or the optimizer uses random numbers of Python or numpy, the time, or the order "
    "of a set; tensors are changed without torch's knowledge; the workers' hardware or images differ"
)


def is_due(version: int) -> bool:
    """At the beginning, soon after it, and then every so many steps."""
    return version % EVERY == 0 or version & (version - 1) == 0


def look(engine: "Engine", index: int) -> None:
    """The state of a stage is new here: if it is to be compared, tell its sums, or compare them with the others'."""
    holding = engine.holdings[index]
    stage = holding.stage
    if stage is None or engine.plan is None or not is_due(stage.version) or stage.version in holding.sums:
        return
    version, sums = stage.version, stage.checksums()
    holding.sums = dict(sorted({**holding.sums, version: sums}.items())[-KEPT:])
    comparing = engine.plan.at(Cell(0, index)).owner
    if comparing != engine.worker:
        told = b"".join(number.to_bytes(8, "little") for number in sums.values())
        engine.send(comparing, engine.frame(Address(Kind.CHECK, 0, index, version), meta=Check(sums=told)))
    for worker, claimed in holding.claims.pop(version, {}).items():
        _compare(engine, index, version, worker, claimed)
    holding.claims = {v: claims for v, claims in holding.claims.items() if v > version}


def told(engine: "Engine", sender: WorkerId, address: Address, sums: bytes) -> None:
    """Another holder of a stage has told its sums. Who is not as far yet compares them later."""
    holding, version = engine.holdings[address.stage], address.step
    if version in holding.sums:
        _compare(engine, address.stage, version, sender, sums)
    elif holding.version < version <= holding.version + EVERY:
        holding.claims.setdefault(version, {})[sender] = sums


def _compare(engine: "Engine", index: int, version: int, worker: WorkerId, claimed: bytes) -> None:
    own = engine.holdings[index].sums[version]
    other = [int.from_bytes(claimed[i : i + 8], "little") for i in range(0, len(claimed), 8)]
    if list(own.values()) == other:
        return
    pairs = zip(own, own.values(), other, strict=False)
    first = next((name for name, mine, theirs in pairs if mine != theirs), "the number of tensors")
    when = f"after {version} steps" if version else "as they were built"
    raise NotDeterministic(
        f"{worker} and {engine.worker} hold other bits of stage {index} {when}; first difference: {first}; {CAUSES}"
    )
