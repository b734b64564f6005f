"""The objective Value with real processes: a worker that adds less than it costs leaves, and the bits are the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from manifest_kit import bamboojob, training

# Layers that rest instead of computing, so that five workers are no more to two processors than one.
TASK = """
import time

import torch
from torch import nn

from bamboo_trainer.data import TensorDataset
from bamboo_trainer.task import Task


class Resting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        result = torch.tanh(self.linear(x))
        if result.requires_grad:
            result.register_hook(lambda _: time.sleep(0.01))
        time.sleep(0.005)
        return result


def build(config):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 8, generator=generator)
    return Task(
        layers=[Resting] * 4,
        loss=lambda outputs, targets: nn.functional.mse_loss(outputs[0], targets[0]),
        dataset=TensorDataset((inputs,), (inputs.roll(1, 1).sin(),)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
        learning_rate=lambda step: 1e-3,
    )
"""


@pytest.mark.slow
def test_a_worker_that_adds_nothing_is_given_back_and_the_bits_are_the_same(tmp_path: Path) -> None:
    """Of twelve microbatches five pipelines have three at most, as four have."""
    (tmp_path / "resting.py").write_text(TASK)
    document = bamboojob(
        task={"entrypoint": "resting:build"},
        training=training(32, 12, 1),
        topology={"stages": 1},
        elastic={"objective": "Value", "maxWorkers": 5, "stabilizationSeconds": 1},
        nodePools=[{"name": "spot", "pricePerHour": "1.5"}],
    )
    (tmp_path / "job.yaml").write_text(json.dumps(document))
    command = [sys.executable, "-m", "bamboo", "run", "job.yaml", "--verify"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WorkersChosen: 4 of at most 5 workers are held: " in done.stdout
    assert done.stdout.count("GivenBack: ") == 1
    assert "preemptions: 0 (0 with notice), takeovers: 0, samples left out: 0" in done.stdout
    assert "bit-equal: yes" in done.stdout
