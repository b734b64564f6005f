"""Dashboards and alerts: files as generated, metrics that exist, and the alerts under promtool."""

import contextlib
import json
import re
import runpy
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bamboo_core.metrics.catalog import EVERY_METRIC
from bamboo_core.metrics.exposition import Metric, MetricKind
from cluster.build import cache_folder

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "dashboards"
NAMES = ("fleet", "job", "cost")
PAGE = ROOT / "docs" / "alerts.md"
SCRAPED = {"instance", "pod", "namespace", "job"}  # labels that a scrape may add
MISSING = "needs Prometheus: apt-get install prometheus (or apt-get and dpkg-deb, and Debian's packages within reach)"


def dashboard(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def panels(name: str) -> Iterator[dict[str, Any]]:
    """Yield the panels of a dashboard, without row headings."""
    yield from (panel for panel in dashboard(name)["panels"] if panel["type"] != "row")


def queries() -> list[str]:
    """Return the queries of all panels and annotations in all dashboards."""
    found = []
    for name in NAMES:
        found += [target["expr"] for panel in panels(name) for target in panel["targets"]]
        found += [note["expr"] for note in dashboard(name)["annotations"]["list"]]
    return found


def alerts() -> list[dict[str, Any]]:
    document = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def binary(name: str) -> str:
    """Return the path of a Prometheus program, from the system or downloaded from Debian; else skip the test."""
    if found := shutil.which(name):
        return found
    cache = cache_folder() / "prometheus"
    if not (cache / "usr/bin" / name).exists():
        _fetch(cache)
    return str(cache / "usr/bin" / name)


def _fetch(cache: Path) -> None:
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        pytest.skip(MISSING)
    cache.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="prometheus-", dir=cache.parent))
    try:
        download = ["apt-get", "download", "-o", "APT::Sandbox::User=", "prometheus"]
        done = subprocess.run(download, cwd=work, capture_output=True, text=True, timeout=100, check=False)
        packages = sorted(work.glob("prometheus_*.deb"))
        if done.returncode or not packages:
            pytest.skip(f"{MISSING}: {done.stderr.strip()[-200:]}")
        subprocess.run(["dpkg-deb", "-x", str(packages[0]), str(work / "root")], check=True, timeout=60)
        with contextlib.suppress(OSError):  # somebody else was faster
            (work / "root").rename(cache)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def promtool(*arguments: str, stdin: str | None = None) -> str:
    """Run promtool and return its output. Fails the test if promtool refuses its input."""
    done = subprocess.run(
        [binary("promtool"), *arguments], input=stdin, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _metrics(expr: str) -> list[tuple[Metric, set[str]]]:
    """Return each metric that a query names, with the labels by which it selects. An unknown metric fails the test."""
    known = {name: metric for metric in EVERY_METRIC for name in _series(metric)}
    found = []
    for name, selector in re.findall(r"\b(bamboo_\w+)(?:{([^}]*)})?", expr):
        assert name in known, f"{name} in {expr} is not declared"
        found.append((known[name], set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))))
    return found


def _series(metric: Metric) -> list[str]:
    if metric.kind is MetricKind.HISTOGRAM:
        return [f"{metric.name}_{part}" for part in ("bucket", "sum", "count")]
    return [metric.name]


def test_every_query_is_about_metrics_and_labels_that_are_declared() -> None:
    asked = queries() + [alert["expr"] for alert in alerts()]
    for expr in asked:
        for metric, labels in _metrics(expr):
            added = SCRAPED if metric.name.startswith("bamboo_worker_") else {"instance"}
            extra = {"le"} if metric.kind is MetricKind.HISTOGRAM else set()
            assert labels <= {*metric.labels, *added, *extra}, (expr, metric.name)


def test_every_metric_is_looked_at_somewhere() -> None:
    looked_at = {metric.name for expr in queries() for metric, _ in _metrics(expr)}
    looked_at |= {metric.name for alert in alerts() for metric, _ in _metrics(alert["expr"])}
    unseen = {metric.name for metric in EVERY_METRIC} - looked_at
    assert unseen == {
        "bamboo_job_metric",  # the task's own metrics, unknown to dashboards
        "bamboo_job_lost_samples_total",  # for a query of one's own, when a node is lost in a strange way
        "bamboo_worker_compile_seconds",  # once for a stage, before it is run
    }


def test_every_alert_has_a_section_and_what_a_person_needs() -> None:
    names = [alert["alert"] for alert in alerts()]
    assert len(names) == len(set(names))
    assert re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE) == names
    for alert in alerts():
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
        assert alert["annotations"]["runbook_url"] == f"docs/alerts.md#{alert['alert'].lower()}"


def test_alerts_name_panels_that_exist() -> None:
    titles = {panel["title"] for name in NAMES for panel in panels(name)}
    titles |= {row["title"] for name in NAMES for row in dashboard(name)["panels"] if row["type"] == "row"}
    titles |= {dashboard(name)["title"] for name in NAMES}
    assert set(re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", PAGE.read_text())) <= titles


def test_every_alert_fires_when_it_should_and_only_then() -> None:
    files = sorted((FOLDER / "tests").glob("*.yaml"))
    promtool("test", "rules", *map(str, files))
    tests: list[Any] = [test for file in files for test in yaml.safe_load(file.read_text())["tests"]]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert fired == {alert["alert"] for alert in alerts()}


def test_the_tables_of_metrics_have_every_metric() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    whole = runpy.run_path(str(ROOT / "docs" / "generate_metrics.py"))["page"](page, whole=True)
    for metric in EVERY_METRIC:
        assert f"`{metric.name}`" in page
        assert f"| `{metric.name}` | {metric.help}" in whole
