"""The history of jobs with random events: it has each committed step, unless all workers that knew the step were lost
before it was written. A callback gets each step of an attempt once, in order.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.history.files import HistoryFiles
from bamboo_core.history.merge import merged, newest
from bamboo_core.history.records import Record, StepRecord
from bamboo_trainer.worker import history_keeper
from history_keeper_kit import Job
from history_worker import HistoryWorker, Steps

KINDS = ("train", "write", "join", "join late", "lose", "lose root", "freeze root", "go back", "move", "end")
Step = tuple[int, float]  # its number, and when it was committed


class Life:
    """A job with random events, and a record of the workers that know each of its steps."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.names, self.epoch, self.frozen = folder, 0, 1, list[HistoryWorker]()
        self.known: dict[Step, set[str]] = {}
        self.times: dict[int, float] = {}  # when each step was committed last
        self.lost: set[int] = set()  # steps that were not written before the last worker that knew them was lost
        self.begin(0)

    def begin(self, step: int) -> None:
        """Begin another run of the job at a step, with three new workers, which know nothing."""
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

    def of(self, number: int) -> str:
        """Return the worker at a drawn position, modulo the number of workers."""
        return [*self.job.workers][number % len(self.job.workers)]

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
            case "freeze root" if len(self.job.workers) > 1:
                self.train(1)
                self.job.written()  # so that nobody else takes its attempt for one that nobody has begun
                self.train(other)
                self.frozen.append(self.job.workers[self.job.root])
                self.lose_root(one)
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
        step = self.newest()[-1]
        self.times[step[0]] = step[1]
        self.known[step] = set(self.job.workers) - set(deaf)

    def newest(self) -> list[Step]:
        """Return numbers and times of the newest steps, which a joining worker learns from the others."""
        return [(step + 1, commit.history.at) for step, commit in self.job.newest if commit.history]

    def train_for_some(self, number: int) -> None:
        """Commit a step that the root, before its loss, sends to one worker only; the others hear of it later. Do
        nothing if `number` is even or the root is alone, as no worker would hear of the step.
        """
        heard = {name for name in self.job.workers if name != self.job.root and number % 2}
        heard = {min(heard)} if heard else set()
        deaf = tuple(name for name in self.job.workers if name not in {*heard, self.job.root})
        if heard:
            self.commit(deaf)
            for name in deaf:  # the next root passes it on
                self.job.keeper(name).committed(*self.job.newest[-1])

    def join(self, *, told: bool = True) -> None:
        name = self.new_worker()
        self.job.tell_newcomer(name, unwritten=told)
        for step, names in self.known.items():
            if (told and self.job.root in names) or step in self.newest():
                names.add(name)

    def lose_root(self, number: int) -> None:
        self.forget(self.job.root, then=number)

    def forget(self, name: str, then: int = 0) -> None:
        if len(self.job.workers) == 1:
            return  # who is the last one goes on
        self.job.lose(name)
        self.gone(name)
        if name == self.job.root:
            self.lead(then)

    def gone(self, name: str) -> None:
        written = {(record.step, record.time) for record in self.records() if isinstance(record, StepRecord)}
        for step, names in self.known.items():
            names.discard(name)
            if not names and step not in written:
                self.lost.add(step[0])

    def lead(self, number: int) -> None:
        self.epoch += 1
        self.job.lead(self.of(number), self.epoch)
        for names in self.known.values():
            if names & set(self.job.workers):
                names.add(self.job.root)

    def again(self, step: int, number: int, *, moved: bool) -> None:
        self.epoch += 1
        self.job.go_back(step, self.epoch)
        self.job.lead(self.of(number), self.epoch, moved=moved)

    def records(self) -> list[Record]:
        return HistoryFiles(str(self.folder)).read_all()

    def end(self) -> None:
        self.train(1)
        self.job.written(complete=True)
        self.job.close()

    def wake_the_frozen(self) -> None:
        """Let frozen roots wake and write the records that they hold."""
        for worker in self.frozen:
            worker.keeper.close(0.0)


@contextmanager
def small() -> Iterator[None]:
    """Use small files and messages, so that even a short history has several."""
    before = history_keeper.MOST_RECORDS, history_keeper.SENT_AT_ONCE
    history_keeper.MOST_RECORDS, history_keeper.SENT_AT_ONCE = 7, 3  # type: ignore[misc]
    try:
        yield
    finally:
        history_keeper.MOST_RECORDS, history_keeper.SENT_AT_ONCE = before  # type: ignore[misc]


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9), st.integers(0, 20)), max_size=30))
def test_each_step_is_there_and_the_callback_has_heard_it_once(life: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder, small():
        job = Life(Path(folder))
        Steps.heard.clear()
        for kind, one, other in life:
            job.do(kind, one, other)
        job.end()
        heard = list(Steps.heard)
        job.wake_the_frozen()
        seen = newest(merged(job.records()))
    there = {record.step: record.time for record in seen if isinstance(record, StepRecord)}
    assert {step for step in range(1, job.job.step + 1) if there.get(step) != job.times[step]} <= job.lost
    assert heard == sorted(set(heard))
    assert {step for _, step in heard} >= there.keys()
