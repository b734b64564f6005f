"""Random lives of a job: whatever is lost and when, each committed step is in the history once, or told as missing, and
missing is only what all who knew it took with them.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.history.files import HistoryFiles
from bamboo_core.history.merge import merged, newest
from bamboo_core.history.records import GapRecord, Record, StepRecord
from bamboo_trainer.worker.history import history_buffer, history_keeper
from history_keeper_kit import PATIENCE, Job

KINDS = ("train", "write", "join", "join late", "lose", "lose root", "freeze root", "go back", "move", "end")
Step = tuple[int, float]  # its number, and when it was committed


class Life:
    """A job, and who knows what of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.names, self.epoch, self.frozen = folder, 0, 1, list[history_keeper.HistoryKeeper]()
        self.known: dict[Step, set[str]] = {}
        self.lost: set[int] = set()  # steps that nobody knew any more when they were not written
        self.begin(0)

    def begin(self, step: int) -> None:
        """As another run, with workers that know nothing."""
        self.job = Job(self.folder)
        self.epoch, self.known = 1, {}
        self.job.go_back(step, 1)
        for _ in range(3):
            self.new_worker()
        self.job.lead(self.of(0), self.epoch)

    def new_worker(self) -> str:
        self.names += 1
        name = f"w{self.names}"
        self.job.join(name)
        return name

    def of(self, number: int, *, root: bool = True) -> str:
        """One of the workers, or of those that are not the root."""
        names = [name for name in self.job.keepers if root or name != self.job.root]
        return names[number % len(names)]

    def do(self, kind: str, one: int, other: int) -> None:
        match kind:
            case "train":
                self.train(one + 1)
            case "write":
                self.job.written()
            case "join":
                self.join()
            case "join late":
                self.join(told=False)
                self.lose_root(one)
            case "lose":
                self.forget(self.of(one))
            case "lose root":
                self.train_for_some(other)
                self.lose_root(one)
            case "freeze root" if len(self.job.keepers) > 1:
                self.train(1)
                self.job.written()  # so that nobody else takes its attempt for one that nobody has begun
                self.train(other)
                self.frozen.append(self.job.keepers[self.job.root])
                self.gone(self.job.root, self.job.keepers.pop(self.job.root))
                self.lead(one)
            case "go back":
                self.again(min(other, self.job.step), one, moved=False)
            case "move":
                self.again(self.job.step, one, moved=True)
            case "end":
                self.job.written()
                self.job.close()
                self.begin(min(other, self.job.step))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.commit()

    def commit(self, deaf: tuple[str, ...] = ()) -> None:
        self.lost.discard(self.job.step + 1)
        self.job.train(1, losing=deaf)
        self.known[self.newest()[-1]] = set(self.job.keepers) - set(deaf)

    def newest(self) -> list[Step]:
        """Of which who joins is told by commits."""
        return [(step + 1, commit.history.at) for step, commit in self.job.newest if commit.history]

    def train_for_some(self, number: int) -> None:
        """The root is lost while it tells of a commit: only one other worker hears of it, or none, and then the step is
        done again.
        """
        heard = {name for name in self.job.keepers if name != self.job.root and number % 2}
        heard = {min(heard)} if heard else set()
        deaf = tuple(name for name in self.job.keepers if name not in {*heard, self.job.root})
        if heard:
            self.commit(deaf)
            for name in deaf:  # the next root passes it on
                self.job.keepers[name].committed(self.job.origin, *self.job.newest[-1])

    def join(self, *, told: bool = True) -> None:
        name = self.new_worker()
        self.job.tell_newcomer(name, unwritten=told)
        for step, names in self.known.items():
            if (told and self.job.root in names) or step in self.newest():
                names.add(name)

    def lose_root(self, number: int) -> None:
        self.forget(self.job.root, then=number)

    def forget(self, name: str, then: int = 0) -> None:
        if len(self.job.keepers) == 1:
            return  # who is the last one goes on
        keeper = self.job.keepers[name]
        self.job.lose(name)
        self.gone(name, keeper)
        if name == self.job.root:
            self.lead(then)

    def gone(self, name: str, keeper: history_keeper.HistoryKeeper) -> None:
        written = {(record.step, record.time) for record in self.records() if isinstance(record, StepRecord)}
        for step, names in self.known.items():
            names.discard(name)
            if not names and step not in written:
                self.lost.add(step[0])

    def lead(self, number: int) -> None:
        self.epoch += 1
        self.job.lead(self.of(number), self.epoch)
        for names in self.known.values():
            if names & set(self.job.keepers):
                names.add(self.job.root)

    def again(self, step: int, number: int, *, moved: bool) -> None:
        self.epoch += 1
        self.job.go_back(step, self.epoch)
        self.job.lead(self.of(number), self.epoch, moved=moved)

    def records(self) -> list[Record]:
        return HistoryFiles(str(self.folder)).read_all()

    def end(self) -> None:
        self.job.train(1)
        self.job.written()
        self.job.close()
        for keeper in self.frozen:
            keeper.close(PATIENCE)  # it wakes, and writes what it had


@contextmanager
def small() -> Iterator[None]:
    """Small files and pieces, so that a short life has several."""
    before = history_keeper.MOST_RECORDS, history_buffer.TOLD_AT_ONCE
    history_keeper.MOST_RECORDS, history_buffer.TOLD_AT_ONCE = 7, 3  # type: ignore[misc]
    try:
        yield
    finally:
        history_keeper.MOST_RECORDS, history_buffer.TOLD_AT_ONCE = before  # type: ignore[misc]


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9), st.integers(0, 20)), max_size=30))
def test_each_step_is_there_or_told_as_missing(life):
    with tempfile.TemporaryDirectory() as folder, small():
        job = Life(Path(folder))
        for kind, one, other in life:
            job.do(kind, one, other)
        job.end()
        seen = newest(merged(job.records()))
    there = [record.step for record in seen if isinstance(record, StepRecord)]
    missing = [s for gap in seen if isinstance(gap, GapRecord) for s in range(gap.first, gap.last + 1)]
    assert sorted([*there, *missing]) == list(range(1, job.job.step + 1))
    assert set(missing) <= job.lost
