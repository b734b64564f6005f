"""Which ways to divide a stage among the devices of a node leave the bits of its gradients as they are, and how fast a
boundary tensor goes from one device of a worker to another.

    python bench/devices.py [--devices 2,4] [--width 64] [--microbatches 8]
    python bench/devices.py --copies [--megabytes 26,67,134] [--rounds 20]      # needs two GPUs

Bits: one process for each device, with gloo on the CPU and one thread each; a stage of two blocks of a transformer. The
gradients of a step are compared with those of one process that runs all microbatches in order.

    FSDP2           fully_shard: each device runs microbatches of its own, whose gradients are reduced and scattered
    tensor          DTensor: columns of the first product of each MLP, rows of the second; all run every microbatch
    samples         each device runs its samples of every microbatch, and gradients are summed
    microbatches    FSDP2, in which each device gets its shard of every microbatch's gradient and adds them in order

Copies: the product's own (`bamboo_trainer.memory.host_copies`) between each two neighbours, while nothing else runs:

    direct          from device to device, as between the parts of a worker
    pinned host     to pinned memory, waited for there, and from it, as between workers but without the connection
    pageable host   with ordinary memory between

The ways take turns, every second round the other way round, and ratios are of one round.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bamboo_trainer.memory.host_copies import HostCopies, copies_by_device
from bamboo_trainer.memory.placement import wait_for

SAMPLES, TOKENS, BLOCKS = 4, 32, 2
Gradients = dict[str, Tensor]


class Block(nn.Module):
    """Attention and an MLP, each beside what it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.before(x)
        x = x + self.attention(normal, normal, normal, need_weights=False)[0]
        result: Tensor = x + self.second(F.gelu(self.first(self.between(x))))
        return result


def stage(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(BLOCKS)))


def batch(width: int, microbatch: int) -> Tensor:
    return torch.randn(SAMPLES, TOKENS, width, generator=torch.Generator().manual_seed(microbatch))


def run(model: nn.Module, given: Tensor) -> None:
    """A forward and backward; gradients are added to those that are there."""
    model(given).square().sum().backward()


def gradients(model: nn.Module) -> Gradients:
    """Whole ones, wherever their shards are."""
    found = {name: p.grad for name, p in model.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items() if g is not None}


def alone(width: int, microbatches: int) -> Gradients:
    model = stage(width)
    for number in range(microbatches):
        run(model, batch(width, number))
    return gradients(model)


