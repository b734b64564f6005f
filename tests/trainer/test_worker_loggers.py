"""Loggers that a manifest names, and a history that is written into one afterwards."""

import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bamboo_core.history.files import HistoryFile, HistoryFiles
from bamboo_core.history.merge import merged
from bamboo_core.history.records import to_lines
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.manifest_warnings import warnings
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.worker.followers import facts_of
from bamboo_trainer.worker.loggers import main, write
from history_kit import shown
from logger_kit import Kept, named, step
from manifest_kit import bamboojob, training


def test_each_step_is_given_as_it_was_done_last_under_the_run_of_the_jobs_own_logger(tmp_path):
    url = (tmp_path / "history" / "job").as_uri()
    files = HistoryFiles(url)
    files.write(HistoryFile(1, 1, 0), [step(0), step(1), step(2)])
    files.write(HistoryFile(2, 1, 0), [step(2, 2), step(3, 2)])
    for source in (str(tmp_path), tmp_path.as_uri()):
        kept = Kept()
        assert write(source, kept.make) == 4
        assert [(record.attempt, record.step) for record in kept.given] == [(1, 0), (1, 1), (2, 2), (2, 3)]
        assert kept.facts == facts_of("job", url)
    (tmp_path / "history.jsonl").write_bytes(to_lines(merged(files.read_all())))
    kept = Kept()
    assert write(str(tmp_path / "history.jsonl"), kept.make) == 4
    assert kept.facts == facts_of("job", url)


def test_the_command_writes_into_a_logger(tmp_path, capsys):
    HistoryFiles(str(tmp_path / "history" / "job")).write(HistoryFile(1, 1, 0), [step(n) for n in range(5)])
    target = f"TensorBoard:folder={tmp_path / 'events'}"
    command = [sys.executable, "-m", "bamboo", "history", str(tmp_path), "--to", target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "5 steps written to TensorBoard\n"), done.stderr
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert len(events.Scalars("loss")) == 5
    config = {"folder": str(tmp_path / "none")}
    assert main({"source": str(tmp_path / "nothing"), "type": "TensorBoard", "config": config}) == 1
    said = capsys.readouterr().err
    assert said.startswith("bamboo: while the history was written to TensorBoard: there is no history in ")


def test_a_logger_that_there_is_not_is_told(tmp_path):
    assert "--to Own: expected TensorBoard, WeightsAndBiases or MLflow" in shown(tmp_path, "--to", "Own", code=2)
    assert "expected KEY=VALUE" in shown(tmp_path, "--to", "MLflow:mine", code=2)
    assert "expected only --to" in shown(tmp_path, "--to", "MLflow:experiment=a", "--all", code=2)


def test_a_manifest_names_loggers_beside_those_of_the_task():
    found = named(
        {"name": "board", "type": "TensorBoard", "config": {"folder": "/x"}},
        {"name": "wb", "type": "WeightsAndBiases", "config": {"project": "p", "tags": ["a"]}},
        {"name": "ml", "type": "MLflow", "config": {"experiment": "e"}},
        loggers={"coded": Kept().make},
    )
    assert list(found) == ["coded", "board", "wb", "ml"]


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
