"""A real Prometheus scrapes a real `bamboo run` in which a worker is killed."""

import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from bamboo_core.metrics.exposition import Exporter
from dashboard_kit import ROOT
from metrics_kit import check_page
from prometheus_kit import prometheus

pytestmark = pytest.mark.slow

JOB = """
apiVersion: bamboo.dev/v1alpha1
kind: BambooJob
metadata: {name: local, namespace: mine}
spec:
  task: {entrypoint: "bamboo_trainer.models.mlp:build"}
  training: {steps: 1000000, globalBatchSize: 32, microBatchSize: 8}
  topology: {stages: 2}
"""


def test_a_run_is_scraped(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (example,) = re.findall(
        r"```yaml\n(scrape_configs:\n  - job_name: bamboo-run.*?)```", (ROOT / "docs/metrics.md").read_text(), re.DOTALL
    )
    config = yaml.safe_load(example.replace("127.0.0.1:9090", f"127.0.0.1:{port}"))
    config["global"] = {"scrape_interval": "1s"}
    command = [sys.executable, "-m", "bamboo", "run", str(tmp_path / "job.yaml"), "--quiet"]
    command += ["--metrics-port", str(port), "--preempt", "at:5:1"]
    with prometheus(tmp_path, config) as server:
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            ours = 'namespace="mine", job="local"'
            server.until(f'bamboo_job_takeover_pause_seconds_count{{{ours}, notice="false"}} == 1', 120)
            server.until(f"rate(bamboo_job_samples_total{{{ours}}}[10s]) > 0")
            (sample,) = server.until(f'bamboo_job_preemptions_total{{{ours}, notice="false"}}')
            assert sample["value"][1] == "1"
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                check_page(Exporter.RUN, answer.read().decode(), complete=False)
        finally:
            run.send_signal(signal.SIGINT)
            said, _ = run.communicate(timeout=60)
        assert run.returncode == 130, said.decode()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)
