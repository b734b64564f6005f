"""Dashboards and alerts against a real Prometheus, which scrapes the operator and a job that has lost workers."""

import contextlib
import json
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bamboo_core.metrics.exposition import Exporter
from cluster.client import Json
from cluster.handle import Cluster
from dashboard_kit import FOLDER, ROOT, Asked, alerts, queries
from metrics_kit import check_page
from operator_jobs import claimed, manifest
from operator_process import Job, Operator
from prometheus_kit import Prometheus, prometheus

pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

SECONDS = 240  # for all data to be there
UNPROTECTED = "bamboo_job_protected", "== 0"  # in a query that shows only a job that is not protected
SOMETIMES = "bamboo_job_straggler_microbatch_seconds"  # only while a worker is slow, which is chance here


def scrape_config(operator: Operator, pods: Path) -> dict[str, Any]:
    """That of docs/metrics.md; but the operator is no pod here, and Debian's Prometheus knows no Kubernetes.

    pods: the file in which it finds what it would have heard from the API server.
    """
    page = (ROOT / "docs" / "metrics.md").read_text()
    example = re.search(r"```yaml\n(scrape_configs:.*?)```", page, re.DOTALL)
    assert example is not None
    config: dict[str, Any] = yaml.safe_load(example[1])
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    for job in jobs.values():
        assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    of_operator, of_workers = jobs["bamboo-operator"], jobs["bamboo-workers"]
    of_workers["file_sd_configs"] = [{"files": [str(pods)], "refresh_interval": "1s"}]
    del of_operator["relabel_configs"]
    of_operator["static_configs"] = [{"targets": [f"127.0.0.1:{operator.web_port}"]}]
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "2s"}
    config["rule_files"] = [str(FOLDER / "alerts.yaml")]
    return config


def discovered(pod: Json) -> Iterator[dict[str, Any]]:
    """What Prometheus' role `pod` makes of a pod: a target for each port."""
    labels = {f"pod_label_{re.sub('[^a-zA-Z0-9_]', '_', key)}": text for key, text in pod["metadata"]["labels"].items()}
    facts = {"namespace": pod["metadata"]["namespace"], "pod_name": pod["metadata"]["name"], **labels}
    facts["pod_phase"] = pod["status"].get("phase", "")
    for container in pod["spec"]["containers"] if pod["status"].get("podIP") else ():
        for port in container.get("ports") or ():
            known = {**facts, "pod_container_port_name": port.get("name", "")}
            target = f"{pod['status']['podIP']}:{port['containerPort']}"
            yield {"targets": [target], "labels": {f"__meta_kubernetes_{key}": text for key, text in known.items()}}


@contextlib.contextmanager
def discovery(cluster: Cluster, namespace: str, file: Path) -> Iterator[None]:
    """Keeps the file up to date with the namespace's pods."""
    over = threading.Event()

    def follow() -> None:
        while not over.wait(0.5):
            found = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
            (new := file.with_suffix(".new")).write_text(json.dumps([t for pod in found for t in discovered(pod)]))
            new.rename(file)

    file.write_text("[]")
    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_every_panel_shows_something_and_every_alert_can_be_asked(
    installed: Cluster, namespace: str, operator: Operator, tmp_path: Path
) -> None:
    pods = tmp_path / "pods.json"
    with (
        discovery(installed, namespace, pods),
        prometheus(tmp_path, scrape_config(operator, pods)) as server,
    ):
        document = manifest("watched", steps=100_000)
        model = {"size": "tiny", "data": {}, "evaluation": {}}  # which has data to evaluate on
        document["spec"]["task"] = {"entrypoint": "bamboo_trainer.models.llama:build", "config": model}
        document["spec"]["training"]["evaluation"] = {"everySteps": 20}
        sure = {"name": "sure", "capacity": "OnDemand", "preset": "Karpenter", "pricePerHour": "3.00"}
        document["spec"]["nodePools"].append(sure | {"afterSeconds": 100_000})  # what spot prices are compared with
        document["spec"]["checkpoint"] = {"storage": claimed(installed, namespace), "everySteps": 20}
        job = Job(installed.api, namespace, document)
        job.until("Running")
        job.step(20)
        ours = f'namespace="{namespace}", job="watched"'
        server.until(f"bamboo_worker_time_seconds_total{{{ours}}}")
        _a_stranger_knocks(operator, namespace)
        _a_notice(installed, namespace, job)
        _a_loss(installed, namespace, job)
        server.until(f'bamboo_job_takeover_pause_seconds_count{{{ours}, notice="false"}} > 0', 120)
        server.until(f'bamboo_job_preemptions_total{{{ours}, notice="true"}} > 0', 60)
        _check_targets(server)
        _check_pages(server, operator)
        unprotected = [asked for asked in queries() if all(part in asked.expr for part in UNPROTECTED)]
        sometimes = [asked for asked in queries() if SOMETIMES in asked.expr]
        always = [asked for asked in queries() if asked not in (*unprotected, *sometimes)]
        _check_panels(server, namespace, always)
        _check_alerts(server)
        _check_numbers(server, ours, job)
        assert unprotected
        job.edit({"redundancy": {"mode": "None"}})
        _check_panels(server, namespace, unprotected)
        job.delete()
        job.until_gone()
        assert 'job="watched"' not in _page(operator)


