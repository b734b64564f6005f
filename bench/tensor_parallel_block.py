"""A block of a transformer divided over the devices of a node: are its bits the same if another node takes it over?

    python bench/tensor_parallel_block.py [--devices 4] [--width 32] [--tokens 16] [--steps 4] [--json]

Each device is a process with one thread. A node is so many devices with a pipe between any two. What they exchange is
addressed by rank, and the owner of a slice adds what all have of it in the order of ranks. This process stands for the
neighbours in the pipeline: it has the message log (inputs, outputs and output gradients of the step's microbatches),
and sends each rank's gradients to the same rank of another node, which keeps a replica.

A device is killed in the middle of an exchange, and its node with it; the other node does the step again from the log.
Outputs, input gradients, weights and optimizer states are compared, bit by bit, with those of an undisturbed training.
See docs/design/tensor-parallel.md. The exit code is 1 if something is not as that page says.
"""

import argparse
import hashlib
import io
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
Gradients = list[dict[str, bytes]]  # of each rank
SAMPLES, MICROBATCHES, HEADS, KEY_HEADS = 2, 2, 8, 4
DROPOUT, EPSILON = 0.1, 1e-5
TOLERANCE = 1e-5  # of weights after all steps, over the largest of them
DEVICES = (2, 4)
STEPS = 4  # each of which loses a node
LAST_SUM = 8 * MICROBATCHES + 3  # number of the last exchange in a step

# The dimension in which each tensor is divided. None: every device has the whole of it, for its slice of the tokens.
DIVIDED = {
    "norm": None,
    "queries": 0,
    "queries_bias": 0,
    "keys": 0,
    "values": 0,
    "output": 1,
    "output_bias": None,
    "norm_mlp": None,
    "gate": 0,
    "up": 0,
    "down": 1,
    "down_bias": None,
}


class Order(StrEnum):
    """In which a slice's partial results are added. All but the first are for comparison."""

    RANKS = "ranks"
    RING = "ring"  # each slice begins with the device after its owner
    TREE = "tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained, and how the devices exchange."""

    devices: int
    tokens: int
    width: int
    steps: int
    order: Order = Order.RANKS
    delays: int | None = None  # a seed: every message waits for a random time of up to 2 ms

    @property
    def slice(self) -> tuple[int, int, int]:
        """The form of a device's slice of the tokens."""
        return self.tokens // self.devices, SAMPLES, self.width


class Kill(NamedTuple):
    """The death of a device, and so of the node that runs the block in that step."""

    step: int
    rank: int
    exchange: int | None  # the number of one in the step, when half of its messages are sent; None: before the commit


class Forward(NamedTuple):
    """Run the microbatch. slices: of its input, for each rank."""

    step: int
    microbatch: int
    slices: Sequence[bytes]


class Backward(NamedTuple):
    """Go back through the microbatch with slices of the gradient of its output."""

    microbatch: int
    slices: Sequence[bytes]


class SumGradients(NamedTuple):
    """Give the gradients of the step."""


class Commit(NamedTuple):
    """Take the optimizer step."""

    gradients: Gradients


class Give(NamedTuple):
    """Give the state."""


Command = Forward | Backward | SumGradients | Commit | Give


class NodeLost(Exception):
    """A device of the node has died."""


# a device


