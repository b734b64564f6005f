"""What the dashboards and alerts ask Prometheus, as a person's browser would send it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "dashboards"
NAMES = ("fleet", "job", "takeovers", "cost")


@dataclass(frozen=True, slots=True)
class Asked:
    """A query of a panel, with its variables still in it."""

    dashboard: str
    panel: str
    expr: str

    def filled(self, variables: Mapping[str, str]) -> str:
        expr = self.expr
        for name in sorted(variables, key=len, reverse=True):
            expr = expr.replace(f"${name}", variables[name])
        assert "$" not in expr, f"a variable of {self} is not known"
        return expr


def dashboard(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def panels(name: str) -> Iterator[dict[str, Any]]:
    """The panels of a dashboard without the rows' headings."""
    yield from (panel for panel in dashboard(name)["panels"] if panel["type"] != "row")


def queries() -> list[Asked]:
    """All panels' and annotations', of all dashboards."""
    found = []
    for name in NAMES:
        for panel in panels(name):
            found += [Asked(name, panel["title"], target["expr"]) for target in panel["targets"]]
        for note in dashboard(name)["annotations"]["list"]:
            found.append(Asked(name, f"annotation {note['name']}", note["expr"]))
    return found


def alerts() -> list[dict[str, Any]]:
    document = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]
