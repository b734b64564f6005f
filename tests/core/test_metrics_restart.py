"""What Prometheus makes of a job's counters when its operator is made anew, or another one takes over.

The new operator knows of the one before only what the job's status says, which is up to 15 s old. Costs are in the
status, and what workers cost while nobody looked is made up for; everything else is counted as it is seen.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from bamboo_core.coordinator.checkpoint_counts import CheckpointCounts, RestoreCause
from bamboo_core.coordinator.coordinator import initial
from bamboo_core.coordinator.events import CheckpointSummary, Status, Tick
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.job.api_object import written
from bamboo_core.job.status import BambooJobStatus
from bamboo_core.metrics.exposition import Exporter, MetricsPage
from bamboo_core.names import LABEL_JOB_NAME, LABEL_NODE_POOL
from bamboo_operator.cluster.cache import ClusterCache
from bamboo_operator.http.metrics import job_page
from bamboo_operator.jobs import cost_counter
from bamboo_operator.jobs.cost_counter import CostCounter
from bamboo_operator.jobs.meter import JobMeter, OperatorCounts
from bamboo_operator.kube.client import ApiClient
from bamboo_operator.kube.objects import JobIdentity
from bamboo_operator.pods.job_pods import JobPods
from bamboo_operator.status.document import job_status
from bamboo_operator.status.operated_job import OperatedJob
from bamboo_operator.status.writer import StatusWriter
from job_metrics_kit import exposed
from operator_kit import NOW, at, job, pod, said, viewed
from prometheus_kit import promtool

PER_HOUR, MINUTES, RESTART = 60, 60, 40
SUSPENDED, RESUMED = 22, 33
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
COSTS = {"cost": 1, "on_demand_cost": 3}  # in a minute
PAID = "increase((max by (namespace, job) (bamboo_job_{}_total))[1h:1m])"  # as the dashboards ask
COUNTED = (  # over the hour; what happened while nobody looked is not
    ("bamboo_job_samples_total", 16 * MINUTES),
    ('bamboo_job_preemptions_total{notice="false"}', 12),
    ("bamboo_job_restarts_total", 6),
    ("bamboo_job_repeated_steps_total", 3 * 12),
    ("bamboo_job_checkpoint_duration_seconds_count", MINUTES),
    ('bamboo_job_restores_total{cause="StageLost"}', 12),
    ("bamboo_job_takeover_pause_seconds_count", 0),
)


def state(step: int, trained: int) -> CoordinatorState:
    """A coordinator's that has seen these steps."""
    begun = initial(job(training=SPEC["training"]), {}, secret="", save_path=None, now=0.0)
    return replace(begun, progress=replace(begun.progress, step=step, trained=trained))


class Minutes:
    """The time, for whoever counts costs."""

    def __init__(self) -> None:
        self.now = 0

    def monotonic(self) -> float:
        return 60.0 * self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Minutes:
    clock = Minutes()
    monkeypatch.setattr(cost_counter, "time", clock)
    monkeypatch.setattr(cost_counter, "utc_now", lambda: NOW + timedelta(minutes=clock.now))
    return clock


class Cluster:
    """Has one worker's pod, or none. It is there whether or not an operator is."""

    def __init__(self, clock: Minutes) -> None:
        self._clock, self._pod = clock, dict[str, Any]()
        self.start()

    def start(self) -> None:
        placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(60 * self._clock.now)}
        made = pod(conditions=[placed])
        made["spec"]["nodeName"] = "n1"
        made["metadata"] |= {"name": "tiny-w0", "namespace": "default", "uid": "p"}
        made["metadata"]["labels"] = {LABEL_JOB_NAME: "tiny", LABEL_NODE_POOL: "spot"}
        made["metadata"]["ownerReferences"] = [{"kind": "BambooJob", "uid": "u", "controller": True}]
        self._pod = made

    def stop(self) -> None:
        self._pod = {}

    def seen(self) -> ClusterCache:
        """By an operator that begins to look."""
        cache = ClusterCache()
        self.show(cache)
        return cache

    def show(self, cache: ClusterCache) -> None:
        if self._pod:
            cache.pod_event("MODIFIED", self._pod)
        else:
            cache.forget_pod(("default", "tiny-w0"), "p")


