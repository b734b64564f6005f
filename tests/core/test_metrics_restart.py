"""What Prometheus makes of a job's counters when its operator is made anew, or another one takes over.

The new operator knows of the one before only what the job's status says, which is up to 15 s old.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from bamboo.coordinator.checkpoint_counts import CheckpointCounts, RestoreCause
from bamboo.coordinator.events import CheckpointSummary, Tick
from bamboo.metrics.exposition import Exporter, MetricsPage
from bamboo_operator.http.metrics import job_page
from bamboo_operator.jobs.meter import OperatorCounts
from bamboo_operator.jobs.reconciler import JobReconciler
from bamboo_operator.jobs.training import add_cost
from bamboo_operator.status.document import job_status
from job_metrics_kit import exposed
from operator_kit import job, said
from prometheus_kit import promtool

PER_HOUR, MINUTES, RESTART = 60, 60, 40
SPEC = {
    "task": {"entrypoint": "a:b"},
    "training": {"steps": 10_000, "globalBatchSize": 16, "microBatchSize": 2},
    "topology": {"stages": 2},
    "nodePools": [
        {"name": "spot", "pricePerHour": str(PER_HOUR)},
        {"name": "sure", "capacity": "OnDemand", "pricePerHour": str(3 * PER_HOUR), "afterSeconds": 300},
    ],
}
BY_JOB = "sum by (namespace, job)"
COUNTED = (  # over the hour; what happened while nobody looked is not
    ("bamboo_job_cost_total", MINUTES),
    ("bamboo_job_on_demand_cost_total", 3 * MINUTES),
    ("bamboo_job_samples_total", 16 * MINUTES),
    ('bamboo_job_preemptions_total{notice="false"}', 12),
    ("bamboo_job_restarts_total", 6),
    ("bamboo_job_repeated_steps_total", 3 * 12),
    ("bamboo_job_repeated_cost_total", 6),  # ten seconds for each
    ("bamboo_job_checkpoint_duration_seconds_count", MINUTES),
    ('bamboo_job_restores_total{cause="StageLost"}', 12),
    ("bamboo_job_takeover_pause_seconds_count", 0),
)


def state(step: int, trained: int) -> Any:
    """A coordinator's, as far as it is counted."""
    return SimpleNamespace(
        step=step, spec=job(training=SPEC["training"]), plan=None, step_seconds=(), usual_step=None,
        lost_microbatches=0, trained=trained,
    )  # fmt: skip


