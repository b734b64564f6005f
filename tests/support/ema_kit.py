"""Stages with averages."""

from torch import Tensor

from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.state.optimizer_state import AVERAGE


def averages(stages: list[Stage]) -> dict[str, Tensor]:
    found = {}
    for stage in stages:
        tensors, meta = stage.values.snapshot()
        found |= dict(zip(meta["names"], tensors, strict=True))
    names = {name: name.removeprefix("state:").removesuffix(f":{AVERAGE}") for name in found if AVERAGE in name}
    return {short: found[name] for name, short in names.items()}
