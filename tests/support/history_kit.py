"""Records of a history, as workers write them."""

from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo_core.history.records import EvaluationRecord, EventRecord, StepRecord


def step(number, attempt=1, **more):
    usual = {"time": 1000.0 * attempt + number, "loss": 1.0 / number, "gradient_norm": 0.5}
    return StepRecord(attempt=attempt, step=number, **(usual | more))


def evaluated(number, attempt=1, **metrics):
    """Return the evaluation of the state after that step, as the next step's commit brings it."""
    return EvaluationRecord(attempt=attempt, step=number, time=1000.0 * attempt + number + 1, metrics=metrics)


def event(number, at, source="a", **more):
    return EventRecord(attempt=1, time=at, reason="Happened", message=f"no {number}", source=source, number=number)


def shown(*words, code=0):
    done = CliRunner().invoke(app, ["history", *map(str, words)])
    assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
    return done.stdout if code == 0 else done.stderr
