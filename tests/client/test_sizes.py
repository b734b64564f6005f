"""Which Llamas and which grids `bamboo bench` takes for a machine."""

import pytest

from bamboo.bench.sizes import LARGE, TOKENS, USUAL, BenchSizes, LlamaSize, Load, choose_sizes, needed
from bench_kit import machine

GB = 10**9
BILLION, SIX_BLOCKS, FOUR_BLOCKS = USUAL


def sizes(gpus: int, memory: int, *, quick: bool = False) -> BenchSizes:
    found = choose_sizes(machine(gpus=gpus, memory=memory * GB), quick=quick)
    assert isinstance(found, BenchSizes)
    return found


@pytest.mark.parametrize(
    ("gpus", "memory", "usual", "samples", "larger", "workers"),
    [
        (1, 24, FOUR_BLOCKS, 1, 2, (1, 2)),  # two workers share it, each with a replica
        (1, 80, BILLION, 1, 0, (1, 2)),
        (8, 80, BILLION, 2, 1, (1, 2, 4, 8)),
        (1, 141, BILLION, 2, 0, (1, 2)),
        (8, 141, BILLION, 2, 2, (1, 2, 4, 8)),
        (8, 192, BILLION, 2, 1, (1, 2, 4, 8)),  # with one sample it fits into one device, too
        (3, 40, SIX_BLOCKS, 2, 1, (1, 2)),  # with replicas of two stages there is no room for a billion
    ],
)
def test_the_one_of_a_billion_is_measured_where_it_fits_and_one_of_eight_beside_it(
    gpus: int, memory: int, usual: LlamaSize, samples: int, larger: int, workers: tuple[int, ...]
) -> None:
    """larger: samples of its microbatch; 0: there is no room for it."""
    found = sizes(gpus, memory)
    assert found.usual.size is usual
    assert found.usual.model.config == {**usual.config, "data": {"length": TOKENS}}
    assert (found.usual.model.samples, found.workers, found.stages) == (samples, workers, workers[-1])
    assert (found.larger.model.samples if found.larger else 0) == larger
    assert (found.why_none_larger == "") == (larger > 0)
    assert found.worker_devices == (workers[1:] if gpus > 1 else ())
    assert found.usual.model.microbatches >= 2 * workers[-1]


@pytest.mark.parametrize(
    ("size", "samples", "load", "estimated"),
    [
        (SIX_BLOCKS, 1, Load(), 10.7),
        (BILLION, 2, Load(), 37.4),
        (BILLION, 2, Load(stages=2, replicated=True), 42.1),
        (BILLION, 2, Load(stages=8), 23.9),
        (BILLION, 2, Load(stages=8, postpones=True), 38.6),
        (BILLION, 2, Load(stages=8, replicated=True, eager=True), 40.5),
        (BILLION, 2, Load(pipelines=8), 55.4),
        (LARGE, 1, Load(), 161.0),
        (LARGE, 1, Load(stages=2), 101.8),
        (LARGE, 1, Load(stages=4), 69.6),
        (LARGE, 1, Load(stages=8), 56.0),
        (LARGE, 2, Load(stages=8), 87.8),
        (LARGE, 1, Load(stages=8, postpones=True), 60.3),
        (LARGE, 1, Load(stages=8, replicated=True), 69.9),
    ],
)
def test_no_job_is_begun_that_has_no_room_by_the_products_own_estimate(
    size: LlamaSize, samples: int, load: Load, estimated: float
) -> None:
    """estimated: by `bamboo validate --load`, in GB, which leaves out torch's own memory and what a product needs."""
    assert 1 < needed(size, samples, TOKENS, load) / GB - estimated < 24


def test_too_little_memory_is_said_with_how_much_is_needed() -> None:
    assert choose_sizes(machine(gpus=1, memory=12 * GB), quick=False) == (
        "expected GPUs with at least 22 GB of memory each, for Llama 3.2 1B with 4 of its blocks and 32,000 words"
    )
    assert sizes(1, 80).why_none_larger == "Llama 3 8B: it takes about 196 GB of a device, which has 80"


def test_processors_train_a_small_one_in_fp32_and_quick_a_tiny_one_anywhere() -> None:
    usual, quick = (choose_sizes(machine(), quick=quick) for quick in (False, True))
    on_gpus = sizes(8, 1, quick=True)
    assert isinstance(usual, BenchSizes)
    assert isinstance(quick, BenchSizes)
    assert (usual.usual.model.precision, usual.workers, usual.kills) == ("fp32", (1, 2), 10)
    assert (quick.usual.model.config["size"], quick.workers, quick.kills) == ("tiny", (1, 2), 1)
    assert on_gpus.usual.model == quick.usual.model