def by_fsdp(mesh: DeviceMesh, width: int, microbatches: int) -> Gradients:
    model = stage(width)
    for block in (*model, model):
        sharded = fully_shard(block, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(enable=True)  # gloo knows no other
    for number in range(mesh.get_local_rank(), microbatches, mesh.size()):
        run(model, batch(width, number))
    return gradients(model)


def by_tensors(mesh: DeviceMesh, width: int, microbatches: int) -> Gradients:
    model = stage(width)
    for block in model:
        parallelize_module(block, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    for number in range(microbatches):
        run(model, batch(width, number))
    return gradients(model)


def by_samples(mesh: DeviceMesh, width: int, microbatches: int) -> Gradients:
    model = stage(width)
    for number in range(microbatches):
        run(model, batch(width, number)[mesh.get_local_rank() :: mesh.size()])
    found = gradients(model)
    for gradient in found.values():
        dist.all_reduce(gradient)
    return found


def by_microbatches(mesh: DeviceMesh, width: int, microbatches: int) -> Gradients:
    """FSDP2 with its shards and its gathering of parameters, and another way to reduce gradients."""
    model = stage(width)
    for block in (*model, model):
        sharded = fully_shard(block, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(enable=True)
        sharded.set_custom_reduce_scatter(InOrder(mesh.get_local_rank()))
    for first in range(0, microbatches, mesh.size()):
        model.zero_grad()  # the sums are kept in the shards of `InOrder`
        run(model, batch(width, first + mesh.get_local_rank()))
    return gradients(model)


class InOrder:
    """Each device gets its shard of everybody's gradient, and adds them to its sum in the order of the microbatches."""

    def __init__(self, rank: int) -> None:
        self._rank, self._sum = rank, torch.zeros(())

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        given = list(input_tensor.chunk(group.size()))
        taken = [torch.empty_like(output_tensor) for _ in given]
        taken[self._rank].copy_(given[self._rank])
        others = [other for other in range(len(given)) if other != self._rank]
        works = [dist.isend(given[other], other, group) for other in others]
        works += [dist.irecv(taken[other], other, group) for other in others]
        for work in works:
            assert work is not None
            work.wait()
        for one in taken:
            self._sum = self._sum + one
        output_tensor.copy_(self._sum)


WAYS: dict[str, Callable[[DeviceMesh, int, int], Gradients]] = {
    "FSDP2": by_fsdp,
    "tensor": by_tensors,
    "samples": by_samples,
    "microbatches": by_microbatches,
}


def device(rank: int, devices: int, width: int, microbatches: int, store: str) -> None:
    """One process of the node; the first one prints."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=devices)
    mesh, expected = init_device_mesh("cpu", (devices,)), alone(width, microbatches)
    for name, way in WAYS.items():
        found, again = way(mesh, width, microbatches), way(mesh, width, microbatches)
        if rank == 0:
            print(f"{devices} devices, {name:<12}  {compared(found, expected)}; twice: {compared(again, found)}")
    dist.destroy_process_group()


def compared(found: Gradients, expected: Gradients) -> str:
    """Equal, or how many numbers differ."""
    pairs = [(found[name], gradient) for name, gradient in expected.items()]
    different = sum(int((one != other).sum()) for one, other in pairs)
    size = sum(other.numel() for _, other in pairs)
    return "bit-equal" if not different else f"{100 * different / size:.1f} % of numbers differ"


DIRECT, PINNED, PAGEABLE = "direct", "pinned host", "pageable host"
WARMUP = 3  # rounds that do not count
Copies = Mapping[torch.device, HostCopies]


def directly(copies: Copies, tensor: Tensor, target: torch.device) -> Tensor:
    return copies[target].bring(copies[tensor.device].hand_over([tensor]))[0]


def over_pinned_memory(copies: Copies, tensor: Tensor, target: torch.device) -> Tensor:
    return copies[target].bring(copies[tensor.device].start([tensor]).wait())[0]


def over_pageable_memory(copies: Copies, tensor: Tensor, target: torch.device) -> Tensor:
    return tensor.cpu().to(target)


COPIES: dict[str, Callable[[Copies, Tensor, torch.device], Tensor]] = {
    DIRECT: directly,
    PINNED: over_pinned_memory,
    PAGEABLE: over_pageable_memory,
}


def time_copies(copies: Copies, tensor: Tensor, target: torch.device, rounds: int) -> list[dict[str, float]]:
    """The seconds that a tensor takes on its way to another device, each way in each round. Raises RuntimeError if it
    is another one there.
    """
    found, expected = [], tensor.cpu()
    for number in range(WARMUP + rounds):
        seconds = {}
        for name in list(COPIES)[:: -1 if number % 2 else 1]:
            for device in (tensor.device, target):
                wait_for(device)
            began = time.perf_counter()
            brought = COPIES[name](copies, tensor, target)
            wait_for(target)
            seconds[name] = time.perf_counter() - began
            if not torch.equal(brought.cpu(), expected):
                raise RuntimeError(f"{name}: the tensor is another one on {target}")
        found.append(seconds)
    return found[WARMUP:]


def told(found: Sequence[Mapping[str, float]], size: int) -> list[str]:
    """The ways, with their speed and how much longer than directly a tensor of so many bytes takes."""
    lines = []
    for name in COPIES:
        taken = [one[name] for one in found]
        ratios = [one[name] / one[DIRECT] for one in found]
        rate = size / statistics.median(taken) / 1e9
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"{name:<14} {1e3 * statistics.median(taken):8.3f} ms {rate:7.1f} GB/s   {spread} times as long")
    return lines


def print_copies(sizes: Sequence[int], rounds: int) -> None:
    """sizes: of tensors, in bytes."""
    there = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    if len(there) < 2:
        print("There are no two GPUs here, so there is no direct way to time.")
        return
    pretended = torch.version.cuda is None and torch.version.hip is None
    if pretended:
        print(
            "This torch knows no GPU: these are pretended, in host memory. That tensors arrive is shown, and no time."
        )
    copies = copies_by_device(there, lambda: None)
    for source, target in pairwise(there):
        peers = "" if pretended or torch.cuda.can_device_access_peer(source, target) else ", no peer access"
        for size in sizes:
            tensor = torch.randn(size // 4, device=source)
            found = time_copies(copies, tensor, target, rounds)
            print(f"{source} to {target}, {size / 1e6:.0f} MB{peers}")
            print("\n".join(f"    {line}" for line in (COPIES if pretended else told(found, size))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="2,4")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--copies", action="store_true")
    parser.add_argument("--megabytes", default="26,67,134")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.copies:
        print_copies([1_000_000 * int(size) for size in arguments.megabytes.split(",")], arguments.rounds)
        return
    for devices in map(int, arguments.devices.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            given = (devices, arguments.width, arguments.microbatches, str(Path(folder) / "store"))
            mp.spawn(device, given, nprocs=devices)  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