class Operated:
    """A job in one operator's process, a minute at a time; its coordinator counts from its own start."""

    def __init__(self, status: Mapping[str, Any], step: int) -> None:
        metadata = {"name": "tiny", "namespace": "default", "uid": "u", "generation": 1}
        shared: Any = SimpleNamespace(counts=OperatorCounts(), cluster=None, api=None)
        self.job = JobReconciler({"metadata": metadata, "spec": SPEC, "status": status}, shared)
        self.job._spec._read()
        self.job._status.begin()
        self.job.meter.begin()
        self._step, self._trained, self._lost = step, 0, 0

    def _commit(self) -> None:
        before = state(self._step, self._trained)
        self._step, self._trained = self._step + 1, self._trained + 1
        self.job.meter.handled(Tick(), before, state(self._step, self._trained))

    def minute(self, n: int) -> str:
        """The page at its end."""
        self._commit()
        self._lost += n % 5 == 0
        saved = CheckpointCounts(repeated=3 * self._lost, restores={RestoreCause.STAGE_LOST: self._lost})
        for _ in range(self._trained):
            saved = saved.saved(1.0, 0.01)
        kept = CheckpointSummary(step=self._step, age=1.0, seconds=1.0, bytes=8, counts=saved)
        status = said(step=self._step, preemptions=self._lost, restarts=self._lost // 2, checkpoint=kept)
        runner: Any = SimpleNamespace(status=lambda: status, record=None)
        self.job._status.update(pods={"spot": 1})
        repeated = 30.0 if n % 5 == 0 else 0.0
        add_cost(self.job._status, self.job.meter, {"spot": 1}, 60.0, repeated=repeated)
        self.job._runner = runner
        page = MetricsPage(Exporter.OPERATOR)
        job_page(page, self.job.view(), self.job.meter)
        return exposed(page)


def hour(stale: int) -> Iterator[tuple[int, int, str]]:
    """Operator, minute and page. stale: minutes by which the status that the second one finds is old."""
    first, found = Operated({}, 0), dict[str, Any]()
    for n in range(1, RESTART + 1):
        yield 1, n, first.minute(n)
        if n == RESTART - stale:
            total = first.job._status.facts.cost
            found = {"cost": {"total": f"{total}"}, "preemptions": n // 5, "restarts": n // 10, "epoch": 3}
    second = Operated(found, RESTART)
    for n in range(RESTART + 1, MINUTES + 1):
        yield 2, n, second.minute(n)


def series(pages: Iterator[tuple[int, int, str]], *, same: bool) -> list[dict[str, str]]:
    """promtool's input: a value for each minute, or none. same: both operators are one target."""
    found: dict[str, list[str]] = {}
    for operator, minute, text in pages:
        for line in text.splitlines():
            if line.startswith("bamboo_job_") and "_created" not in line:
                name, _, value = line.rpartition(" ")
                labelled = f'{name[:-1]},instance="{1 if same else operator}"}}'
                found.setdefault(labelled, ["_"] * (MINUTES + 1))[minute] = value
    for values in found.values():
        gone = max(n for n, value in enumerate(values) if value != "_") + 1
        values[gone : gone + 1] = ["stale"] if gone <= MINUTES else []
    return [{"series": name, "values": " ".join(values)} for name, values in sorted(found.items())]


@pytest.mark.parametrize("same", [True, False], ids=["restarted", "another takes over"])
@pytest.mark.parametrize("stale", [0, 3])
def test_increases_count_everything_once(tmp_path: Path, same: bool, stale: int) -> None:
    """A counter that went on from the status would count all that came before once more, or a part of it."""
    unseen = 0 if same else 2 / MINUTES  # the first value of a series that is new counts for nothing
    asked = [
        {
            "expr": f"({BY_JOB} (increase({name}[1h])) >= bool {true * (0.95 - unseen)})"
            f" * ({BY_JOB} (increase({name}[1h])) <= bool {true * 1.05})",
            "eval_time": f"{MINUTES}m",
            "exp_samples": [{"labels": '{namespace="default", job="tiny"}', "value": 1}],
        }
        for name, true in COUNTED
    ]
    test = {"interval": "1m", "input_series": series(hour(stale), same=same), "promql_expr_test": asked}
    file = tmp_path / "restart.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "1m", "tests": [test]}))
    promtool("test", "rules", str(file))


def test_what_was_saved_survives_a_restart_but_for_what_the_status_does_not_know_yet() -> None:
    first = Operated({}, 0)
    for n in range(1, 31):
        first.minute(n)
    status = job_status(None, {}, first.job._status.facts)
    assert status["cost"]["total"] == "30.0000"
    assert (status["cost"]["onDemandTotal"], status["cost"]["saved"]) == ("90.0000", "60.0000")
    assert status["cost"]["repeated"] == "3.0000"
    second = Operated(status, 30)
    page = ""
    for n in range(31, 41):
        page = second.minute(n)
    assert 'bamboo_job_saved_so_far{job="tiny",namespace="default"} 80.0' in page
    assert 'bamboo_job_repeated_cost_so_far{job="tiny",namespace="default"} 4.0' in page
    again = job_status(None, status, second.job._status.facts)
    assert (again["cost"]["saved"], again["cost"]["comparedSince"]) == ("80.0000", status["cost"]["comparedSince"])
