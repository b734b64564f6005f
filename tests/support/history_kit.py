"""History records as workers write them, a run's folder with a history, and the output of `bamboo history`."""

import pytest
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo_core.history.files import HistoryFile, HistoryFiles
from bamboo_core.history.records import EvaluationRecord, EventRecord, StepRecord


def step(number, attempt=1, **more):
    usual = {"time": 1000.0 * attempt + number, "loss": 1.0 / number, "gradient_norm": 0.5}
    return StepRecord(attempt=attempt, step=number, **(usual | more))


def evaluated(number, attempt=1, **metrics):
    """Return the record of an evaluation of the state after step `number`, with the time of the next step's commit."""
    return EvaluationRecord(attempt=attempt, step=number, time=1000.0 * attempt + number + 1, metrics=metrics)


def event(number, at, source="a", **more):
    return EventRecord(attempt=1, time=at, reason="Happened", message=f"no {number}", source=source, number=number)


def shown(*words, code=0):
    done = CliRunner().invoke(app, ["history", *map(str, words)])
    assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
    return done.stdout if code == 0 else done.stderr


@pytest.fixture
def kept(tmp_path):
    """Write the history of a job that went back from step 5 to 3, and return the run's folder. The second root repeats
    the first event, and step 2 with another loss.
    """
    files = HistoryFiles(str(tmp_path / "run" / "history" / "job"))
    files.write(HistoryFile(1, 1, 0), [event(1, 1001.5), *map(step, range(1, 4))])
    files.write(HistoryFile(1, 7, 0), [step(2, loss=9.0), step(4), step(5), event(1, 1001.5), event(2, 1004.5)])
    files.write(HistoryFile(2, 9, 0), [step(4, 2), step(5, 2), step(6, 2, skipped=True, loss=None, metrics={"a b": 2})])
    return tmp_path / "run"
