"""The prototype of a block that is divided over the devices of a node keeps its bits through losses of nodes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "bench" / "tensor_parallel_block.py"


@pytest.mark.slow
def test_sums_in_the_order_of_ranks_keep_their_bits_and_others_do_not() -> None:
    command = [sys.executable, str(PROGRAM), "--tokens", "8", "--width", "16", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {claim["text"]: claim["found"] for claim in json.loads(done.stdout)}
    assert found["killed in a forward, a backward, a last sum, before a commit"] == "bit-equal"
    assert found["saved, restored on another division, and back; messages delayed"] == "bit-equal"
    for order in ("ring", "tree"):
        assert found[f"sums in the order of a {order}"].endswith("% of numbers differ")
    assert "beside the undivided block" in found
