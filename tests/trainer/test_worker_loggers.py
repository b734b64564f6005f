"""Loggers named in a manifest: their creation, checks before training, and warnings."""

import pytest

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.manifest_warnings import warnings
from bamboo_trainer.tasks.task_errors import TaskError
from logger_kit import Kept, named
from manifest_kit import bamboojob, training


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
