"""Datasets, and which samples a microbatch holds. docs/data.md is the introduction."""

from bamboo_trainer.data.config import dataset_from
from bamboo_trainer.data.images import ImageFolder, ImageOptions
from bamboo_trainer.data.in_memory import STDLIB_BYTES, NpzDataset, TensorDataset, TextDataset, stdlib_text
from bamboo_trainer.data.order import microbatch_samples, permute, pure_seed, step_samples
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
    "NpzDataset",
    "Prefetched",
    "Sources",
    "TensorDataset",
    "TextDataset",
    "Tokens",
    "dataset_from",
    "microbatch_samples",
    "open_sources",
    "permute",
    "pure_seed",
    "stdlib_text",
    "step_samples",
]
