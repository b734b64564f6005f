"""A job that is killed at each of its instructions, with what precedes the kill run once for all of them.

At an instruction the process forks. In the child the worker dies there, and the job is run to its end and judged; the
parent waits for it and goes on to the next instruction, undisturbed. So no kill leaves a trace in another one's job.
"""

import gc
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch

from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.tasks.batch_reader import BatchReader
from bamboo_trainer.training import TrainingConfig
from training_job import Fault, Job


def kill_at_each(
    manifest: dict[str, Any], kill: Callable[[Fault], bool], judge: Callable[[Job], Any]
) -> dict[Fault, Any]:
    """What `judge` answers of the job in which a worker dies at that instruction, for each one that `kill` picks.

    judge: it raises what is wrong, which comes from here as an AssertionError; its answer must be one that can be
    pickled.
    """
    if torch.accelerator.is_available():  # autograd that knows of a device refuses to work in a forked process
        executed = Job(manifest).run().executed
        return {fault: judge(Job(manifest, (fault,)).run()) for fault in dict.fromkeys(executed) if kill(fault)}
    return _Sweep(manifest, kill, judge).run().answers


class _Reader(BatchReader):
    """Goes on to read in the background in a forked process, which has none of its parent's threads."""

    def settle(self) -> None:
        """Wait for what is being read."""
        for expected in self._expected.values():
            expected.exception()

    def restart(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1)


class _Sweep(Job):
    """See kill_at_each."""

    def __init__(self, manifest: dict[str, Any], kill: Callable[[Fault], bool], judge: Callable[[Job], Any]) -> None:
        super().__init__(manifest)
        self.answers: dict[Fault, Any] = {}
        self._kill, self._judge = kill, judge
        self._readers: list[_Reader] = []
        self._answer: int | None = None  # in a child: where the parent reads

    def run(self, limit: int = 200_000) -> "_Sweep":
        try:
            super().run(limit)
            if self._answer is not None:
                self._tell((self._judge(self), ""))
        except BaseException:
            if self._answer is None:
                raise
            self._tell((None, traceback.format_exc()))
        return self

    def strikes(self, fault: Fault) -> bool:
        """In the child only. Raises AssertionError if a child did not end as it should."""
        if self._answer is not None or fault in self.answers or not self._kill(fault):
            return False
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
        self.answers[fault] = self._outcome(fault, child, source)
        return False

    def _outcome(self, fault: Fault, child: int, source: int) -> Any:
        try:
            with open(source, "rb") as told:
                text = told.read()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert text, f"killed at {fault}: the process came to no end of its own"
        answer, error = pickle.loads(text)
        assert not error, f"killed at {fault}: {error}"
        return answer

    def _tell(self, answer: tuple[Any, str]) -> None:
        assert self._answer is not None
        with open(self._answer, "wb") as sink:
            sink.write(pickle.dumps(answer))
        os._exit(0)

    def stage(self, stage: int, stages: Sequence[tuple[int, int]], config: TrainingConfig) -> Stage:
        reader = _Reader(self.task, config.samples)
        self._readers.append(reader)
        return Stage(self.task, stage, stages, config, self.device, reader)
