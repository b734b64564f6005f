"""What a manifest's loggers become."""

import pytest

from bamboo_trainer.tasks.task_errors import TaskError
from logger_kit import PATIENCE, Kept, named, step, until

pytest_plugins = ["logger_fixtures"]


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
        {"name": "mine", "type": "Custom", "entrypoint": f"{__name__}:own", "config": {"channel": "c"}},
        loggers={"coded": Kept().make},
    )
    assert list(found) == ["coded", "board", "wb", "ml", "mine"]
    ((config, kept),) = MADE
    threads = store.threads(found["mine"])
    store.add(threads, step(0))
    until(lambda: kept.given == [step(0)])
    threads.close(PATIENCE)
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
        ({"type": "Custom", "entrypoint": f"{__name__}:none"}, f"{__name__} has no function 'none'"),
        (
            {"type": "Custom", "entrypoint": f"{__name__}:wrong"},
            "returned int, expected a function of LoggerFacts",
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
