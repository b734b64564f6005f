"""A small profile of a model on a machine, as a document and parsed."""

import json
from typing import Any

from bamboo_core.planning.profile import SOURCES, ModelProfile, parse_profile


def document(**changes: Any) -> dict[str, Any]:
    layer = {"forward": 0.01, "backward": 0.02, "parameters": 400, "optimizer": 800, "gradients": 400, "boundary": 64}
    return {
        "format": "bamboo-profile",
        "version": 1,
        "name": "tiny",
        "device": "a processor",
        "samples": 4,
        "layers": [dict(layer, activations=100) for _ in range(3)],
        "network": {"flow": 1e9, "machine": 2e9, "latency": 0.001},
        "storage": {"write": 1e8, "read": 2e8},
        "times": {"start": 3.0, "detection": 0.5},
        "machine": {"memory": 1 << 30, "hostMemory": 1 << 31},
        "task": {"entrypoint": "a:build"},
        "sources": {name: {"text": "measured"} for name in SOURCES},
        **changes,
    }


def parsed(**changes: Any) -> ModelProfile:
    return parse_profile("p.json", json.dumps(document(**changes)))
