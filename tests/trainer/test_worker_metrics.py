"""The metrics that a worker serves: use of time, traffic, memory."""

import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.checkpoint.manifest import DataRecord
from bamboo_core.control.memory import SentTraffic, Traffic
from bamboo_core.planning.plan import Cell
from bamboo_trainer.checkpoint.worker_checkpoints import WorkerCheckpoints
from bamboo_trainer.frames import FORMS, Address, Frame, FrameFacts, FrameKind
from bamboo_trainer.worker import metrics
from bamboo_trainer.worker.agent import KINDS, TrafficMeter, WorkerAgent, WorkerSettings, by_kind
from bamboo_trainer.worker.telemetry import Spans
from cluster.control_plane import free_ports
from manifest_kit import bamboojob, training
from metrics_kit import check_page
from recording_transport import Told
from training_job import Job

MANIFEST = bamboojob(
    "small",
    task={"entrypoint": "bamboo_trainer.models.mlp:build"},
    training=training(6, 16, 8),
    topology={"stages": 2},
)


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def agent() -> Iterator[WorkerAgent]:
    worker = WorkerAgent("w0", "ws://127.0.0.1:1/", lambda: "token", "", Spans(), WorkerSettings())
    yield worker
    worker.transport.close(0.0)


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def test_a_worker_serves_its_engines_numbers(agent: WorkerAgent, port: int) -> None:
    metrics.serve(agent, "127.0.0.1", port)
    check_page("bamboo_worker_", scrape(port), complete=False)  # nothing has begun yet
    job = Job(MANIFEST)
    job.run()
    roots = [node for node in job.nodes.values() if Cell(0, 0) in node.inside.executor.cells]
    agent.engine, agent.devices = roots[0].engine, (torch.device("cpu"),)
    agent.checkpoints = WorkerCheckpoints(
        job.spec, job.spec.topology.stages, Told().tell, DataRecord(samples=8, order="")
    )
    agent.checkpoints.keep(CheckpointId(step=1, id="a"), {}, 0.25)
    text = scrape(port)
    check_page("bamboo_worker_", text, complete=True)
    lines = text.splitlines()
    assert "bamboo_worker_step_duration_seconds_count 5.0" in lines
    assert "bamboo_worker_checkpoint_stall_seconds_total 0.25" in lines
    assert "bamboo_worker_checkpoint_written_bytes_total 0.0" in lines
    peak, limit = (
        float(line.split()[-1]) for line in lines if re.match("bamboo_worker_memory_(peak|limit)_bytes ", line)
    )
    assert 0 < peak < limit


def test_what_is_sent_is_counted_by_kind_and_what_is_sent_again(agent: WorkerAgent) -> None:
    agent.transport.peers({"w1": ("127.0.0.1", 1)})
    address = Address(FrameKind.ACTIVATION, 0, 1, 0, 0)
    agent.transport.send("w1", Frame(address=address, epoch=1))
    once = agent.transport.sent[FrameKind.ACTIVATION]
    assert once > 0
    assert sum(agent.transport.resent) == 0
    again = Frame(address=address, epoch=1, payload=FrameFacts(again=True))
    agent.transport.send("w1", again)
    assert agent.transport.sent[FrameKind.ACTIVATION] == once + agent.transport.resent[FrameKind.ACTIVATION]
    agent.transport.send("stranger", again)
    assert agent.transport.sent[FrameKind.ACTIVATION] == once + agent.transport.resent[FrameKind.ACTIVATION]


def test_every_kind_of_frame_that_carries_tensors_counts_as_a_kind_of_its_own() -> None:
    with_tensors = [kind for kind, form in FORMS.items() if form.most > 0]
    assert {kind for kind in with_tensors if KINDS.get(kind, "control") == "control"} == set()
    numbers = [0] * (max(FrameKind) + 1)
    numbers[FrameKind.PARTIAL_SUM], numbers[FrameKind.RESULT], numbers[FrameKind.READY] = 3, 4, 5
    numbers[FrameKind.KEPT_SUM] = 6
    assert by_kind(numbers) == Traffic(reduction=7, kept=6, control=5)


def test_a_steps_traffic_is_the_mean_of_the_steps_that_were_seen() -> None:
    meter, sent = TrafficMeter(), [0] * (max(FrameKind) + 1)
    assert meter.now(7, sent) is None, "no step is over"
    sent[FrameKind.SYNC] = 30
    said = meter.now(10, sent)
    assert said == SentTraffic(sent=Traffic(sync=30), steps=3)
    assert said.sent.in_each(said.steps) == Traffic(sync=10)
    again = [meter.now(step, sent) for step in (8, 10, None, 90)]
    assert [one and one.steps for one in again] == [3, 5, 5, 5], "what is repeated is sent again"


def test_a_taken_port_only_costs_the_metrics(agent: WorkerAgent, port: int, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", port)):
        metrics.serve(agent, "127.0.0.1", port)
    assert f"cannot listen on port {port} of 127.0.0.1: {os.strerror(98)}" in caplog.text


@pytest.mark.parametrize("port", ["abc", "0", "65536", "-1"])
def test_a_port_that_is_none_is_named(port: str, tmp_path: Path) -> None:
    needed = {
        "BAMBOO_WORKER": "w0",
        "BAMBOO_COORDINATOR": "ws://127.0.0.1:1/",
        "BAMBOO_TOKEN_FILE": str(tmp_path / "t"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "bamboo_trainer"],
        env={**os.environ, **needed, "BAMBOO_METRICS_PORT": port},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert f'BAMBOO_METRICS_PORT: expected a port, got "{port}"' in done.stderr
