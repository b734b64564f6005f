"""Training in one process as anybody would write it, which Bamboo's throughput is set beside."""

from bamboo.bench.bench_measurements import list_measurements
from bamboo.bench.report import BenchPart
from bamboo.bench.sizes import BenchSizes, choose_sizes
from bamboo_trainer.counting import count
from bamboo_trainer.plain_training import train_plainly
from bench_kit import machine


def test_it_counts_the_operations_that_are_counted_without_training() -> None:
    """Attention included, of which torch's own counter leaves out that on processors."""
    sizes = choose_sizes(machine(), quick=True)
    assert isinstance(sizes, BenchSizes)
    first = list_measurements(machine(), sizes, (BenchPart.CHECKS,), rounds=1, quick=True)[0]
    job = dict(first.work.job)
    layers, trained = count(job)["layers"], train_plainly(job, 1, 1, 0.0)
    kernels = [kernel for layer in layers for kernel in (*layer["forward"], *layer["backward"])]
    samples = job["spec"]["training"]["microBatchSize"]
    assert trained["flops"] == sum(flops * often for _, flops, _, often in kernels) / samples
    assert len(trained["steps"]) >= 1
