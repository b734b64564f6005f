"""Layers that are divided over devices, by arithmetic: docs/design/tensor-parallel.md shows what it comes to."""

import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bamboo_core.job.spec import PipelineSchedule

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "design" / "tensor-parallel.md"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "bench")
        yield importlib.import_module("tensor_parallel")


def test_the_page_shows_what_the_program_prints(script: Any) -> None:
    printed = script.rows(script.MACHINES["h100"], 0.0, PipelineSchedule.ONE_F_ONE_B)
    _, _, table = PAGE.read_text().partition(f"| {' | '.join(script.COLUMNS)} |\n")
    assert table.splitlines()[1 : len(printed) + 1] == [f"| {' | '.join(row)} |" for row in printed]


def test_a_sum_and_a_gather_move_what_a_ring_moves(script: Any) -> None:
    machine = replace(script.MACHINES["h100"], latency=0.0, bandwidth=float("inf"))
    load = script.Load(script.MODELS[0], machine, 8192, 0.0)
    size = 8192 * script.MODELS[0].width * 2
    for devices in (2, 4, 8):
        assert sum(script.exchange_seconds(load, devices)) == pytest.approx(
            2 * (devices - 1) / devices * size / machine.link
        )


def test_links_without_a_price_leave_only_what_narrow_products_cost(script: Any) -> None:
    """With attention alone, which is divided by heads, an eighth of the time is left."""
    machine = replace(script.MACHINES["h100"], latency=0.0, bandwidth=float("inf"), link=float("inf"))
    load = script.Load(script.MODELS[3], machine, 2**20, 0.0)
    whole, part = (script.layer_times(load, devices) for devices in (1, 8))
    assert part.exchanged == 0
    assert part.forward == pytest.approx(whole.forward / 8, rel=0.01)


def test_stages_wait_for_the_bubble_of_all_devices_and_divided_layers_for_that_of_workers(script: Any) -> None:
    """In units of an undivided layer; with the embedding, which computes nothing, 64 layers for 16 devices."""
    model = replace(script.MODELS[0], layers=63, vocabulary=0)
    free = {"latency": 0.0, "bandwidth": float("inf"), "link": float("inf")}
    machine = replace(script.MACHINES["h100"], memory=1e15, **free)
    load = script.Load(model, machine, 8192, 0.0)
    for microbatches in (8, 64):
        for parts, workers, most in ((1, 16, 4), (8, 2, 32)):
            found = script.form(load, parts, microbatches, PipelineSchedule.ONE_F_ONE_B)
            assert found.recomputed == 0
            step = microbatches * most + 63 - most
            assert found.idle == pytest.approx(1 - microbatches * 63 / workers / step)


def test_less_memory_has_layers_run_again_and_too_little_fits_nothing(script: Any) -> None:
    found = []
    for memory in (1e12, 60e9, 20e9):
        machine = replace(script.MACHINES["h100"], memory=memory)
        load = script.Load(script.MODELS[1], machine, 32768, 0.0)
        found.append(script.form(load, 1, 32, PipelineSchedule.ONE_F_ONE_B))
    most, some, none = found
    assert most.recomputed == 0 < some.recomputed < 1
    assert some.seconds > most.seconds
    assert none is None
