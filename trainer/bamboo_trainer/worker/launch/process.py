"""One worker in this process: its agent, its log and its metrics."""

import os
import socket
from collections.abc import Collection
from functools import partial
from pathlib import Path

import torch

from bamboo_trainer.telemetry import logs
from bamboo_trainer.telemetry.spans import Follower, Spans
from bamboo_trainer.telemetry.trace import TraceFile
from bamboo_trainer.worker.agent import LOCAL_SETTINGS, WorkerAgent, WorkerSettings
from bamboo_trainer.worker.launch.strike_gate import StrikeGate


def _read_token(path: Path) -> str:
    """Return the token in the file. Raises OSError, also while the file is being written."""
    token = path.read_bytes().decode(errors="replace").strip()
    if not token.isascii() or not token:
        raise OSError(f"there is no token in {path}")
    return token


def main(
    worker: str,
    url: str,
    token: str | Path,
    zone: str = "",
    trace: str | None = None,
    profile: str | None = None,
    gate: int | None = None,
    steps: Collection[int] = (),
    follower: Follower | None = None,
    settings: WorkerSettings = LOCAL_SETTINGS,
) -> int:
    """Run one worker in this process until it is asked to stop; return its exit code.

    token: the token, or the file that always holds the newest one. profile: see `StepProfiler.of`. gate: the descriptor
    of the socket on which a `StrikeGate` asks the launcher in these steps. follower: of its spans.
    """
    torch.set_num_threads(1)
    followers = [follower] if follower else []
    if gate is not None:
        followers.append(StrikeGate(socket.socket(fileno=gate), steps))
    if profile:
        from bamboo_trainer.telemetry.step_profiler import StepProfiler  # imported only if needed

        followers.append(StepProfiler.of(worker, profile))
    if trace:
        followers.append(TraceFile(Path(trace), worker, os.getpid()))
    newest = partial(_read_token, token) if isinstance(token, Path) else lambda: str(token)
    agent = WorkerAgent(worker, url, newest, zone, Spans(*followers), settings)
    logs.begin(worker, lambda: agent.engine.step if agent.engine else None, shared=not settings.pod)
    try:
        if settings.metrics_port:
            from bamboo_trainer.worker.metrics import serve  # imported only if needed

            serve(agent, settings.host, settings.metrics_port)
        return agent.run()
    finally:
        logs.end()
