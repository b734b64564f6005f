"""How much memory is left."""

import os
from pathlib import Path

import pytest
import torch

from bamboo_trainer.memory.cgroup import HostMemory
from bamboo_trainer.memory.headroom import headroom

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        (1000 * PAGE, "9000 300 20 1 0 500 0\n", 3.0),
        (None, "9000 300 20 1 0 500 0\n", None),
        (1000, "", None),
    ],
)
def test_a_worker_says_how_much_more_it_could_hold_if_it_has_a_limit(
    limit: int | None, used: str, expected: float | None, tmp_path: Path
) -> None:
    (tmp_path / "used").write_text(used)
    memory = None if limit is None else HostMemory(limit, used=0)
    found = headroom([torch.device("cpu")], lambda: memory, tmp_path / "used")
    assert found == (None if expected is None else pytest.approx(expected))