class Exchange:
    """What the devices of a node give each other. Nothing follows from when a message arrives."""

    def __init__(self, job: Job, rank: int, links: Mapping[int, Connection], kill: Kill | None) -> None:
        self._job, self._rank, self._links = job, rank, links
        self._kill = kill if kill is not None and kill.rank == rank else None
        self._random = None if job.delays is None else random.Random(f"{job.delays} {rank}")
        self._step, self._count = 0, 0
        self._out: SimpleQueue[tuple[Connection, bytes]] = SimpleQueue()
        Thread(target=self._send, daemon=True).start()

    def begin(self, step: int) -> None:
        self._step, self._count = step, 0

    def gather(self, part: Tensor) -> Tensor:
        """All devices' slices of the tokens."""
        return torch.cat(self._swap([part] * self._job.devices))

    def sum_slices(self, partial: Tensor) -> Tensor:
        """This device's slice of the tokens of what the devices' partial results add up to."""
        return added(self._swap(partial.chunk(self._job.devices)), self._job.order, self._rank)

    def sum_whole(self, partial: Tensor) -> Tensor:
        """The sum of small tensors that every device has the whole of: each one adds for itself, all alike."""
        return added(self._swap([partial] * self._job.devices), self._job.order, 0)

    def _swap(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Gives each rank its piece; returns what each has given this one, by rank."""
        for number, (rank, link) in enumerate(self._links.items()):
            if number == len(self._links) // 2 and self._kill and self._kill[::2] == (self._step, self._count):
                self._die()
            self._out.put((link, bytes_of(pieces[rank])))
        self._count += 1
        found = {self._rank: pieces[self._rank]}
        waited = {link: rank for rank, link in self._links.items()}
        while waited:
            for ready in wait(list(waited)):
                assert isinstance(ready, Connection)
                found[waited.pop(ready)] = tensor_of(ready.recv_bytes(), pieces[self._rank].shape)
        return [found[rank] for rank in range(self._job.devices)]

    def _send(self) -> None:
        """Runs on a thread of its own: two that send each other more than a pipe holds would wait for ever."""
        with suppress(ConnectionError):  # that another device has gone is noticed by who waits for it
            while True:
                link, content = self._out.get()
                if self._random is not None:
                    time.sleep(self._random.random() / 500)
                link.send_bytes(content)

    def _die(self) -> None:
        while not self._out.empty():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)


def added(parts: Sequence[Tensor], order: Order, owner: int) -> Tensor:
    """parts: by rank."""
    match order:
        case Order.RANKS:
            return added_in_turn(parts)
        case Order.RING:
            return added_in_turn([*parts[owner + 1 :], *parts[: owner + 1]])
        case Order.TREE:
            return added_as_tree(parts)


def added_in_turn(parts: Sequence[Tensor]) -> Tensor:
    result = parts[0]
    for part in parts[1:]:
        result = result + part
    return result


def added_as_tree(parts: Sequence[Tensor]) -> Tensor:
    half = len(parts) // 2
    return added_as_tree(parts[:half]) + added_as_tree(parts[half:]) if half else parts[0]


class Gather(torch.autograd.Function):
    """Slices of tokens to all tokens; back, the partial gradients of all devices to the sums of the slices."""

    @staticmethod
    def forward(context: Any, part: Tensor, exchange: Exchange) -> Tensor:
        context.exchange = exchange
        return exchange.gather(part)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return context.exchange.sum_slices(gradients[0]), None


class SumSlices(torch.autograd.Function):
    """Partial results of all tokens to the sums of the slices; back, slices of gradients to all of them."""

    @staticmethod
    def forward(context: Any, partial: Tensor, exchange: Exchange) -> Tensor:
        context.exchange = exchange
        return exchange.sum_slices(partial)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return context.exchange.gather(gradients[0]), None


def divided_block(weights: Weights, x: Tensor, heads: int, exchange: Exchange, masks: Sequence[Tensor]) -> Tensor:
    """A device's part, of its slice of the tokens. heads: of queries, on this device."""
    tokens: Tensor = Gather.apply(normal(x, weights["norm"]), exchange)  # type: ignore[no-untyped-call]
    seen = F.linear(attention(weights, tokens, heads), weights["output"])
    summed: Tensor = SumSlices.apply(seen, exchange)  # type: ignore[no-untyped-call]
    x = x + (summed + weights["output_bias"]) * masks[0]
    tokens = Gather.apply(normal(x, weights["norm_mlp"]), exchange)  # type: ignore[no-untyped-call]
    summed = SumSlices.apply(F.linear(inner(weights, tokens), weights["down"]), exchange)  # type: ignore[no-untyped-call]
    return x + (summed + weights["down_bias"]) * masks[1]


def undivided_block(weights: Weights, x: Tensor, masks: Sequence[Tensor]) -> Tensor:
    seen = attention(weights, normal(x, weights["norm"]), HEADS)
    x = x + F.linear(seen, weights["output"], weights["output_bias"]) * masks[0]
    middle = inner(weights, normal(x, weights["norm_mlp"]))
    return x + F.linear(middle, weights["down"], weights["down_bias"]) * masks[1]


def normal(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPSILON)


def attention(weights: Weights, x: Tensor, heads: int) -> Tensor:
    """Causal, with so many heads of queries; each head of keys serves a group of them."""
    queries = by_head(F.linear(x, weights["queries"], weights["queries_bias"]), heads)
    keys, values = (by_head(F.linear(x, weights[each]), heads * KEY_HEADS // HEADS) for each in ("keys", "values"))
    seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    return seen.permute(2, 0, 1, 3).flatten(2)


def by_head(x: Tensor, heads: int) -> Tensor:
    """(tokens, samples, width) as (samples, heads, tokens, width of a head)."""
    return x.reshape(*x.shape[:2], heads, -1).permute(1, 2, 0, 3)


def inner(weights: Weights, x: Tensor) -> Tensor:
    return F.silu(F.linear(x, weights["gate"])) * F.linear(x, weights["up"])


def dropout_masks(job: Job, step: int, microbatch: int) -> list[Tensor]:
    """Of all tokens, after attention and after the MLP: the same numbers however many devices there are."""
    masks = []
    for place in range(2):
        key = hashlib.sha256(f"{step} {microbatch} {place}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:6]))
        drawn = torch.rand((job.tokens, SAMPLES, job.width), generator=generator)
        masks.append((drawn >= DROPOUT) / (1 - DROPOUT))
    return masks


class Device:
    """A rank of a node: its slices of the weights, and of what the optimizer remembers."""

    def __init__(self, job: Job, rank: int, state: bytes, exchange: Exchange) -> None:
        self._job, self._rank, self._exchange = job, rank, exchange
        loaded = torch.load(io.BytesIO(state))
        self._weights = {name: tensor.requires_grad_() for name, tensor in loaded["weights"].items()}
        self._optimizer = make_optimizer(self._weights)
        self._optimizer.load_state_dict(loaded["optimizer"])
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # input and output of a microbatch

    def obey(self, command: Command) -> Any:
        match command:
            case Forward(step, microbatch, slices):
                return self._forward(step, microbatch, tensor_of(slices[self._rank], self._job.slice))
            case Backward(microbatch, slices):
                x, y = self._kept.pop(microbatch)
                y.backward(tensor_of(slices[self._rank], self._job.slice))  # type: ignore[no-untyped-call]
                return bytes_of(gradient_of(x))
            case SumGradients():
                return {name: bytes_of(self._gradient(name)) for name in self._weights}
            case Commit(gradients):
                for name, weight in self._weights.items():
                    weight.grad = tensor_of(gradients[self._rank][name], weight.shape)
                self._optimizer.step()
                return None
            case Give():
                return state_of({name: weight.detach() for name, weight in self._weights.items()}, self._optimizer)

    def _forward(self, step: int, microbatch: int, x: Tensor) -> bytes:
        if microbatch == 0:
            self._exchange.begin(step)
            self._optimizer.zero_grad()
        masks = [mask.chunk(self._job.devices)[self._rank] for mask in dropout_masks(self._job, step, microbatch)]
        y = divided_block(self._weights, x.requires_grad_(), HEADS // self._job.devices, self._exchange, masks)
        self._kept[microbatch] = x, y
        return bytes_of(y.detach())

    def _gradient(self, name: str) -> Tensor:
        gradient = gradient_of(self._weights[name])
        return gradient if DIVIDED[name] is not None else self._exchange.sum_whole(gradient)


def run_device(
    job: Job,
    rank: int,
    state: bytes,
    links: Mapping[int, Connection],
    log: Connection,
    foreign: Sequence[Connection],
    kill: Kill | None,
) -> None:
    """One process. It ends when another device of its node has gone, or nobody asks for anything any more."""
    for end in foreign:  # else nobody would see that another one has gone
        end.close()
    torch.set_num_threads(1)
    device = Device(job, rank, state, Exchange(job, rank, links, kill))
    with suppress(EOFError, ConnectionError):
        while True:
            log.send(device.obey(log.recv()))


def make_optimizer(weights: Weights) -> torch.optim.Optimizer:
    """With an eps that keeps it from making whole steps of what is rounding in a gradient of nearly zero."""
    return torch.optim.AdamW(weights.values(), lr=1e-2, eps=1e-3)


def gradient_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def tensor_of(content: bytes, form: Sequence[int]) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.float32).reshape(tuple(form))


# its neighbours


class Node:
    """The processes of a node, one for each device. `end` has to be called."""

    def __init__(self, job: Job, states: Sequence[bytes], kill: Kill | None) -> None:
        """states: of each rank. kill: of one of the devices."""
        fork = multiprocessing.get_context("fork")
        pipes = {(a, b): fork.Pipe() for b in range(job.devices) for a in range(b)}
        logs = [fork.Pipe() for _ in range(job.devices)]
        every = [end for pair in (*pipes.values(), *logs) for end in pair]
        self._kill, self._logs = kill, [mine for mine, _ in logs]
        self._processes = []
        for rank in range(job.devices):
            links = {b: ends[0] for (a, b), ends in pipes.items() if a == rank}
            links |= {a: ends[1] for (a, b), ends in pipes.items() if b == rank}
            log = logs[rank][1]
            foreign = [end for end in every if end not in (log, *links.values())]
            given = (job, rank, states[rank], links, log, foreign, kill)
            self._processes.append(fork.Process(target=run_device, args=given, daemon=True))
            self._processes[-1].start()
        for end in every:
            if end not in self._logs:
                end.close()

    def ask(self, command: Command) -> list[Any]:
        """What each rank answers. Raises NodeLost."""
        try:
            for log in self._logs:
                log.send(command)
            return [log.recv() for log in self._logs]
        except (EOFError, ConnectionError):
            raise NodeLost from None

    def before_commit(self, step: int) -> None:
        """The moment for a death that is not in an exchange."""
        if self._kill is not None and self._kill.exchange is None and self._kill.step == step:
            self._processes[self._kill.rank].kill()
            self._processes[self._kill.rank].join()

    def end(self) -> None:
        """The whole node goes."""
        for process, log in zip(self._processes, self._logs, strict=True):
            process.kill()
            process.join()
            process.close()
            log.close()


class Holders:
    """The node that runs the block, and the one that keeps a replica of it."""

    def __init__(self, job: Job, states: Sequence[bytes], kills: Sequence[Kill]) -> None:
        """kills: one of the first owner, one of its heir, one of the heir's heir and so on."""
        self._job, self._kills, self.takeovers = job, list(kills), 0
        self.owner, self.replica = self._node(states), self._node(states)

    def _node(self, states: Sequence[bytes]) -> Node:
        return Node(self._job, states, self._kills.pop(0) if self._kills else None)

    def take_over(self) -> None:
        """The replica becomes the owner; a new node gets a copy of each rank's state."""
        self.owner.end()
        self.owner = self.replica
        self.replica = self._node(self.owner.ask(Give()))
        self.takeovers += 1

    def commit(self, gradients: Gradients) -> None:
        """If the owner is lost now nothing is repeated: its gradients are where the replica is."""
        command = Commit(gradients)
        self.replica.ask(command)
        try:
            self.owner.ask(command)
        except NodeLost:
            self.take_over()

    def end(self) -> None:
        self.owner.end()
        self.replica.end()


class Message(NamedTuple):
    """What the log has of a microbatch, in slices."""

    x: list[bytes]
    y: list[bytes]
    y_gradient: list[bytes]


class Trained(NamedTuple):
    """All that came of a training."""

    numbers: Tensor  # outputs and input gradients of all steps
    states: Sequence[bytes]  # of each rank
    takeovers: int

    def everything(self) -> Tensor:
        whole = joined(self.states)
        tensors = [*whole.weights.values(), *(tensor for each in whole.remembered for tensor in each.values())]
        return torch.cat([self.numbers, *(tensor.flatten() for tensor in tensors)])


def train(job: Job, states: Sequence[bytes], steps: range, kills: Sequence[Kill] = ()) -> Trained:
    """states: of each rank, before the first step."""
    holders = Holders(job, states, kills)
    numbers: list[Tensor] = []
    try:
        for step in steps:
            log: dict[int, Message] = {}
            try:
                gradients, x_gradients = run_step(job, holders.owner, step, log)
            except NodeLost:
                holders.take_over()
                gradients, x_gradients = run_step(job, holders.owner, step, log)
            holders.owner.before_commit(step)
            holders.commit(gradients)
            slices = [*(message.y for message in log.values()), *x_gradients]
            numbers += [tensor_of(b"".join(each), (-1,)) for each in slices]
        owner, replica = holders.owner.ask(Give()), holders.replica.ask(Give())
        assert same_bits(joined(owner), joined(replica)), "the replica differs from its owner"
        return Trained(torch.cat(numbers), owner, holders.takeovers)
    finally:
        holders.end()


def run_step(job: Job, node: Node, step: int, log: dict[int, Message]) -> tuple[Gradients, list[list[bytes]]]:
    """The gradients of each rank, and those of the inputs. What is repeated must come to what the log has."""
    for microbatch in range(MICROBATCHES):
        x = [bytes_of(part) for part in inputs(job, step, microbatch).chunk(job.devices)]
        y = node.ask(Forward(step, microbatch, x))
        if microbatch in log:
            assert log[microbatch].y == y, "a forward that is repeated comes to another result"
        else:
            gradient = output_gradient(tensor_of(b"".join(y), (job.tokens, SAMPLES, job.width)))
            log[microbatch] = Message(x, y, [bytes_of(part) for part in gradient.chunk(job.devices)])
    x_gradients = [node.ask(Backward(microbatch, message.y_gradient)) for microbatch, message in log.items()]
    return node.ask(SumGradients()), x_gradients


def inputs(job: Job, step: int, microbatch: int) -> Tensor:
    """What the stage before sends."""
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    return torch.randn((job.tokens, SAMPLES, job.width), generator=generator)


def output_gradient(y: Tensor) -> Tensor:
    """What the stage after sends back, which wants each token to be as the one before."""
    return y - y.roll(1, 0)


def train_undivided(job: Job) -> Weights:
    """The weights after all steps of plain PyTorch in this process."""
    weights = {name: tensor.requires_grad_() for name, tensor in first_weights(job).items()}
    optimizer = make_optimizer(weights)
    for step in range(job.steps):
        optimizer.zero_grad()
        for microbatch in range(MICROBATCHES):
            y = undivided_block(weights, inputs(job, step, microbatch), dropout_masks(job, step, microbatch))
            y.backward(output_gradient(y.detach()))  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


# states


class Whole(NamedTuple):
    """A state as a checkpoint has it: undivided. remembered: by the optimizer, of each tensor."""

    weights: Weights
    remembered: Sequence[Weights]


def first_weights(job: Job) -> Weights:
    generator = torch.Generator().manual_seed(7)
    width, keys, middle = job.width, job.width * KEY_HEADS // HEADS, 4 * job.width
    forms = {
        "norm": (width,),
        "queries": (width, width),
        "queries_bias": (width,),
        "keys": (keys, width),
        "values": (keys, width),
        "output": (width, width),
        "output_bias": (width,),
        "norm_mlp": (width,),
        "gate": (middle, width),
        "up": (middle, width),
        "down": (width, middle),
        "down_bias": (width,),
    }
    return {name: torch.randn(form, generator=generator) * form[-1] ** -0.5 for name, form in forms.items()}


def divided(whole: Whole, devices: int) -> list[bytes]:
    """The state of each rank."""
    states = []
    for rank in range(devices):
        weights = {name: part_of(name, tensor, rank, devices) for name, tensor in whole.weights.items()}
        optimizer = make_optimizer(weights)
        remembered = {
            index: {key: part_of(name, tensor, rank, devices) for key, tensor in tensors.items()}
            for index, (name, tensors) in enumerate(zip(weights, whole.remembered, strict=False))
        }
        optimizer.load_state_dict({**optimizer.state_dict(), "state": remembered})
        states.append(state_of(weights, optimizer))
    return states


def state_of(weights: Weights, optimizer: torch.optim.Optimizer) -> bytes:
    content = io.BytesIO()
    torch.save({"weights": weights, "optimizer": optimizer.state_dict()}, content)
    return content.getvalue()


def part_of(name: str, tensor: Tensor, rank: int, devices: int) -> Tensor:
    """A single number, as the optimizer has of each tensor, is every device's."""
    dimension = DIVIDED[name]
    return (tensor if dimension is None or not tensor.dim() else tensor.chunk(devices, dimension)[rank]).clone()


def joined(states: Sequence[bytes]) -> Whole:
    """states: of each rank. What every device has the whole of must be the same everywhere."""
    loaded = [torch.load(io.BytesIO(state)) for state in states]
    first = loaded[0]
    weights = {name: whole_of(name, [each["weights"][name] for each in loaded]) for name in first["weights"]}
    remembered = [
        {
            key: whole_of(name, [each["optimizer"]["state"][index][key] for each in loaded])
            for key in first["optimizer"]["state"][index]
        }
        for index, name in enumerate(weights)
    ]
    return Whole(weights, remembered)


def whole_of(name: str, parts: Sequence[Tensor]) -> Tensor:
    dimension = DIVIDED[name]
    if dimension is not None and parts[0].dim():
        return torch.cat(list(parts), dimension)
    assert all(torch.equal(part, parts[0]) for part in parts), f"devices differ in {name}"
    return parts[0]


def same_bits(one: Whole, other: Whole) -> bool:
    pairs = [(one.weights, other.weights), *zip(one.remembered, other.remembered, strict=True)]
    return all(torch.equal(a[name], b[name]) for a, b in pairs for name in a)


# what is claimed


class Claim(NamedTuple):
    """What was compared, what came of it, and whether that is what the docs say."""

    text: str
    found: str
    holds: bool


def claims(job: Job) -> list[Claim]:
    start = divided(Whole(first_weights(job), ()), job.devices)
    steps, slow, last = range(job.steps), replace(job, delays=1), job.devices - 1
    expected = train(job, start, steps)

    def same(text: str, one: Trained, takeovers: int = 0) -> Claim:
        share = different(one, expected)
        return Claim(text, shown(share), not share and one.takeovers == takeovers)

    kills = [Kill(0, last, 2), Kill(1, 0, 11), Kill(2, last, LAST_SUM), Kill(3, 0, None)]
    begun = train(slow, start, steps[:1])
    elsewhere = divided(joined(begun.states), job.devices // 2)
    rest = train(slow, divided(joined(elsewhere), job.devices), steps[1:])
    resumed = Trained(torch.cat([begun.numbers, rest.numbers]), rest.states, 0)
    found = [
        same("saved, restored on another division, and back; messages delayed", resumed),
        same(
            "killed in a forward, a backward, a last sum, before a commit", train(job, start, steps, kills), len(kills)
        ),
        close("beside the undivided block", joined(expected.states).weights, train_undivided(job)),
    ]
    if job.devices > 2:  # two numbers have the same sum in every order
        for order in (Order.RING, Order.TREE):
            share = different(train(replace(job, order=order), start, steps[:1]), begun)
            found.append(Claim(f"sums in the order of a {order}", shown(share), share > 0))
    return found


def different(one: Trained, other: Trained) -> float:
    """The share of numbers whose bits differ."""
    a, b = (each.everything().view(torch.int32) for each in (one, other))
    return float((a != b).float().mean())


def shown(share: float) -> str:
    return f"{100 * share:.1f} % of numbers differ" if share else "bit-equal"


def close(text: str, one: Weights, other: Weights) -> Claim:
    """Other bits, and within tolerance."""
    largest = max(float(tensor.abs().max()) for tensor in other.values())
    distance = max(float((one[name] - tensor).abs().max()) for name, tensor in other.items()) / largest
    return Claim(text, f"off by {distance:.0e} at most", 0 < distance < TOLERANCE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, choices=DEVICES, default=DEVICES[-1])
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", action="store_true", help="print the claims as JSON")
    given = parser.parse_args()
    for name, least in (("width", HEADS), ("tokens", given.devices)):
        if getattr(given, name) < least or getattr(given, name) % least:
            parser.error(f"--{name}: expected a multiple of {least}, got {getattr(given, name)}")
    if given.steps < STEPS:
        parser.error(f"--steps: expected at least {STEPS}, got {given.steps}")
    torch.set_num_threads(1)
    found = claims(Job(devices=given.devices, tokens=given.tokens, width=given.width, steps=given.steps))
    if given.json:
        print(json.dumps([claim._asdict() for claim in found], indent=1))
    else:
        for claim in found:
            print(f"{claim.text:<65} {claim.found}{'' if claim.holds else '   NOT AS THE DOCS SAY'}")
    sys.exit(0 if all(claim.holds for claim in found) else 1)


if __name__ == "__main__":
    main()
