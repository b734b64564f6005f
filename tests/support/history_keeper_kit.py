"""A worker's part in the history."""

import threading
from pathlib import Path

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.history.files import HistoryFiles
from bamboo_core.history.records import StepRecord
from bamboo_core.planning.plan import Assignment, Layout, Peer, Plan
from bamboo_trainer.frames.payloads import Commit
from bamboo_trainer.worker.history.history_buffer import Rates
from bamboo_trainer.worker.history.history_keeper import HistoryKeeper

PATIENCE = 120.0


def plan(epoch: int, origin: int = 1, moved: bool = False, first: int = 0) -> Plan:
    restore = CheckpointId(step=first, id="a") if first else None
    return Plan(
        epoch=epoch,
        origin=origin,
        moved=moved,
        restore=restore,
        stages=((0, 1),),
        pipelines=((Assignment(owner="w", replicas=()),),),
        layouts=(Layout(generation=0, split=((0,),)),),
        workers=(Peer(worker="w", host="h", port=1),),
    )


class Job:
    """Workers with keepers of one history, and a root among them."""

    def __init__(self, folder: Path) -> None:
        self.url, self.told, self.step, self.origin, self.first = str(folder), [], 0, 1, 0
        self.keepers: dict[str, HistoryKeeper] = {}
        self.root = ""
        self.newest: list[tuple[int, Commit]] = []

    def join(self, *names: str) -> None:
        for name in names:
            self.keepers[name] = HistoryKeeper(HistoryFiles(self.url), Rates(batch=4, tokens=8), self.told.append)

    def tell_newcomer(self, name: str, *, unwritten: bool = True) -> None:
        """What the root tells who joins; without what is not written yet, if it is lost too early."""
        self.keepers[name].take_role(plan(self.origin, self.origin, first=self.first), False)
        if unwritten:
            self._tell(self.root, name)
        for step, commit in self.newest:
            self.keepers[name].committed(self.origin, step, commit)

    def go_back(self, step: int, origin: int) -> None:
        self.step = self.first = step
        self.newest = []
        self.origin = origin

    def lead(self, name: str, epoch: int, *, moved: bool = False, informed: bool = True) -> None:
        self.root, now = name, plan(epoch, self.origin, moved, self.first)
        for one, keeper in self.keepers.items():
            keeper.take_role(now, one == name)
        if informed:
            self.inform_root()

    def inform_root(self) -> None:
        for one in self.keepers:
            if one != self.root:
                self._tell(one, self.root)
        self.keepers[self.root].informed()

    def _tell(self, one: str, other: str) -> None:
        for records in self.keepers[one].unwritten():
            self.keepers[other].heard(records)

    def train(self, steps: int, *, losing: tuple[str, ...] = ()) -> None:
        """losing: who does not hear of these commits."""
        for _ in range(steps):
            mark = self.keepers[self.root].mark(self.origin, 0.5, 0.1)
            commit = Commit(norm=1.0, loss=1.0 / (self.step + 1), microbatches=2, generation=0, epoch=1, history=mark)
            for name, keeper in self.keepers.items():
                if name not in losing:
                    keeper.committed(self.origin, self.step, commit)
            self.newest = [*self.newest, (self.step, commit)][-2:]
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
            keeper.take_role(plan(1, self.origin, first=self.first), False)
            keeper.close(PATIENCE)

    def raw(self) -> list[tuple[int, int]]:
        """Attempt and step of every line of every file."""
        return [(r.attempt, r.step) for r in HistoryFiles(self.url).read_all() if isinstance(r, StepRecord)]

    def close(self) -> None:
        for keeper in self.keepers.values():
            keeper.close(PATIENCE)


def first(count: int, attempt: int = 1, since: int = 0) -> list[tuple[int, int]]:
    """Attempt and step of so many steps, without those up to `since`."""
    return [(attempt, step) for step in range(since + 1, count + 1)]
