"""A real worker process that is slow: it gets fewer layers while the job trains, and the bits are the same."""

from pathlib import Path
from typing import Any

import pytest

from bamboo.control.digests import add_digests
from bamboo.coordinator.events import Outcome
from folders import TASK_PATH
from manifest_kit import bamboojob, training
from processes import Processes, run
from training_job import Job

CONFIG = {"width": 16, "blocks": 4, "samples": 64}
STEPS = 250


def manifest(task: dict[str, Any]) -> dict[str, Any]:
    return bamboojob(
        task=task,
        training=training(STEPS, 8, 2, gradientGroups=2),
        topology={"stages": 2, "pipelines": 1},
        elastic={"stabilizationSeconds": 1, "minStages": 2},
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_slow_process_gets_fewer_layers_and_the_bits_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, slow, layers = tmp_path / "mark", [""], [0]

    def decide(job: Processes) -> None:
        """As soon as the job trains one worker is slow; when the layers have moved, nobody is."""
        plan = job.state.plan
        if plan is None or job.state.step == 0:
            return
        if not slow[0]:
            slow[0] = job.owner(0, 1)
            mark.write_text(str(job.pool.pid(slow[0])))
        elif not layers[0] and plan.moved and not plan.sources:
            layers[0] = sum(end - first for c in plan.owned_by(slow[0]) for first, end in [plan.stages[c.stage]])
            mark.unlink()

    monkeypatch.setenv("PYTHONPATH", TASK_PATH)
    config = {**CONFIG, "mark": str(mark)}
    job = run(manifest({"entrypoint": "sluggish:build", "config": config}), tmp_path, decide, seconds=300.0)
    assert job.finish is not None
    assert job.finish.outcome is Outcome.COMPLETE, job.emitted
    reasons = [e.reason for e in job.emitted]
    assert reasons.index("StragglerFound") < reasons.index("Resplit")
    assert "Rebalancing" in reasons
    assert 0 < layers[0] < 3, "of six layers"
    expected = Job(manifest({"entrypoint": "bamboo_trainer.models.mlp:build", "config": CONFIG})).run()
    assert job.state.losses == expected.state.losses
    digests = [digest for cell, digest in job.state.finished if cell.pipeline == 0]
    assert add_digests(digests) == add_digests(expected.digests)
