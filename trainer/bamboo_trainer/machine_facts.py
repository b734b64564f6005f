"""What this machine is and can do, for `bamboo bench`: its devices, how fast they multiply and copy, and whether they
give the same bits twice.
"""

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bamboo_trainer.check import found_or_problem
from bamboo_trainer.compilation.toolchain import toolchain
from bamboo_trainer.memory.placement import choose_device, use, wait_for
from bamboo_trainer.profiling import loopback
from bamboo_trainer.worker.platform import this_platform

WORKER: Final = "bench-0"
TIMES: Final = 5  # of which the median counts
REPEATS: Final = 3  # of work that has to give the same bits
PRODUCT: Final = {"cuda": 8192, "cpu": 512}  # rows and columns of the factors
COPIED: Final = {"cuda": 256 << 20, "cpu": 16 << 20}  # bytes
HOST: Final = torch.device("cpu")


def machine_facts(quick: bool) -> dict[str, Any]:
    """What was found; only JSON values, or `problem`, one sentence. quick: with small sizes, which say little.

    devices: the name and bytes of each, of the processor where there is no GPU. platform: what decides the bits of a
    worker here. cpus, memory: the host's, in bytes. compiler: what lacks to compile layers, "" if nothing does.
    products: operations a second of products of matrices, by precision, on the first device. links: bytes a second of
    copies, by where from and to. loopback: bytes a second of one connection within this machine. sameBits: for each
    kind of work whether it gave the same bits each time, with what `training.deterministic` switches.
    """
    torch.set_num_threads(1)  # as in a worker
    found = found_or_problem(partial(_facts, quick), (MemoryError, OSError, RuntimeError))
    return found if "problem" in found else found | {"loopback": loopback()}


def _facts(quick: bool) -> dict[str, Any]:
    first = choose_device(WORKER)
    use(first)
    there = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if first.type == "cuda" else [first]
    platform = this_platform(WORKER)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "devices": [_device(device, platform.device, memory) for device in there],
        "isGpu": first.type == "cuda",
        "platform": {"torch": platform.torch, "cuda": platform.cuda, "driver": platform.driver},
        "cpus": len(os.sched_getaffinity(0)),
        "memory": memory,
        "compiler": toolchain(gpu=first.type == "cuda").lacks,
        "products": {name: product_rate(first, dtype, quick=quick) for name, dtype in _dtypes(first).items()},
        "links": _links(there, quick=quick),
        "sameBits": {name: same_bits(work) for name, work in kinds_of_work(first).items()},
    }


def _device(device: torch.device, processor: str, memory: int) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": processor, "memory": memory}
    return {
        "name": torch.cuda.get_device_name(device),
        "memory": torch.cuda.get_device_properties(device).total_memory,
    }


def _dtypes(device: torch.device) -> dict[str, torch.dtype]:
    """The types that are multiplied; a CPU emulates fp16."""
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return {**kinds, "fp16": torch.float16} if device.type == "cuda" else kinds


def product_rate(device: torch.device, dtype: torch.dtype, *, quick: bool) -> float:
    """The operations a second of a product of two square matrices."""
    size = PRODUCT[device.type] // (8 if quick else 1)
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / _seconds(device, lambda: one @ other)


def _links(devices: list[torch.device], *, quick: bool) -> list[dict[str, Any]]:
    """Copies between the host's memory and each device, and between each two devices; without a GPU within the host."""
    size = COPIED[devices[0].type] // (16 if quick else 1)
    host, pinned = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    if devices[0].type != "cuda":
        return [{"from": "host", "to": "host", "rate": _copy_rate(devices[0], host, pinned)}]
    pinned = pinned.pin_memory()
    found = []
    for device in devices:
        there, name = torch.zeros(size, dtype=torch.uint8, device=device), str(device)
        found += [
            {"from": "host", "to": name, "rate": _copy_rate(device, host, there)},
            {"from": "pinned host", "to": name, "rate": _copy_rate(device, pinned, there)},
            {"from": name, "to": "pinned host", "rate": _copy_rate(device, there, pinned)},
        ]
    for one, other in permutations(devices, 2):
        here, there = (torch.zeros(size, dtype=torch.uint8, device=device) for device in (one, other))
        found.append({"from": str(one), "to": str(other), "rate": _copy_rate(one, here, there)})
    return found


def _copy_rate(device: torch.device, source: Tensor, target: Tensor) -> float:
    return source.nbytes / _seconds(device, lambda: target.copy_(source))


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """The median of several times, after one that does not count."""
    times = []
    for _ in range(1 + TIMES):
        wait_for(device)
        began = time.perf_counter()
        work()
        wait_for(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def same_bits(work: Callable[[], tuple[Tensor, ...]]) -> bool:
    """Does it give the same bits each time?"""
    first, *others = (tuple(one.cpu() for one in work()) for _ in range(REPEATS))
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def kinds_of_work(device: torch.device) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """The kinds of work of which GPUs have kernels that add up in an order of their own, each with its gradients."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 128, 32, device=device) for _ in range(3))
    table, rows = torch.randn(97, 64, device=device), torch.randint(0, 97, (4096,), device=device)
    matrix, batch = torch.randn(256, 512, device=device), torch.randn(512, 256, device=device)
    images, filters = torch.randn(2, 8, 16, 16, device=device), torch.randn(8, 8, 3, 3, device=device)
    return {
        "products": lambda: _with_gradients(torch.mm, batch, matrix),
        "attention": lambda: _with_gradients(
            partial(F.scaled_dot_product_attention, is_causal=True), query, key, value
        ),
        "embedding": lambda: _with_gradients(lambda weight: F.embedding(rows, weight), table),
        "normalisation": lambda: _with_gradients(nn.functional.rms_norm, batch, shape=(256,)),
        "convolution": lambda: _with_gradients(F.conv2d, images, filters),
    }


def _with_gradients(work: Callable[..., Tensor], *inputs: Tensor, shape: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
    """The result and the gradients of the inputs. shape: what the work is told beside them."""
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    result = work(*leaves, shape) if shape else work(*leaves)
    return (result.detach(), *torch.autograd.grad(result.sum(), leaves))
