"""Loggers that record their calls, and a history that they follow."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from bamboo_core.history.files import HistoryFile, HistoryFiles
from bamboo_core.history.records import EvaluationRecord, Record, StepRecord
from bamboo_core.job.manifest import parse_manifest
from bamboo_trainer.worker.followers import HistoryFollower, facts_of, followers_of
from bamboo_trainer.worker.history_keeper import HistoryKeeper, Rates
from bamboo_trainer.worker.loggers import loggers_of
from manifest_kit import bamboojob, training
from stage_kit import small_task
from waiting import PATIENCE


def step(number: int, attempt: int = 1, **more) -> StepRecord:
    return StepRecord(
        attempt=attempt, step=number, time=100.0 + number, loss=1.0 / (number + attempt), gradient_norm=0.5, **more
    )


def evaluated(number: int, **metrics) -> EvaluationRecord:
    """Return the record of an evaluation after step `number`. metrics: the results, by name."""
    return EvaluationRecord(attempt=1, step=number, time=100.5 + number, metrics=metrics)


class Kept:
    """A logger that keeps its records. mood: "fails", "hangs" (until `go_on` is set), "closes badly", or "" (works)."""

    def __init__(self) -> None:
        self.given: list[Record] = []
        self.mood, self.closed = "", 0
        self.go_on = threading.Event()

    def make(self, facts) -> "Kept":
        self.facts = facts
        return self

    def write(self, records: Sequence[Record]) -> None:
        if self.mood == "fails":
            raise ConnectionError("no such host")
        if self.mood == "hangs":
            assert self.go_on.wait(PATIENCE)
        self.given += records

    def close(self) -> None:
        self.closed += 1
        if self.mood == "closes badly":
            raise ConnectionError("no such host")


class Store:
    """A history in a folder. `followers` makes a keeper with followers; `add` writes records and wakes followers."""

    def __init__(self, folder: Path) -> None:
        self.url, self.told, self.records = str(folder / "h"), [], []
        self.files = HistoryFiles(self.url)

    def followers(self, *loggers, leads: bool = True, **callbacks) -> "Followed":
        named = {f"l{number}": make for number, make in enumerate(loggers)}
        made = Followed(self, followers_of(named, callbacks, facts_of("job", self.url), self.files, self.told.append))
        made.lead(leads)
        return made

    def add(self, followers: "Followed | None", *records: Record) -> None:
        self.records += records
        HistoryFiles(self.url).write(HistoryFile(1, 1, 0), self.records)
        for one in followers.all if followers else ():
            one.wake()


class Followed(HistoryKeeper):
    """A history keeper that writes nothing itself, with a follower for each logger and callback."""

    def __init__(self, store: Store, followers: list[HistoryFollower]) -> None:
        super().__init__(store.files, Rates(batch=1), store.told.append, followers)
        self.all = followers

    def lead(self, leads: bool) -> None:
        for one in self.all:
            one.lead(leads)

    def complete(self) -> bool:
        return all(one.complete(lambda: None) for one in self.all)

    def close(self, seconds: float, logger_seconds: float = 0.0) -> None:
        super().close(0.0, seconds)


def named(*loggers, **more):
    """Return the functions that create a small job's loggers. loggers: `training.loggers`. more: fields of the task."""
    document = bamboojob(
        task={"entrypoint": "m:build"}, training=training(1, 2, 1, loggers=list(loggers)), topology={"stages": 1}
    )
    return loggers_of(small_task(**more), parse_manifest(document).training)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)
