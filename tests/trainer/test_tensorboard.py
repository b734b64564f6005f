"""The logger for TensorBoard."""

from pathlib import Path

import pytest

from bamboo_trainer.loggers import tensorboard
from logger_kit import step, until

pytest_plugins = ["logger_fixtures"]


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
