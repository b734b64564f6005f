"""Counts of a layer's arithmetic operations and memory traffic."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from bamboo_trainer.tasks.inspection import layer_costs
from bamboo_trainer.tasks.operations import OPERATIONS_PER_BYTE
from layer_cost_kit import BATCH, LENGTH, WIDTH, Chooses, First, products, recurrent, sequences


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.flatten(0, -2).T @ gradient.flatten(0, -2)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight)


CONVOLUTION = 3 * 2 * BATCH * WIDTH * LENGTH * LENGTH * 9


KINDS = {
    "linear": (lambda: nn.Linear(WIDTH, WIDTH), products(WIDTH, WIDTH)),
    "lstm": (recurrent, products(2 * WIDTH, 4 * WIDTH)),
    "deep lstm": (
        lambda: First(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True, dropout=0.1)),
        products(WIDTH * (4 + 6), 4 * WIDTH),
    ),
    "projected lstm": (
        lambda: First(nn.LSTM(WIDTH, WIDTH, proj_size=32)),
        products(WIDTH + 32, 4 * WIDTH) + products(WIDTH, 32),
    ),
    "gru": (lambda: First(nn.GRU(WIDTH, WIDTH, batch_first=True)), products(2 * WIDTH, 3 * WIDTH)),
    "rnn": (lambda: First(nn.RNN(WIDTH, WIDTH, batch_first=True)), products(2 * WIDTH, WIDTH)),
    "convolution": (lambda: nn.Conv1d(LENGTH, LENGTH, 9, padding=4), CONVOLUTION),
    "attention": (Attention, (4 + 10) * BATCH * LENGTH * LENGTH * WIDTH),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 4, 512, batch_first=True),
        products(4 * WIDTH + 1024, WIDTH),
    ),
    "custom function": (Custom, products(WIDTH, WIDTH)),
    "depends on values": (Chooses, products(WIDTH, WIDTH)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_products_count_forward_and_backward(kind: str) -> None:
    """The counted operations are at least those of the matrix products; the memory traffic adds a bounded number."""
    layer, operations = KINDS[kind]
    counted = layer_costs(sequences(layer), BATCH)[1]
    size = sum(p.numel() for p in layer().parameters())
    assert operations <= counted
    assert counted <= operations + OPERATIONS_PER_BYTE * 4 * (400 * BATCH * LENGTH * WIDTH + 10 * size)


def test_an_embedding_costs_what_it_reads_and_its_gradient() -> None:
    small, large = (layer_costs(sequences(vocabulary=n), BATCH)[0] for n in (50, 5000))
    assert small > OPERATIONS_PER_BYTE * 4 * BATCH * LENGTH * WIDTH
    assert large - small >= OPERATIONS_PER_BYTE * 4 * 4950 * WIDTH


def test_what_only_moves_memory_counts_and_what_only_looks_does_not() -> None:
    looks, squashes = layer_costs(sequences(lambda: nn.Flatten(2), nn.Tanh), BATCH)[1:]
    passes = OPERATIONS_PER_BYTE * 4 * BATCH * LENGTH * WIDTH
    assert looks <= 3 * passes  # its gradient begins and ends here
    assert squashes >= 5 * passes
