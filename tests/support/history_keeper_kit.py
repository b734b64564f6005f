"""Simulated workers' history keepers, which have no threads and write only in `HistoryWorker.turn` and when closed."""

from pathlib import Path
from typing import Any

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.history.files import HistoryFiles
from bamboo_core.history.records import StepRecord
from bamboo_core.planning.plan import Assignment, Layout, Peer, Plan
from bamboo_trainer.frames import CheckpointMark, Commit
from bamboo_trainer.worker.history_keeper import HistoryKeeper, Rates
from history_worker import HistoryWorker, Steps

CHECKPOINT = CheckpointMark(number=1, id="a", writers=())


def plan(epoch: int, origin: int = 1, moved: bool = False, first: int = 0) -> Plan:
    restore = CheckpointId(step=first, id="a") if first else None
    return Plan(
        epoch=epoch,
        origin=origin,
        moved=moved,
        restore=restore,
        stages=((0, 1),),
        pipelines=((Assignment(owner="w", replicas=()),),),
        layouts=(Layout(generation=0, split=((0,),), bounds=(0, 1)),),
        workers=(Peer(worker="w", host="h", port=1),),
    )


class Job:
    """The history keepers of one job's workers. `lead` makes one worker the root."""

    def __init__(self, folder: Path) -> None:
        self.url, self.told, self.step, self.origin, self.first = str(folder), [], 0, 1, 0
        self.workers: dict[str, HistoryWorker] = {}
        self.root = ""
        self.newest: list[tuple[int, Commit]] = []

    def join(self, *names: str) -> None:
        for name in names:
            files, rates = HistoryFiles(self.url), Rates(batch=4, tokens=8)
            self.workers[name] = HistoryWorker(files, rates, {"steps": Steps}, self.told.append)

    def keeper(self, name: str) -> HistoryKeeper:
        return self.workers[name].keeper

    def tell_newcomer(self, name: str, *, unwritten: bool = True) -> None:
        """Give a new worker a plan, the last two commits and, if `unwritten`, all commits the root has not written."""
        self.keeper(name).take_role(plan(self.origin, self.origin, first=self.first), False)
        if unwritten:
            self._tell(self.root, name)
        for step, commit in self.newest:
            self.keeper(name).committed(step, commit)

    def go_back(self, step: int, origin: int) -> None:
        self.step = self.first = step
        self.newest = []
        self.origin = origin

    def lead(self, name: str, epoch: int, *, moved: bool = False, informed: bool = True) -> None:
        self.root, now = name, plan(epoch, self.origin, moved, self.first)
        for one, worker in self.workers.items():
            worker.keeper.take_role(now, one == name)
        if informed:
            self.inform_root()

    def inform_root(self) -> None:
        for one in self.workers:
            if one != self.root:
                self._tell(one, self.root)
        for step, commit in self.newest:
            self.keeper(self.root).committed(step, commit)
        self.keeper(self.root).informed()

    def _tell(self, one: str, other: str) -> None:
        for commits in self.keeper(one).unwritten():
            self.keeper(other).heard(commits)

    def train(self, steps: int, *, losing: tuple[str, ...] = (), **commit: Any) -> None:
        """Commit steps. losing: workers that miss the commits. commit: fields that replace or extend the usual ones."""
        for _ in range(steps):
            mark = self.keeper(self.root).mark(0.5, 0.1)
            usual = {"norm": 1.0, "loss": 1.0 / (self.step + 1), "microbatches": 2, "generation": 0, "epoch": 1}
            made = Commit(history=mark, **(usual | commit))
            for name in self.workers:
                if name not in losing:
                    self.keeper(name).committed(self.step, made)
            self.newest = [*self.newest, (self.step, made)][-2:]
            self.step += 1

    def written(self, *, complete: bool = False) -> None:
        done: list[bool] = []
        self.keeper(self.root).when_written(lambda: done.append(True), complete=complete)
        self.workers[self.root].turn()
        self.workers[self.root].turn()
        assert done

    def train_and_write(self, steps: int) -> None:
        self.train(steps)
        self.written()

    def replace_root(self, name: str) -> None:
        """Lose the root without notice, and let worker `name` be the root in epoch 2."""
        self.lose(self.root)
        self.lead(name, 2)

    def lose(self, *names: str) -> None:
        for name in names:
            del self.workers[name]

    def raw(self) -> list[tuple[int, int]]:
        """Return (attempt, step) of every step record in all files."""
        return [(r.attempt, r.step) for r in HistoryFiles(self.url).read_all() if isinstance(r, StepRecord)]

    def close(self) -> None:
        for worker in self.workers.values():
            worker.keeper.close(0.0)


def first(count: int, attempt: int = 1, since: int = 0) -> list[tuple[int, int]]:
    """Return a list like that of `Job.raw`: (attempt, step) for each step from since + 1 to count."""
    return [(attempt, step) for step in range(since + 1, count + 1)]
