"""A worker that watches a metadata endpoint of its own: the address in the environment, and its name as the path."""

import os

from bamboo_trainer.worker.agent import WorkerSettings
from bamboo_trainer.worker.cloud_notices import Cloud, Wanted
from bamboo_trainer.worker.launch.process import main as run_worker

ENVIRONMENT = "BAMBOO_TEST_METADATA"


def main(**arguments: str) -> int:
    url = f"{os.environ[ENVIRONMENT]}/{arguments['worker']}"
    arguments.pop("trace", None)
    return run_worker(**arguments, settings=WorkerSettings(metadata=Wanted(cloud=Cloud.GCP, url=url)))
