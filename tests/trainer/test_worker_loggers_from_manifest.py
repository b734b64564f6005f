"""What a manifest's loggers become."""

import pytest

from bamboo_trainer.tasks.task_errors import TaskError
from logger_kit import PATIENCE, Kept, named, step, until

pytest_plugins = ["logger_fixtures"]


def test_a_manifest_names_loggers_beside_those_of_the_task(store):
    kept = Kept()
    found = named(
        {"name": "board", "type": "TensorBoard", "config": {"folder": "/x"}},
        {"name": "wb", "type": "WeightsAndBiases", "config": {"project": "p", "tags": ["a"]}},
        {"name": "ml", "type": "MLflow", "config": {"experiment": "e"}},
        loggers={"coded": kept.make},
    )
    assert list(found) == ["coded", "board", "wb", "ml"]
    followers = store.followers(found["coded"])
    store.add(followers, step(0))
    until(lambda: kept.given == [step(0)])
    followers.close(PATIENCE)


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
