"""Folders of the repository, for tests that start processes or read files."""

import os
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
TESTS: Final = ROOT / "tests"
SUPPORT: Final = TESTS / "support"
# For PYTHONPATH of workers that a test starts: tasks, and programs in place of a worker's own, and what they import.
TASK_PATH: Final = os.pathsep.join(
    str(ROOT / folder)
    for folder in ("tests/support", "tests/simulation", "tests/trainer", "tests/core", "tests/client", "examples")
)
