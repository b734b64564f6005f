"""Loggers get what is in the history, each in a thread of its own; who fails or hangs holds nobody up."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from bamboo.control.protocol import WorkerWarning
from bamboo.history.files import HistoryFile, HistoryFiles
from bamboo.history.records import EventRecord, Record, StepRecord
from bamboo.job.manifest import parse_manifest
from bamboo.job.manifest_warnings import warnings
from bamboo_trainer.loggers import mlflow, tensorboard, wandb
from bamboo_trainer.loggers.from_manifest import loggers_of
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.worker.history import logging_threads
from bamboo_trainer.worker.history.logging_threads import LoggingThreads, facts_of
from manifest_kit import bamboojob, training
from stage_kit import small_task

PATIENCE = 120.0


def step(number: int, attempt: int = 1, **more) -> StepRecord:
    return StepRecord(
        attempt=attempt, step=number, time=100.0 + number, loss=1.0 / (number + attempt), gradient_norm=0.5, **more
    )


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Kept:
    """A logger that keeps what it is given. mood: "fails", "hangs" or fine."""

    def __init__(self) -> None:
        self.given: list[Record] = []
        self.mood = ""
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
        pass


class Store:
    """A history in a folder, and what logs it."""

    def __init__(self, folder: Path) -> None:
        self.url, self.told, self.records = str(folder / "h"), [], []

    def threads(self, *loggers, begun: bool = True) -> LoggingThreads:
        named = {f"l{number}": make for number, make in enumerate(loggers)}
        threads = LoggingThreads(named, facts_of("job", self.url), self.url, self.told.append)
        if begun:
            threads.begin()
        return threads

    def add(self, threads: LoggingThreads | None, *records: Record) -> None:
        self.records += records
        HistoryFiles(self.url).write(HistoryFile(1, 1, 0), self.records)
        if threads is not None:
            threads.give(records)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


def test_a_logger_gets_everything_once_and_the_next_root_goes_on(store):
    kept = Kept()
    store.add(None, step(0), step(1))
    first = store.threads(kept.make)
    store.add(first, step(2), EventRecord(attempt=1, time=101.0, reason="R", message="m", source="s", number=1))
    until(lambda: len(kept.given) == 4)
    first.close()
    store.add(None, step(3))  # written, and given to nobody
    second = store.threads(kept.make)
    store.add(second, step(4))
    until(lambda: len(kept.given) >= 6)
    second.close()
    assert [record.step for record in kept.given if isinstance(record, StepRecord)] == [0, 1, 2, 3, 4]
    assert kept.facts.job == "job"
    assert store.told == []


def test_a_logger_that_fails_is_told_once_and_gets_what_it_missed(store, monkeypatch):
    monkeypatch.setattr(logging_threads, "AGAIN_SECONDS", 0.01)
    bad, good = Kept(), Kept()
    bad.mood = "fails"
    store.add(None, step(0))
    threads = store.threads(bad.make, good.make)
    until(lambda: store.told)
    store.add(threads, step(1))
    until(lambda: len(good.given) == 2)
    bad.mood = ""
    until(lambda: len(bad.given) == 2)
    threads.close()
    assert store.told == [WorkerWarning(reason="LoggerFailed", message="the logger l0: ConnectionError: no such host")]


def test_a_logger_that_hangs_holds_nobody_up(store, monkeypatch):
    monkeypatch.setattr(logging_threads, "SLOW_SECONDS", 0.05)
    monkeypatch.setattr(logging_threads, "CLOSE_SECONDS", 0.05)
    stuck = Kept()
    stuck.mood = "hangs"
    store.add(None, step(0))
    threads = store.threads(stuck.make)
    until(lambda: store.told)
    for number in range(1, 50):
        threads.give([step(number)])
    threads.close()
    assert [message.reason for message in store.told] == ["LoggerFailed"]
    stuck.go_on.set()


def read_back(folder: str) -> dict[str, list[tuple[int, float]]]:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator(folder, size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_each_step_once_as_it_was_done_last(store, tmp_path):
    pytest.importorskip("tensorboard")
    first = store.threads(tensorboard())
    store.add(first, *(step(number, metrics={"accuracy": 0.25}) for number in range(6)))
    until(lambda: (Path(store.url) / "logger-l0.json").exists())
    first.close()
    second = store.threads(tensorboard(), begun=False)
    store.add(None, *(step(number, 2) for number in range(4, 8)))  # the job went back to step 4
    second.begin()
    second.close()
    found = read_back(f"{store.url}/tensorboard")
    assert found["loss"] == [(s, pytest.approx(1 / (s + (1 if s < 4 else 2)))) for s in range(8)]
    assert found["accuracy"][0] == (0, 0.25)
    assert store.told == []


@pytest.mark.parametrize(("make", "name"), [(wandb, "wandb"), (mlflow, "mlflow"), (tensorboard, "tensorboard")])
def test_a_library_that_is_missing_is_told(store, monkeypatch, make, name):
    for module in (name, f"{name}.tracking", "torch.utils.tensorboard"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    store.add(None, step(0))
    threads = store.threads(make("x"))
    until(lambda: store.told)
    threads.close()
    assert f"{name} is not installed: pip install 'bamboo-trainer[{name}]'" in store.told[0].message


@pytest.mark.slow
def test_a_run_of_weights_and_biases_without_a_network(store, monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    threads = store.threads(partial(wandb("project")))
    store.add(threads, step(0), step(1))
    until(lambda: (Path(store.url) / "logger-l0.json").exists())
    threads.close()
    assert list(tmp_path.rglob("run-*.wandb"))
    assert store.told == []


@pytest.mark.slow
def test_a_run_of_mlflow_in_a_folder(store, monkeypatch, tmp_path):
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "runs").as_uri()
    for number in range(2):  # the second one goes on in the run of the first
        threads = store.threads(mlflow("experiment", uri), begun=False)
        store.add(None, step(number))
        threads.begin()
        threads.close()
    client = tracking.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("experiment").experiment_id])
    assert sorted(m.step for m in client.get_metric_history(run.info.run_id, "loss")) == [0, 1]


def named(*loggers, **more):
    """What a manifest with these loggers gives a small task."""
    document = bamboojob(
        task={"entrypoint": "m:build"}, training=training(1, 2, 1, loggers=list(loggers)), topology={"stages": 1}
    )
    return loggers_of(small_task(**more), parse_manifest(document).training)


MADE = []


def own(**config):
    kept = Kept()
    MADE.append((config, kept))
    return kept.make


def wrong(**config):
    return 3


def test_a_manifest_names_loggers_beside_those_of_the_task(store):
    found = named(
        {"name": "board", "type": "TensorBoard", "config": {"folder": "/x"}},
        {"name": "wb", "type": "WeightsAndBiases", "config": {"project": "p", "tags": ["a"]}},
        {"name": "ml", "type": "MLflow", "config": {"experiment": "e"}},
        {"name": "mine", "type": "Custom", "entrypoint": "test_loggers:own", "config": {"channel": "c"}},
        loggers={"coded": Kept().make},
    )
    assert list(found) == ["coded", "board", "wb", "ml", "mine"]
    ((config, kept),) = MADE
    threads = store.threads(found["mine"])
    store.add(threads, step(0))
    until(lambda: kept.given == [step(0)])
    threads.close()
    assert config == {"channel": "c"}


@pytest.mark.parametrize(
    ("logger", "said"),
    [
        ({"type": "WeightsAndBiases"}, r"loggers\[0\]\.config: .*missing 1 required positional argument: 'project'"),
        ({"type": "TensorBoard", "config": {"dir": "/x"}}, r"config: .*unexpected keyword argument 'dir'"),
        (
            {"type": "WeightsAndBiases", "config": {"project": "p", "api_key": "abc"}},
            "api_key: expected no cred",
        ),
        (
            {"type": "MLflow", "config": {"experiment": "e", "tracking_uri": "https://me:abc@mlflow"}},
            "config.tracking_uri: expected no credentials in a manifest",
        ),
        ({"type": "Custom", "entrypoint": "no_such:x"}, r"loggers\[0\]\.entrypoint: cannot import 'no_such'"),
        ({"type": "Custom", "entrypoint": "test_loggers:none"}, "test_loggers has no function 'none'"),
        ({"type": "Custom", "entrypoint": "test_loggers:wrong"}, "returned int, expected a function of LoggerFacts"),
    ],
)
def test_a_logger_that_cannot_be_is_told_before_training(logger, said):
    with pytest.raises(TaskError, match=said) as told:
        named({"name": "a", **logger})
    assert "abc" not in str(told.value), "a secret is not repeated"


def test_a_name_is_used_once():
    with pytest.raises(TaskError, match=r"training\.loggers\[0\]\.name: the task has a logger 'a', too"):
        named({"name": "a", "type": "TensorBoard"}, loggers={"a": Kept().make})


def test_loggers_without_a_history_are_warned_of():
    logging = training(1, 2, 1, loggers=[{"name": "a", "type": "TensorBoard"}])
    spec = parse_manifest(bamboojob(task={"entrypoint": "m:b"}, training=logging, topology={"stages": 1}))
    assert [text for text in warnings(spec) if text.startswith("spec.training.loggers are given nothing")]
