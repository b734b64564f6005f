"""A worker copies its share of a checkpoint while it waits for others; training waits for what is left, and no more."""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

from bamboo.planning.plan import CheckpointId
from bamboo_trainer.commit.checkpoint_shares import CheckpointShares
from bamboo_trainer.transport.payloads import CheckpointMark

PIECE_SECONDS = 0.5


class Stage:
    """Of so many pieces, of which each takes its time."""

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


class States(dict[int, Stage]):
    def version(self, stage: int) -> int:
        return self[stage].version


def made(version: int = 3) -> tuple[CheckpointShares, list[Any], list[float]]:
    """A worker that runs stage 0 of two layers and keeps a replica of stage 1, of four, half of which it writes."""
    clock, kept = [0.0], list[Any]()
    mark = CheckpointMark(number=1, id="a", writers=(("w",), ("w", "x")))
    states: Any = States({0: Stage(clock, version), 1: Stage(clock, version)})
    plan: Any = SimpleNamespace(worker="w", current=SimpleNamespace(state_layers=((0, 2), (2, 6))))
    log: Any = SimpleNamespace(commits={version - 1: SimpleNamespace(checkpoint=mark)})

    def keep(checkpoint: CheckpointId, layers: Any, seconds: float) -> None:
        kept.append((checkpoint.step, sorted(layers), seconds))

    hold, copied = lambda cut, layers: None, lambda stage: None
    return CheckpointShares(plan, states, log, keep, hold, lambda: clock[0], copied), kept, clock


def test_what_is_copied_while_the_worker_waits_costs_no_time_of_the_training() -> None:
    shares, kept, _ = made()
    for stage in (0, 1):
        shares.reached(stage)
    assert not kept
    while shares.advance():
        pass
    assert kept == [(3, [0, 1], 0.0), (3, [2, 4], 0.0)]
    assert not shares.advance()


def test_what_is_left_when_the_state_is_about_to_change_is_copied_then() -> None:
    shares, kept, clock = made()
    for stage in (0, 1):
        shares.reached(stage)
    shares.advance()
    shares.finish(0)
    assert kept == [(3, [0, 1], 3 * PIECE_SECONDS)]
    shares.finish(0)
    shares.finish(7)
    assert clock == [4 * PIECE_SECONDS]
    shares.reached(1)
    assert kept[1] == (3, [2, 4], 4 * PIECE_SECONDS), "what was begun is handed over before it begins again"