def _a_stranger_knocks(operator: Operator, namespace: str) -> None:
    url = f"https://127.0.0.1:{operator.port}/v1/jobs/{namespace}/watched/workers"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, timeout=10, context=operator.trusting)
    refused.value.close()


def _owners(job: Job) -> list[str]:
    found: list[str] = json.loads(job.status()["plan"])["pipelines"][0]
    return found


def _a_notice(cluster: Cluster, namespace: str, job: Job) -> None:
    node = job.pods()[_owners(job)[0]]["spec"]["nodeName"]
    cluster.taint(node, "cloud.google.com/impending-node-termination", "", "NoSchedule")
    job.told("TakenOver")
    cluster.untaint(node, "cloud.google.com/impending-node-termination")


def _a_loss(cluster: Cluster, namespace: str, job: Job) -> None:
    before = job.status()["preemptions"]
    cluster.signal(namespace, _owners(job)[1], signal.SIGKILL)
    job.wait(lambda status: status["preemptions"] > before)


def _check_targets(server: Prometheus) -> None:
    """The labels are those of the docs' configuration."""
    workers = [target for target in server.targets() if target["scrapePool"] == "bamboo-workers"]
    assert any(target["health"] == "up" for target in workers), workers
    names = {sample["metric"]["pod"] for sample in server.query("bamboo_worker_info")}
    told = {sample["metric"]["worker"] for sample in server.query("bamboo_worker_info")}
    assert names == told, "the pod's name is the worker's"


def _page(operator: Operator) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{operator.web_port}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def _check_numbers(server: Prometheus, ours: str, job: Job) -> None:
    """They are what they say they are."""

    def one(expr: str) -> float:
        (sample,) = server.query(expr)
        return float(sample["value"][1])

    assert one(f"sum(bamboo_job_takeover_pause_seconds_count{{{ours}}})") == job.status()["takeovers"]
    assert one(f"bamboo_job_samples_total{{{ours}}} - 16 * bamboo_job_step{{{ours}}}") == 0, "one operator has seen all"
    useful, paid = (f"bamboo_job_{what}_worker_seconds_total{{{ours}}}" for what in ("useful", "paid"))
    assert 0 < one(f"{useful} / {paid}") < 1
    step = job.status()["checkpoint"]["lastStep"]
    assert one(f"bamboo_job_checkpoint_step{{{ours}}}") <= step + 100
    assert one(f'sum(bamboo_job_checkpoints_abandoned_total{{{ours}, reason="StoreFailed"}})') == 0
    assert one(f"max(sum by (pod) (rate(bamboo_worker_time_seconds_total{{{ours}}}[1m])))") < 1.1
    price = one(f"bamboo_job_cost_per_hour{{{ours}}} / on () sum(bamboo_job_paid_pods{{{ours}}})")
    assert price == pytest.approx(0.9)


def _check_pages(server: Prometheus, operator: Operator) -> None:
    """Everything that is served is declared, and promtool has nothing against it."""
    check_page(Exporter.OPERATOR, _page(operator), complete=True)
    seen = 0
    for target in server.targets():
        if target["scrapePool"] == "bamboo-workers" and target["health"] == "up":
            with contextlib.suppress(OSError), urllib.request.urlopen(target["scrapeUrl"], timeout=30) as answer:
                text = answer.read().decode()
                check_page(Exporter.WORKER, text, complete=False)
                seen += 1
    assert seen


def _check_panels(server: Prometheus, namespace: str, waiting: list[Asked]) -> None:
    """Each of these shows something in the end."""
    variables = {
        "datasource": "prometheus",
        "namespace": namespace,
        "job": "watched",
        "__rate_interval": "30s",
        "__range": "10m",
        "__interval": "5s",
    }
    deadline = time.monotonic() + SECONDS
    while waiting:
        waiting = [asked for asked in waiting if not _finite(server.query(asked.filled(variables)))]
        if waiting and time.monotonic() > deadline:
            told = "\n".join(f"{a.dashboard}: {a.panel}: {a.filled(variables)}" for a in waiting)
            raise AssertionError(f"these show nothing:\n{told}")
        time.sleep(1)


def _finite(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [sample for sample in samples if sample["value"][1] not in ("NaN", "+Inf", "-Inf")]


def _check_alerts(server: Prometheus) -> None:
    for alert in alerts():
        server.query(alert["expr"])  # fails if it cannot be asked
    rules = server.rules()
    assert {rule["name"] for rule in rules} == {alert["alert"] for alert in alerts()}
    wrong = {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] not in ("ok", "unknown")}
    assert not wrong
    firing = {rule["name"] for rule in rules if rule["state"] == "firing"}
    assert not firing & {"BambooOperatorDown", "BambooJobFailed", "BambooJobNoProgress"}, firing
