"""Which ways to divide a stage among the devices of a node leave the bits of its gradients as they are.

    python bench/devices.py [--devices 2,4] [--width 64] [--microbatches 8]

One process for each device, with gloo on the CPU and one thread each; a stage of two blocks of a transformer. The
gradients of a step are compared with those of one process that runs all microbatches in order.

    FSDP2           fully_shard: each device runs microbatches of its own, whose gradients are reduced and scattered
    tensor          DTensor: columns of the first product of each MLP, rows of the second; all run every microbatch
    samples         each device runs its samples of every microbatch, and gradients are summed
    microbatches    FSDP2, in which each device gets its shard of every microbatch's gradient and adds them in order
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="2,4")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=8)
    arguments = parser.parse_args()
    for devices in map(int, arguments.devices.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            given = (devices, arguments.width, arguments.microbatches, str(Path(folder) / "store"))
            mp.spawn(device, given, nprocs=devices)  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