class Operated:
    """A job in one operator's process, a minute at a time; its coordinator counts from its own start."""

    def __init__(self, status: Mapping[str, Any], cluster: Cluster, step: int = 0) -> None:
        self._cluster, self._cache = cluster, cluster.seen()
        identity, api = JobIdentity(("default", "tiny"), "u"), cast(ApiClient, None)  # nothing is asked or written
        self._meter = JobMeter(OperatorCounts())
        self._writer = StatusWriter(identity, status, api)
        self._cost = CostCounter(JobPods(identity, self._cache), self._writer, self._meter)
        self._said: Status | None = None
        self.first = self._page()  # before anything is known but the status
        self._writer.update(generation=1, spec=job(**SPEC))
        self._writer.begin()
        self._cost.count(joined=())
        self._meter.begin()
        self._step, self._trained, self._lost = step, 0, 0

    @property
    def written(self) -> BambooJobStatus:
        return self._writer.written

    def _page(self) -> str:
        page = MetricsPage(Exporter.OPERATOR)
        facts = self._writer.facts
        view = viewed(facts.spec or job(**SPEC), self.written, self._said)
        job_page(page, OperatedJob(view=view, facts=facts), self._meter)
        return exposed(page)

    def _commit(self) -> None:
        before = state(self._step, self._trained)
        self._step, self._trained = self._step + 1, self._trained + 1
        self._meter.handled(Tick(), before, state(self._step, self._trained))

    def minute(self, n: int, *, written: bool = True) -> str:
        """The page at its end. written: is the status by then?"""
        self._commit()
        self._lost += n % 5 == 0
        saved = CheckpointCounts(repeated=3 * self._lost, restores={RestoreCause.STAGE_LOST: self._lost})
        for _ in range(self._trained):
            saved = saved.saved(1.0, 0.01)
        kept = CheckpointSummary(step=self._step, age=1.0, seconds=1.0, bytes=8, counts=saved)
        self._writer.update(pods={"spot": 1})
        self._cost.count(repeated=30.0 if n % 5 == 0 else 0.0, joined=())
        self._cluster.show(self._cache)
        self._cost.count(joined=())
        self._said = said(step=self._step, preemptions=self._lost, restarts=self._lost // 2, checkpoint=kept)
        if written:
            self._writer.written = self.status()
        return self._page()

    def status(self) -> BambooJobStatus:
        """As it is to be written."""
        return job_status(self._said, self._writer.written, self._writer.facts)


def hour(clock: Minutes, stale: int) -> Iterator[tuple[int, int, str]]:
    """Operator, minute and page. stale: minutes by which the status that the second one finds is old."""
    cluster = Cluster(clock)
    first = Operated({}, cluster)
    for clock.now in range(1, RESTART + 1):
        yield 1, clock.now, first.minute(clock.now, written=clock.now <= RESTART - stale)
    second = Operated(written(first.written), cluster, RESTART)
    for clock.now in range(RESTART + 1, MINUTES + 1):
        yield 2, clock.now, second.minute(clock.now)


def disturbed_hour(clock: Minutes) -> Iterator[tuple[int, int, str]]:
    """Four operators, each for ten minutes, and five without one after each; nobody has written its last two minutes.

    The job is suspended while the second one works, and resumed ten minutes later, while the third one does.
    """
    cluster, status = Cluster(clock), dict[str, Any]()
    for number, begins in enumerate(range(0, MINUTES, 15)):
        clock.now = begins
        operated = Operated(status, cluster)
        yield number, begins, operated.first
        for clock.now in range(begins + 1, begins + 11):
            if clock.now == SUSPENDED:
                cluster.stop()
            elif clock.now == RESUMED:
                cluster.start()
            yield number, clock.now, operated.minute(clock.now, written=clock.now <= begins + 8)
        status = written(operated.written)


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


def judge(folder: Path, pages: Iterator[tuple[int, int, str]], asked: Mapping[str, float], *, same: bool) -> None:
    """promtool computes each expression at the end of the hour, and finds about that."""
    tests = [
        {
            "expr": f"(({expr}) >= bool {true * 0.95}) * (({expr}) <= bool {true * 1.05})",
            "eval_time": f"{MINUTES}m",
            "exp_samples": [{"labels": '{namespace="default", job="tiny"}', "value": 1}],
        }
        for expr, true in asked.items()
    ]
    test = {"interval": "1m", "input_series": series(pages, same=same), "promql_expr_test": tests}
    file = folder / "restart.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "1m", "tests": [test]}))
    promtool("test", "rules", str(file))


@pytest.mark.parametrize("same", [True, False], ids=["restarted", "another takes over"])
@pytest.mark.parametrize("stale", [0, 3])
def test_increases_count_everything_once(tmp_path: Path, clock: Minutes, same: bool, stale: int) -> None:
    """A counter of a process that went on from the status would count all that came before once more, or a part."""
    unseen = 0 if same else 1  # minutes: the first value of a series that is new counts for nothing
    asked = {f"{BY_JOB} (increase({name}[1h]))": true * (1 - unseen / MINUTES) for name, true in COUNTED}
    asked |= {PAID.format(name): MINUTES * price for name, price in COSTS.items()}
    if same:
        asked |= {f"{BY_JOB} (increase(bamboo_job_{n}_total[1h]))": MINUTES * price for n, price in COSTS.items()}
    judge(tmp_path, hour(clock, stale), asked, same=same)


@pytest.mark.parametrize("same", [True, False], ids=["restarted", "another takes over"])
def test_increases_tell_what_was_paid_over_restarts_gaps_and_a_suspension(
    tmp_path: Path, clock: Minutes, same: bool
) -> None:
    last = MINUTES - 15 + 8  # what is in the status by the end
    paid = last - (RESUMED - SUSPENDED)
    judge(tmp_path, disturbed_hour(clock), {PAID.format(n): paid * price for n, price in COSTS.items()}, same=same)


def test_the_first_page_of_an_operator_has_what_was_paid_before(clock: Minutes) -> None:
    """Before the API server has answered anything but the list of jobs."""
    first = Operated({}, Cluster(clock))
    for clock.now in range(1, 31):
        first.minute(clock.now)
    second = Operated(written(first.written), Cluster(clock), 30)
    for name, value in (("cost", 30.0), ("on_demand_cost", 90.0), ("repeated_cost", 3.0)):
        assert f'bamboo_job_{name}_total{{job="tiny",namespace="default"}} {value}' in second.first


def test_what_was_saved_survives_a_restart(clock: Minutes) -> None:
    cluster = Cluster(clock)
    first = Operated({}, cluster)
    for clock.now in range(1, 31):
        first.minute(clock.now)
    status = first.status()
    assert status.cost.total == "30.0000"
    assert (status.cost.on_demand_total, status.cost.saved) == ("90.0000", "60.0000")
    assert status.cost.repeated == "3.0000"
    second = Operated(written(status), cluster, 30)
    page = ""
    for clock.now in range(31, 41):
        page = second.minute(clock.now)
    assert 'bamboo_job_saved_so_far{job="tiny",namespace="default"} 80.0' in page
    assert 'bamboo_job_repeated_cost_so_far{job="tiny",namespace="default"} 4.0' in page
    again = second.status()
    assert (again.cost.saved, again.cost.compared_since) == ("80.0000", status.cost.compared_since)
