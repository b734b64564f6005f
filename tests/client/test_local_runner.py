"""The local runner: replacement of lost workers, and workers that come and go with recorded nodes."""

from pathlib import Path
from typing import Any

import pytest

import bamboo
from bamboo_trainer.models import mlp

SECONDS = 120.0  # for a run on a loaded machine
RECORDING = """{"format": "bamboo-trace", "version": 1}
{"at": 0, "add": "a"}
{"at": 1, "add": "b"}
{"at": 3, "remove": "a"}
{"at": 3, "remove": "b"}
"""


def job(steps: int) -> bamboo.Job:
    training: Any = {"steps": steps, "globalBatchSize": 16, "microBatchSize": 4}
    return bamboo.Job("tiny", task=mlp.build, training=training, topology={"stages": 2, "split": [4, 4]})


def reasons(handle: bamboo.JobHandle) -> list[str]:
    return [event.reason for event in handle.events()]


@pytest.mark.parametrize(("seconds", "steps"), [(0.0, 300), (3600.0, 100)])
def test_a_lost_worker_is_replaced_after_that_time(seconds: float, steps: int) -> None:
    with job(steps).run(page=False, preempt="at:5:0", replace_after=seconds) as handle:
        assert handle.wait(SECONDS).state == "Complete"
        assert (reasons(handle).count("WorkerJoined") > 2) is (seconds == 0)


def test_a_job_waits_for_recorded_nodes_and_ends_with_a_recording_that_leaves_none(tmp_path: Path) -> None:
    """The recording's time begins when the worker of its first node is ready."""
    (tmp_path / "t.jsonl").write_text(RECORDING)
    with job(1_000_000).run(page=False, preempt=f"nodes:{tmp_path}/t.jsonl") as handle:
        with pytest.raises(bamboo.JobFailed, match=r"none is left at its end; .* of 1000000 steps are done") as told:
            handle.wait(SECONDS)
        assert told.value.reason == "RecordingOver"
        found = reasons(handle)
        assert found.index("WorkerJoined") < found.index("NodesAwaited") < found.index("Started")
