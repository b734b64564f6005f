"""A simulated job that forks its process (os.fork) at each branch, such as each instruction at which a worker may die.

The child takes the branch, runs the job to its end and judges it; the parent waits for it and continues without the
branch. The common part runs once, and no branch leaves a trace in another. With a GPU, each branch is a separate run.
"""

import gc
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from bamboo_trainer.task import Task
from bamboo_trainer.tasks.readers import BatchReader
from bamboo_trainer.training import TrainingConfig
from training_job import Fault, Job, one_of_each_kind

Judge = Callable[[Job], Any]
Kind = Callable[[Fault], Hashable]


def of_name(fault: Fault) -> Hashable:
    """Return a kill's kind: the name and step of its instruction, whether the kill is before or after it."""
    return fault.name, fault.step


def sweep(kind: Kind) -> pytest.MarkDecorator:
    """Return a mark that runs a test with this `kind` (see kill_at_each) and, marked as slow, with None: every kill."""
    every = pytest.param(None, marks=pytest.mark.slow, id="every")
    return pytest.mark.parametrize("kind", [pytest.param(kind, id=kind.__name__), every])


def kill_at_each(
    manifest: dict[str, Any], kill: Callable[[Fault], bool], judge: Judge, kind: Kind | None = None
) -> dict[Fault, Any]:
    """Run the job once for each instruction that `kill` picks, with a kill there, and return `judge`'s results by kill.

    judge: checks an ended job and returns a picklable result. Its exception is raised here (a fork's: AssertionError).
    kind: if given, only one instruction of each kind is tried.
    """
    if kind is not None:
        chosen = one_of_each_kind(filter(kill, Job(manifest).run().executed), kind)
        killed = kill_at_each(manifest, chosen.__contains__, judge)
        assert killed.keys() == chosen
        return killed

    class Killed(BranchingJob):
        def strikes(self, fault: Fault) -> bool:
            return kill(fault) and self.branch(fault)

    return each_way(lambda: Killed(manifest), judge)


def each_way(make: Callable[[], "BranchingJob"], judge: Judge) -> dict[Any, Any]:
    """Run the job to its end once for each of its branches, and return the results of `judge` by the branches' names.

    The job without any branch is not judged. make: creates the job. judge: as in kill_at_each.
    """
    first = make()
    first.judge = judge
    if not torch.accelerator.is_available():
        return first.run().answers
    answers = {}  # autograd that knows of a device refuses to work in a forked process
    for name in first.run().answers:
        other = make()
        other.only = name
        answers[name] = judge(other.run())
    return answers


class _Reader(BatchReader):
    """A reader that goes on reading in the background in a forked process, which has none of its parent's threads."""

    def settle(self) -> None:
        """Wait for the batches that are being read."""
        for expected in self._expected.values():
            expected.exception()

    def restart(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1)


class BranchingJob(Job):
    """A job that `each_way` runs once for each branch. answers: the judge's results, by branch."""

    judge: Judge | None = None  # of a job that has ended
    only: Hashable = None  # with a GPU: the branch to take

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.answers: dict[Hashable, Any] = {}
        self._kinds: set[Hashable] = set()
        self._readers: list[_Reader] = []
        self._answer: int | None = None  # in a child: the pipe that the parent reads

    def run(self, limit: int = 200_000) -> "BranchingJob":
        try:
            super().run(limit)
            if self._answer is not None and self.judge:
                self._tell((self.judge(self), ""))
        except BaseException:
            if self._answer is None:
                raise
            self._tell((None, traceback.format_exc()))
        return self

    def branch(self, name: Hashable, kind: Hashable = None) -> bool:
        """Return whether this process takes the branch `name`. The first call for a name forks the job: the child takes
        the branch, the parent does not. With a GPU or no judge nothing forks: only the branch `only` is taken.

        A forked job has no further branches. kind: if given, only the first branch of each kind counts. Raises
        AssertionError if the forked job did not end as it should.
        """
        if self._answer is not None or name in self.answers or kind in self._kinds:
            return False
        if kind is not None:
            self._kinds.add(kind)
        if self.judge is None or torch.accelerator.is_available():
            self.answers[name] = None
            return name == self.only
        for reader in self._readers:
            reader.settle()
        source, sink = os.pipe()
        with ExitStack() as quiet:
            for reader in self._readers:
                quiet.enter_context(reader.quiet())
            child = os.fork()
        if not child:
            gc.disable()  # it would look at, and so copy, all that the parent has
            self._answer = sink
            for reader in self._readers:
                reader.restart()
            return True
        os.close(sink)
        self.answers[name] = self._outcome(name, child, source)
        return False

    def _outcome(self, name: Hashable, child: int, source: int) -> Any:
        try:
            with open(source, "rb") as told:
                text = told.read()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert text, f"{name}: the process came to no end of its own"
        answer, error = pickle.loads(text)
        assert not error, f"{name}: {error}"
        return answer

    def _tell(self, answer: tuple[Any, str]) -> None:
        assert self._answer is not None
        with open(self._answer, "wb") as sink:
            sink.write(pickle.dumps(answer))
        os._exit(0)

    def reader(self, task: Task, config: TrainingConfig) -> BatchReader:
        """Return a reader that goes on reading in a forked process."""
        self._readers.append(_Reader(task, config.samples))
        return self._readers[-1]
