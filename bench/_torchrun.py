"""One rank of a training under torchrun, which saves with torch.distributed.checkpoint and goes on from the newest one.

    python -m torch.distributed.run --nproc-per-node STAGES _torchrun.py CONFIG.json

The layers, samples, split and optimizer are those of `_pipelining`. CONFIG: manifest; folder, for checkpoints and what
ranks tell; every: steps between two checkpoints. Each rank appends to FOLDER/progress-ATTEMPT-RANK as there.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from _pipelining import Rank, TorchSchedule, built, tell, train_step


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    folder = Path(config["folder"])
    progress = (folder / f"progress-{attempt}-{rank}").open("a", buffering=1)
    tell(progress, "pid", os.getpid())
    dist.init_process_group("gloo")
    mine = built(config["manifest"], rank, TorchSchedule.ONE_F_ONE_B)
    begin = _load(folder, rank, mine)
    tell(progress, "ready", begin)
    for step in range(begin, config["manifest"]["spec"]["training"]["steps"]):
        mine.optimizer.zero_grad()
        train_step(mine, step)
        mine.optimizer.step()
        tell(progress, "step", step)
        if (step + 1) % config["every"] == 0:
            _save(folder, rank, step + 1, mine)
    dist.destroy_process_group()


def _state(rank: int, mine: Rank) -> dict[str, Any]:
    model, optimizer = get_state_dict(mine.module, mine.optimizer)
    return {f"stage-{rank}": {"model": model, "optimizer": optimizer}}


def _save(folder: Path, rank: int, step: int, mine: Rank) -> None:
    """All ranks together; the first one says that it is complete."""
    save(_state(rank, mine), checkpoint_id=folder / f"checkpoint-{step}")
    if rank == 0:
        (folder / f"complete-{step}").touch()


def _load(folder: Path, rank: int, mine: Rank) -> int:
    """The step after which training goes on; 0, with nothing loaded, if there is no checkpoint."""
    steps = [int(path.name.split("-")[1]) for path in folder.glob("complete-*")]
    if not steps:
        return 0
    state = _state(rank, mine)
    load(state, checkpoint_id=folder / f"checkpoint-{max(steps)}")
    own = state[f"stage-{rank}"]
    set_state_dict(mine.module, mine.optimizer, model_state_dict=own["model"], optim_state_dict=own["optimizer"])
    return max(steps)


if __name__ == "__main__":
    main()
