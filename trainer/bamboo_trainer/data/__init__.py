"""Datasets, and the samples of each microbatch. docs/data.md is the introduction."""

from bamboo_trainer.data.config import dataset_from
from bamboo_trainer.data.images import ImageFolder, ImageOptions
from bamboo_trainer.data.in_memory import (
    STDLIB_BYTES,
    NpzDataset,
    TensorDataset,
    TextDataset,
    stdlib_text,
    text_bytes,
)
from bamboo_trainer.data.mixture import Mixture
from bamboo_trainer.data.order import permute, pure_seed, sample_numbers
from bamboo_trainer.data.prefetched import Prefetched
from bamboo_trainer.data.rows import HuggingFaceDataset, Indexed
from bamboo_trainer.data.sources import CacheConfig, Sources, open_sources
from bamboo_trainer.data.tokens import Documents, Tokens

__all__ = [
    "STDLIB_BYTES",
    "CacheConfig",
    "Documents",
    "HuggingFaceDataset",
    "ImageFolder",
    "ImageOptions",
    "Indexed",
    "Mixture",
    "NpzDataset",
    "Prefetched",
    "Sources",
    "TensorDataset",
    "TextDataset",
    "Tokens",
    "dataset_from",
    "open_sources",
    "permute",
    "pure_seed",
    "sample_numbers",
    "stdlib_text",
    "text_bytes",
]
