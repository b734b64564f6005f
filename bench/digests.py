"""Hashes of what `bamboo simulate` and `bamboo compare` say: the same before and after a refactoring.

    python bench/digests.py [--seeds N] > FILE

A line for each run, with a hash of its events and figures. A change that is to change no behaviour leaves the lines as
they were: `diff BEFORE AFTER`. Of the protocol, with the real engine, tests/simulation/simulate.py --record does this.
"""

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import yaml

LIMIT: Final = 900.0  # seconds of a run
STORE: Final = {"storage": {"uri": "s3://bucket/job"}, "everySteps": 20}
POOLS: Final = [
    {"name": "spot", "pricePerHour": "0.9"},
    {"name": "dear", "pricePerHour": "3.1"},
]
JOBS: Final[dict[str, dict[str, Any]]] = {
    "fixed": {"topology": {"stages": 12, "pipelines": 2}},
    "elastic": {"topology": {"stages": 12, "pipelines": 3}, "elastic": {"minPipelines": 1}},
    "standby": {"topology": {"stages": 12, "pipelines": 2}, "standby": {"workers": 2, "stages": 1}},
    "two-replicas": {"topology": {"stages": 18}, "redundancy": {"mode": "LazyForward", "replicas": 2}},
    "without": {"topology": {"stages": 12, "pipelines": 2}, "redundancy": {"mode": "None"}, "checkpoint": STORE},
    "eager-backward": {"topology": {"stages": 12}, "redundancy": {"mode": "EagerBackward"}, "checkpoint": STORE},
    "zero-bubble": {"topology": {"stages": 12, "pipelines": 2, "schedule": "ZBH1"}},
    "chosen": {"elastic": {"objective": "Throughput", "maxWorkers": 30}, "checkpoint": STORE},
    "value": {"elastic": {"objective": "Value", "maxWorkers": 30}, "nodePools": POOLS, "checkpoint": STORE},
    "budget": {
        "elastic": {"objective": "Value", "maxWorkers": 24},
        "nodePools": POOLS,
        "checkpoint": STORE,
        "budget": {"money": "40", "moneyPerHour": "25"},
    },
    "zones": {
        "elastic": {"objective": "Throughput", "maxWorkers": 30},
        "spread": {"policy": "ZonePerPipeline"},
        "checkpoint": STORE,
    },
}
STRATEGIES: Final = ("on-demand", "checkpoint", "torchrun-elastic", "morphing", "templates", "rerouting", "quorum")


def document(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """A job that trains BERT with that specification."""
    config = {"data": {"length": 512}, "size": "large"}
    task = {"entrypoint": "bamboo_trainer.models.bert:build", "config": config}
    training = {"steps": 100_000, "globalBatchSize": 96, "microBatchSize": 1}
    metadata = {"name": name}
    made = {"task": task, "training": training, "topology": {"stages": 12}, **spec}
    return {"apiVersion": "bamboo.dev/v1alpha1", "kind": "BambooJob", "metadata": metadata, "spec": made}


def digest(*arguments: str) -> str:
    """A hash of what the command says. Raises RuntimeError if it fails."""
    command = [sys.executable, "-m", "bamboo", *arguments, "--output", "json"]
    done = subprocess.run(command, check=False, capture_output=True, timeout=LIMIT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.decode(errors='replace')}")
    return hashlib.sha256(done.stdout + b"\0" + done.stderr).hexdigest()[:16]


def main(seeds: Annotated[int, typer.Option(min=1, help="Of each job and strategy.")] = 3) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, spec in JOBS.items():
            path = Path(folder, f"{name}.yaml")
            path.write_text(yaml.safe_dump(document(name, spec)))
            for seed in range(1, seeds + 1):
                asked = ("--profile", "bert-v100", "--preempt-rate", "0.4", "--hours", "2", "--events")
                once = ("--seeds", f"{seed}:{seed}")
                print(f"job {name} {seed} {digest('simulate', str(path), *asked, *once)}", flush=True)
    for name in STRATEGIES:
        of_strategy = ("--strategy", name, "--workload", "bert", "--preempt-rate", "0.2", "--hours", "12")
        print(f"strategy {name} {digest('compare', *of_strategy, '--seeds', str(seeds), '--quiet')}", flush=True)


if __name__ == "__main__":
    typer.run(main)
