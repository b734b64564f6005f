"""The course of events in which all journeys are recorded: a job's, and a call of `bamboo plan`."""

import contextlib
import io
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

import bamboo_trainer.models.gpt  # workers are forked from this process, and begin at once
from bamboo.__main__ import main as bamboo
from bamboo_core.planning.profile import to_json
from job_simulation_kit import manifest
from journey import Journey, Recorded
from journeys import MOVED
from manifest_kit import bamboojob, gpt_task, training
from recorder import Function, Recorder, Said, Seen, Wanted
from sizing_kit import PRICES, layered
from world import World

WORKERS = 8  # in all
PLAN = ("--jobs", "1", "--preempt-rate", "0.5", "--nodes", "2", "--seeds", "1", "--micro-batch", "4", "--hours", "0.5")

assert bamboo_trainer.models.gpt


def record(journeys: Sequence[Journey]) -> list[Recorded]:
    """How the things of these journeys went, all in one run. Raises LookupError with a mark that was not come to."""
    firsts: list[int] = []
    wanted: defaultdict[Function, list[tuple[int, Said]]] = defaultdict(list)
    number = 0
    for journey in journeys:
        firsts.append(number)
        for mark in journey.marks:
            wanted[mark.function].append((number, mark.said))
            number += 1
    with tempfile.TemporaryDirectory() as folder:
        seen = World(wanted, WORKERS).run(partial(train, folder=Path(folder)))
        seen += planned(wanted, Path(folder))
    return [journey.recorded(seen, first) for journey, first in zip(journeys, firsts, strict=True)]


def planned(wanted: Wanted, folder: Path) -> list[Seen]:
    """What is seen of a call of `bamboo plan`. Raises LookupError if it prints no table."""
    document = manifest(2, 1, 6)
    document["spec"]["training"]["steps"] = 2000
    machines = {"small": {"spot": 1.0, "onDemand": 3.0, "profile": "profile.json"}}
    (folder / "job.yaml").write_text(yaml.safe_dump(document))
    (folder / "profile.json").write_bytes(to_json(layered(3)))
    (folder / "prices.yaml").write_text(yaml.safe_dump({**PRICES, "machines": machines}))
    command = ["bamboo", "plan", str(folder / "job.yaml"), "--prices", str(folder / "prices.yaml"), *PLAN]
    printed = io.StringIO()
    with (
        Recorder("planner", wanted) as recorder,
        patch.object(sys, "argv", command),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        bamboo()
    if "GRID" not in printed.getvalue():
        raise LookupError(f"bamboo plan has printed no table: {printed.getvalue()}")
    return recorder.seen


def job(stages: int, pipelines: int, folder: Path) -> dict[str, Any]:
    """A job that trains until it is deleted."""
    return bamboojob(
        "trained",
        namespace="default",
        task=gpt_task(blocks=3),
        training=training(100_000, 8, 2),
        topology={"stages": stages, "pipelines": pipelines},
        checkpoint={"storage": f"file://{folder}", "everySteps": 10},
    )


async def train(world: World, folder: Path) -> None:
    """A job trains with two pipelines until it has a checkpoint; a node is tainted, and its worker replaced; the job is
    edited to have another schedule, and deleted. It is made again with other stages, on GPUs, and goes on.
    """
    first = world.create(job(2, 2, folder))
    await world.until(lambda: (runner := world.runner("trained")) and runner.state.checkpoints.kept)
    runner = world.runner("trained")
    world.taint(runner.state.plan.at(MOVED).owner)
    await world.until(lambda: runner.state.moves.takeovers)
    await world.until(lambda: len(runner.state.ready) == 4 and _is_settled(runner.state, "1F1B"))
    world.edit(first, _with_another_schedule)
    await world.until(lambda: _is_settled(runner.state, "ZBH1"))
    await world.delete(first)
    world.device = "cuda"
    again = world.create(job(3, 1, folder))
    await world.until(lambda: _goes_on(world.runner("trained")))
    await world.delete(again)


def _is_settled(state: Any, schedule: str) -> bool:
    """Whether a plan with that schedule runs, and nothing of the one before it."""
    plan = state.plan
    return (plan.target.schedule, len(plan.layouts)) == (schedule, 1) and state.plans.steady


def _with_another_schedule(spec: dict[str, Any]) -> None:
    spec["topology"]["schedule"] = "ZBH1"


def _goes_on(runner: Any) -> bool:
    """Are some steps committed since the checkpoint that was gone back to?"""
    plan = runner.state.plan if runner else None
    return plan is not None and plan.restore is not None and runner.state.step > plan.first_step + 5
