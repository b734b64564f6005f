"""All layers of a GPT model as one stage in this process, on one thread, for benchmarks of a stage's own work."""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from bamboo_trainer.models import gpt
from bamboo_trainer.stage.stage import Stage, build_stage
from bamboo_trainer.training import TrainingConfig

CONTEXT = 128  # tokens of a sample


def add_arguments(parser: argparse.ArgumentParser, *, width: int) -> None:
    parser.add_argument("--width", type=int, default=width)
    parser.add_argument("--blocks", type=int, default=2)


def add_turns(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=8, help=f"samples of {CONTEXT} tokens in a microbatch")
    parser.add_argument("--repeat", type=int, default=9)


@contextmanager
def gpt_stage(width: int, blocks: int, *, microbatches: int, rows: int) -> Iterator[tuple[Stage, TrainingConfig]]:
    """rows: samples of a microbatch."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        text.write_text("def f(): pass\n" * 2000)
        task = gpt.build({"dModel": width, "heads": 8, "blocks": blocks, "context": CONTEXT, "text": str(text)})
        config = TrainingConfig(
            seed=0, precision="fp32", max_gradient_norm=None, microbatches=microbatches, micro_batch_size=rows
        )
        yield build_stage(task, 0, [(0, len(task.layers))], config), config
