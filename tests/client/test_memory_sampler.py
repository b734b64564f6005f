"""The memory of workers, as it is seen from outside."""

import subprocess
import sys

from bamboo.bench.memory_sampler import sampled

MIB = 1 << 20
WORKER = "import time; held = bytearray(64 << 20); held[::4096] = bytes(len(held[::4096])); time.sleep(2)"
LAUNCHER = (
    "import subprocess, sys; held = bytearray(200 << 20); held[::4096] = bytes(len(held[::4096]));"
    " subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
)


def test_the_largest_worker_counts_and_not_what_has_started_it() -> None:
    with sampled(gpu=False) as sampler:
        subprocess.run([sys.executable, "-c", LAUNCHER, WORKER], check=True)
    assert 64 * MIB < sampler.highest < 150 * MIB
    assert sampler.problem == ""
