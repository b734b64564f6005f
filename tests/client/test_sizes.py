"""Which Llama and which grids `bamboo bench` takes for a machine."""

import pytest

from bamboo.bench.sizes import BenchSizes, choose_sizes
from bench_kit import machine

GB = 10**9


@pytest.mark.parametrize(
    ("devices", "memory", "size", "samples", "workers"),
    [
        (1, 80 * GB, {"size": "3.2-1b"}, 2, (1, 2)),
        (8, 80 * GB, {"size": "3.2-1b"}, 2, (1, 2, 4, 8)),
        (8, 192 * GB, {"size": "3-8b"}, 2, (1, 2, 4, 8)),
        (1, 24 * GB, {"size": "3.2-1b", "blocks": 6, "vocabulary": 32000}, 1, (1, 2)),
        (3, 40 * GB, {"size": "3.2-1b"}, 1, (1, 2)),
    ],
)
def test_the_largest_model_that_fits_is_measured_on_as_many_workers_as_there_are_devices(
    devices: int, memory: int, size: dict[str, object], samples: int, workers: tuple[int, ...]
) -> None:
    found = choose_sizes(machine(gpus=devices, memory=memory), quick=False)
    assert isinstance(found, BenchSizes)
    assert found.model.config == {**size, "data": {"length": 2048}}
    assert (found.model.samples, found.workers, found.stages) == (samples, workers, workers[-1])
    assert found.worker_devices == workers[1:] if devices > 1 else found.worker_devices == ()
    assert found.model.microbatches >= 2 * workers[-1]


def test_too_little_memory_is_said_with_how_much_is_needed() -> None:
    assert choose_sizes(machine(gpus=1, memory=12 * GB), quick=False) == (
        "expected GPUs with at least 20 GB of memory together, for Llama 3.2 1B with 6 of its blocks and 32,000 words"
    )


def test_processors_train_a_small_one_in_fp32_and_quick_a_tiny_one_anywhere() -> None:
    usual, quick = (choose_sizes(machine(), quick=quick) for quick in (False, True))
    on_gpus = choose_sizes(machine(gpus=8, memory=GB), quick=True)
    assert isinstance(usual, BenchSizes)
    assert isinstance(quick, BenchSizes)
    assert isinstance(on_gpus, BenchSizes)
    assert (usual.model.precision, usual.workers, usual.kills) == ("fp32", (1, 2), 10)
    assert (quick.model.config["size"], quick.workers, quick.kills) == ("tiny", (1, 2), 1)
    assert on_gpus.model == quick.model
