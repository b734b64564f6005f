"""Manifests for tests of the task check, `--load`."""

import copy
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]


SPIRALS: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "spirals.yaml").read_text())


def manifest(**spec: Any) -> dict[str, Any]:
    document = copy.deepcopy(SPIRALS)
    document["spec"] |= spec
    return document
