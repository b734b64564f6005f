"""Facts of a worker's process and machine that can change its bits."""

import os
import subprocess
import sys
from collections.abc import Mapping

import msgspec
import pytest
import torch

from bamboo_core.control.codec import decode_from_worker, encode
from bamboo_core.control.platform import Platform, conflicts
from bamboo_core.control.protocol import Hello
from bamboo_core.names import DATA_PLANE_VERSION, NUMERICS_VERSION
from bamboo_trainer.stage.compilation import toolchain
from bamboo_trainer.worker.platform import driver, instructions, processor, settings, this_platform

XEON = {
    "processor": "0",
    "vendor_id": "GenuineIntel",
    "cpu family": "6",
    "model": "143",
    "cpu MHz": "2400.1",
    "flags": "fpu sse sse4_2 fma avx avx2 avx512f amx_tile rdrand",
}
GRAVITON = {
    "processor": "0",
    "BogoMIPS": "243.75",
    "CPU implementer": "0x41",
    "CPU part": "0xd40",
    "Features": "fp asimd sve",
}


def test_it_says_what_torch_is_and_where_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAMBOO_DEVICE", "cpu")
    found = this_platform("job-w0")
    assert (found.torch, found.cuda) == (torch.__version__, "")
    assert (found.data_plane, found.numerics) == (DATA_PLANE_VERSION, NUMERICS_VERSION)
    assert found.capability == torch.backends.cpu.get_cpu_capability()
    assert found.instructions
    assert (found.threads, found.driver) == (1, "")
    assert found.compiler == toolchain(gpu=False).version
    assert found == this_platform("job-w1")
    hello = Hello(worker="w", host="h", port=1, platform=found)
    assert decode_from_worker(encode(hello)) == hello


def test_a_device_that_is_not_there_is_for_others_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAMBOO_DEVICE", "cuda:99")
    assert this_platform("job-w0").device


@pytest.mark.parametrize(
    ("info", "machine", "begins"),
    [(XEON, "x86_64", "x86_64 GenuineIntel 6 143"), (GRAVITON, "aarch64", "aarch64 0x41 0xd40"), ({}, "s390x", "s")],
)
def test_processors_of_one_kind_are_equal_whatever_their_clock_rate(
    info: Mapping[str, str], machine: str, begins: str
) -> None:
    said = processor(info, machine)
    assert said.startswith(begins)
    assert said == processor({**info, "cpu MHz": "3100.0", "microcode": "0x2b0005c0"}, machine)


def test_what_a_processor_computes_with_is_told() -> None:
    assert instructions(XEON) == ("amx_tile", "avx", "avx2", "avx512f", "fma", "sse4_2")
    assert instructions(GRAVITON) == ("asimd", "fp", "sve")
    assert instructions({}) == ()


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15\nGCC version: 12", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build  (dvs)", "560.35.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.86.15  Release Build", "570.86.15"),
        ("", ""),
    ],
)
def test_the_version_of_a_driver(said: str, version: str) -> None:
    assert driver(said) == version


def test_variables_that_change_how_libraries_compute_are_told() -> None:
    plain = settings({"PATH": "/bin", "TORCHINDUCTOR_CACHE_DIR": "/tmp", "OMP_NUM_THREADS": "1"})
    assert plain == settings({})
    set_ = {"NVIDIA_TF32_OVERRIDE": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8", "TORCHINDUCTOR_MAX_AUTOTUNE": "1"}
    assert set(settings(set_)) - set(plain) == {f"{name}={value}" for name, value in set_.items()}


SAY = """
import os, msgspec, torch
from bamboo_trainer.worker.platform import this_platform
torch.set_num_threads(1)
for more in {more}:
    if os.fork() == 0:
        exec(more)
        print(msgspec.json.encode(this_platform("w")).decode(), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def platforms_of(environment: Mapping[str, str], *more: str) -> list[Platform]:
    """Return the platforms of forked processes. environment: more variables. more: code to run first, by process."""
    said = subprocess.run(
        [sys.executable, "-c", SAY.format(more=more)],
        env={**os.environ, "BAMBOO_DEVICE": "cpu", **environment},
        check=True,
        capture_output=True,
        timeout=120,
    )
    return [msgspec.json.decode(line, type=Platform) for line in said.stdout.splitlines()]


def test_processes_that_would_compute_in_another_way_are_told_apart() -> None:
    """Processes with other kernels, threads or settings, or without a compiler, conflict with an unchanged one."""
    others = {
        "torch.set_num_threads(2)": "number of torch's threads 2 instead of 1",
        "torch.use_deterministic_algorithms(True)": "settings with deterministic algorithms",
        "torch.set_float32_matmul_precision('high')": "settings with fp32 products high",
        "os.environ['ONEDNN_DEFAULT_FPMATH_MODE'] = 'BF16'": "settings with ONEDNN_DEFAULT_FPMATH_MODE=BF16",
        "os.environ['CXX'] = 'no-such-compiler'": "compiler an unknown one instead of",
    }
    common, *found = platforms_of({}, "pass", *others)
    for other, why in zip(found, others.values(), strict=True):
        assert why in conflicts(other, common)
    lesser = "default" if common.capability != "DEFAULT" else "avx2"
    (other,) = platforms_of({"ATEN_CPU_CAPABILITY": lesser, "PYTHONHASHSEED": "7"}, "pass")
    why = f"torch's kernels on the processor for {lesser.upper()} instead of {common.capability}"
    assert why == conflicts(other, common), "nothing else, for the seed of hashes changes no bit"
