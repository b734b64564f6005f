"""Datasets, and the order of their samples. docs/data.md is the introduction."""

from bamboo_trainer.data.config import dataset_from
from bamboo_trainer.data.datasets import (
    HuggingFaceDataset,
    Indexed,
    Mixture,
    NpzDataset,
    Prefetched,
    TensorDataset,
    TextDataset,
    text_bytes,
)
from bamboo_trainer.data.order import permute, pure_seed, sample_numbers
from bamboo_trainer.data.sources import open_sources
from bamboo_trainer.data.token_file import Documents, Tokens

__all__ = [
    "Documents",
    "HuggingFaceDataset",
    "Indexed",
    "Mixture",
    "NpzDataset",
    "Prefetched",
    "TensorDataset",
    "TextDataset",
    "Tokens",
    "dataset_from",
    "open_sources",
    "permute",
    "pure_seed",
    "sample_numbers",
    "text_bytes",
]
