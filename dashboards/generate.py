"""Generator of the Grafana dashboards in this folder, run by `make docs`. A test fails if a committed one is stale."""

import json
from pathlib import Path

import cost
import fleet
import job
from grafana_foundation_sdk.cog.encoder import JSONEncoder

FOLDER = Path(__file__).parent
MAKERS = {"fleet": fleet.make, "job": job.make, "cost": cost.make}


def text(name: str) -> str:
    """Return the dashboard's JSON."""
    return json.dumps(MAKERS[name](), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    for name in MAKERS:
        (FOLDER / f"{name}.json").write_text(text(name))
