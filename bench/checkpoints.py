"""How fast a state goes into a checkpoint store and back, beside torch.distributed.checkpoint of the same state.

    python bench/checkpoints.py FOLDER [--layers 16] [--megabytes 64] [--repeat 3] [--json FILE]

In turn in one process: a snapshot in memory, which is all that training has to wait for; the write of all layers and
the commit, with every file synced; the reading, with every checksum compared; and `async_save` (its own wait, and until
it is done, files synced) and `load`. FOLDER is on the disk to be measured; the page cache makes reading faster.
"""

import argparse
import os
import shutil
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from _common import machine, median, say, show, write_json
from bamboo_core.checkpoint.data_record import DataRecord
from bamboo_core.checkpoint.layout import new_attempt
from bamboo_core.checkpoint.manifest import CheckpointManifest, DataPosition
from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_trainer.checkpoint.checkpointing import versions
from bamboo_trainer.checkpoint.layer_file import decode, encode
from bamboo_trainer.stage.state.layer_state import LayerState

T = TypeVar("T")
KINDS = ("parameter:{}.weight", "state:{}.weight:exp_avg", "state:{}.weight:exp_avg_sq")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--megabytes", type=int, default=64, help="of a layer")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder = arguments.folder / f"bench-{new_attempt(0).id}"
    folder.mkdir(parents=True)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo")
    try:
        states = made_up(arguments.layers, arguments.megabytes)
        seconds = [measure(states, folder) for _ in range(arguments.repeat)]
    finally:
        dist.destroy_process_group()
        shutil.rmtree(folder)
    size = sum(tensor.nbytes for state in states for tensor in state.tensors.values()) / 2**20
    rows = [
        (what, f"{median([one[what] for one in seconds]):.2f}", f"{size / median([one[what] for one in seconds]):.0f}")
        for what in seconds[0]
    ]
    show(f"{size / 1024:.2f} GiB, median of {arguments.repeat}", ("what", "seconds", "MiB/s"), rows)
    write_json(arguments.json, {"machine": machine(), "mebibytes": size, "seconds": seconds})


def made_up(layers: int, megabytes: int) -> list[LayerState]:
    """The state of made-up layers as AdamW has it: a parameter, and two tensors of its size."""
    elements = (megabytes << 20) // (4 * len(KINDS))
    return [
        LayerState(
            layer=layer,
            version=1,
            tensors={kind.format(layer): torch.randn(elements) for kind in KINDS},
            scalars={},
            names={"weight": KINDS[0].format(layer)},
        )
        for layer in range(layers)
    ]


def measure(states: list[LayerState], folder: Path) -> dict[str, float]:
    """Seconds by what was done."""
    seconds: dict[str, float] = {}
    flat = {name: tensor for state in states for name, tensor in state.tensors.items()}
    timed(seconds, "snapshot", lambda: [tensor.to("cpu", copy=True) for tensor in flat.values()])
    store = CheckpointStore(str(folder / "store"))
    manifest = timed(seconds, "write and commit", lambda: write(store, states))
    timed(seconds, "read and check", lambda: [decode(store.read_part(manifest, state.layer)) for state in states])
    other = folder / f"dcp-{manifest.attempt}"
    writer = FileSystemWriter(other, sync_files=True)
    begun = time.perf_counter()
    future: Any = timed(seconds, "async_save, training waits", lambda: async_save(flat, storage_writer=writer))
    future.result()
    seconds["async_save, whole"] = time.perf_counter() - begun
    into: dict[str, Tensor] = {name: torch.empty_like(tensor) for name, tensor in flat.items()}
    timed(seconds, "load", lambda: load(into, checkpoint_id=other))
    store.delete(manifest.place)
    shutil.rmtree(other)
    return seconds


def write(store: CheckpointStore, states: list[LayerState]) -> CheckpointManifest:
    attempt = new_attempt(1)
    manifest = CheckpointManifest(
        job="bench",
        step=attempt.step,
        attempt=attempt.id,
        layers=tuple(store.write_part(attempt, state.layer, encode(state)) for state in states),
        data=DataPosition(step=attempt.step, samples=0),
        seed=0,
        digest="0" * 16,
        versions=versions(),
        created=datetime.now(UTC),
        owner="0a",
        of_data=DataRecord(samples=1, order="0" * 16),
    )
    store.commit(manifest)
    return manifest


def timed(seconds: dict[str, float], what: str, work: Callable[[], T]) -> T:
    begun = time.perf_counter()
    result = work()
    seconds[what] = time.perf_counter() - begun
    say(f"{what}: {seconds[what]:.2f} s")
    return result


if __name__ == "__main__":
    main()
