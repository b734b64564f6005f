"""A worker's part in the history."""

import threading
from pathlib import Path

from bamboo.history.files import HistoryFiles
from bamboo.history.records import StepRecord
from bamboo.planning.plan import Assignment, Layout, Peer, Plan
from bamboo_trainer.transport.payloads import Commit
from bamboo_trainer.worker.history.history_buffer import Rates
from bamboo_trainer.worker.history.history_keeper import HistoryKeeper

PATIENCE = 120.0


def plan(epoch: int, origin: int = 1, moved: bool = False) -> Plan:
    return Plan(
        epoch=epoch, origin=origin, moved=moved, stages=((0, 1),), pipelines=((Assignment(owner="w", replicas=()),),),
        layouts=(Layout(generation=0, split=((0,),)),), workers=(Peer(worker="w", host="h", port=1),),
    )  # fmt: skip


class Job:
    """Workers with keepers of one history, and a root among them."""

    def __init__(self, folder: Path) -> None:
        self.url, self.told, self.step, self.origin = str(folder), [], 0, 1
        self.keepers: dict[str, HistoryKeeper] = {}
        self.root = ""

    def join(self, *names: str) -> None:
        for name in names:
            self.keepers[name] = HistoryKeeper(self.url, Rates(batch=4, tokens=8), self.told.append)

    def lead(self, name: str, epoch: int, *, moved: bool = False) -> None:
        self.root, now = name, plan(epoch, self.origin, moved)
        for one, keeper in self.keepers.items():
            if one != name:
                self.keepers[name].heard(keeper.unwritten())
            keeper.take_role(now, one == name)

    def train(self, steps: int, *, losing: tuple[str, ...] = ()) -> None:
        """losing: who does not hear of these commits."""
        for _ in range(steps):
            mark = self.keepers[self.root].mark(self.origin, 0.5, 0.1)
            commit = Commit(norm=1.0, loss=1.0 / (self.step + 1), microbatches=2, generation=0, epoch=1, history=mark)
            for name, keeper in self.keepers.items():
                if name not in losing:
                    keeper.committed(self.origin, self.step, commit)
            self.step += 1

    def written(self) -> None:
        done = threading.Event()
        self.keepers[self.root].when_written(done.set)
        assert done.wait(PATIENCE)

    def train_and_write(self, steps: int) -> None:
        self.train(steps)
        self.written()

    def replace_root(self, name: str) -> None:
        """The root is lost without notice, and that worker leads from the next epoch on."""
        self.lose(self.root)
        self.lead(name, 2)

    def lose(self, *names: str) -> None:
        """They write nothing any more, as after a SIGKILL."""
        for name in names:
            keeper = self.keepers.pop(name)
            keeper._term = None
            keeper.close(PATIENCE)

    def raw(self) -> list[tuple[int, int]]:
        """Attempt and step of every line of every file."""
        return [(r.attempt, r.step) for r in HistoryFiles(self.url).read_all() if isinstance(r, StepRecord)]

    def close(self) -> None:
        for keeper in self.keepers.values():
            keeper.close(PATIENCE)


def first(count: int, attempt: int = 1, since: int = 0) -> list[tuple[int, int]]:
    return [(attempt, step) for step in range(since, count)]
