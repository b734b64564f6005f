"""Datasets, and which samples a microbatch holds. docs/data.md is the introduction."""

from bamboo_trainer.data.config import dataset_from, source_names
from bamboo_trainer.data.images import ImageFolder, ImageOptions
from bamboo_trainer.data.in_memory import STDLIB_BYTES, NpzDataset, TensorDataset, TextDataset, stdlib_text
from bamboo_trainer.data.mixture import Ends, Mixture, by_source
from bamboo_trainer.data.order import Passes, permute, pure_seed
from bamboo_trainer.data.prefetched import Prefetched
from bamboo_trainer.data.rows import HuggingFaceDataset, Indexed
from bamboo_trainer.data.sources import CacheConfig, Sources, open_sources
from bamboo_trainer.data.tokens import Documents, Tokens

__all__ = [
    "STDLIB_BYTES",
    "CacheConfig",
    "Documents",
    "Ends",
    "HuggingFaceDataset",
    "ImageFolder",
    "ImageOptions",
    "Indexed",
    "Mixture",
    "NpzDataset",
    "Passes",
    "Prefetched",
    "Sources",
    "TensorDataset",
    "TextDataset",
    "Tokens",
    "by_source",
    "dataset_from",
    "open_sources",
    "permute",
    "pure_seed",
    "source_names",
    "stdlib_text",
]
