"""Machines and reports of `bamboo bench`, as values."""

from typing import Any

from bamboo.bench.bench_measurements import EAGER
from bamboo.bench.report import (
    BenchModel,
    BenchPart,
    BenchReport,
    DeviceFound,
    DeviceTime,
    KillFound,
    LinkFound,
    MachineFound,
    Measured,
    MemoryFound,
    ThreadTime,
)

H100 = "NVIDIA H100 80GB HBM3"


def machine(*, gpus: int = 0, memory: int = 80 * 10**9, compiler: str = "") -> MachineFound:
    """gpus: without any there are two processors. memory: of each."""
    device = DeviceFound(name=H100 if gpus else "a processor", memory=memory)
    return MachineFound(
        devices=(device,) * (gpus or 1),
        is_gpu=gpus > 0,
        platform={"torch": "2.13.0", "cuda": "", "driver": ""},
        cpus=2,
        memory=memory,
        compiler=compiler,
        products={"fp32": 5e13, "bf16": 7e14},
        links=(LinkFound(source="host", target="cuda:0", rate=5e10),),
        loopback=2e9,
        same_bits={"products": True},
    )


def measured(part: BenchPart, side: str, steps: tuple[float, ...] = (), **more: Any) -> Measured:
    """Of steps with 8 samples."""
    key = f"{part}: {more.get('group', '')}: {side}: {more.get('round', 0)}"
    return Measured(
        **{"key": key, "part": part, "side": side, "steps": steps, "samples": 8, "precision": "bf16", **more}
    )


def report(*results: Measured, **more: Any) -> BenchReport:
    model = BenchModel(
        name="Llama 3.2 1B", entrypoint="m:build", config={}, samples=2, microbatches=4, precision="bf16", tokens=2048
    )
    given = {
        "date": "2026-11-26",
        "bamboo": "0.1.0",
        "quick": False,
        "rounds": 2,
        "parts": tuple(BenchPart),
        "machine": machine(gpus=2),
        "model": model,
        "results": results,
    }
    return BenchReport(**{**given, **more})


FLOPS = 1.5e13  # of a sample
WHOLE = (
    measured(BenchPart.CHECKS, EAGER, precision="fp32", losses=(2.0, 1.0)),
    measured(BenchPart.CHECKS, "fp32, two losses", precision="fp32", losses=(2.0, 1.0001), bits_equal=True),
    measured(BenchPart.CHECKS, "bf16", bits_equal=False),
    measured(BenchPart.THROUGHPUT, EAGER, (0.5, 0.3, 0.4), flops=FLOPS),
    measured(BenchPart.THROUGHPUT, "2 workers", (0.25, 0.25), devices=2),
    measured(BenchPart.THROUGHPUT, "2 workers", (0.2, 0.2), devices=2, round=1),
    measured(BenchPart.THROUGHPUT, EAGER, (0.4, 0.4), flops=FLOPS, round=1),
    measured(BenchPart.THROUGHPUT, "compiled", problem="torch.compile needs a compiler"),
    measured(
        BenchPart.TRACE,
        "None",
        shares={"forward": 0.6, "idle": 0.3, "sync_commit": 0.04, "reduction": 0.01, "other": 0.05},
        device_times=(
            DeviceTime(
                device="cuda:0",
                seconds=0.25,
                computing=0.5,
                to_device=0.2,
                to_host=0.1,
                between=0.0,
                copying_alone=0.05,
                idle=0.45,
            ),
        ),
        thread_times=(
            ThreadTime(worker="w0", seconds=0.25, waits=0.1, driver=0.05),
            ThreadTime(worker="w1", seconds=0.25, waits=0.2, driver=0.01),
        ),
    ),
    measured(BenchPart.PRICES, "deterministic: false", (1.0,), group="determinism"),
    measured(BenchPart.PRICES, "deterministic: true", (1.1,), group="determinism"),
    measured(
        BenchPart.KILLS,
        "LazyForward",
        kills=(KillFound(stage=1, step=5, moment=0.25, pause=0.2, affected=1.5, calm=1.0),),
        bits_equal=True,
    ),
    measured(
        BenchPart.MEMORY, "None", memory=MemoryFound(estimated=1 << 30, accounted=1 << 30, measured=3 << 30, sharing=1)
    ),
)
