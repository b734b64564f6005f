"""The command `bamboo doctor` and its table."""

import io
import json
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from bamboo.remote.doctor import rendered
from diagnosis_kit import CRD, found, lease, operator_pod, spot_node
from remote_command_kit import Fake, type_in
from remote_kit import Asked, job


class Cluster(Fake):
    """An API server with a complete installation of Bamboo. node: the cluster's only Node; None for four spot nodes."""

    def __init__(self, node: dict[str, Any] | None = None) -> None:
        super().__init__(job())
        self.nodes = [node] if node else [spot_node(f"node-{number}") for number in range(4)]

    def __call__(self, asked: Asked) -> tuple[int, Any]:
        last = asked.path.rsplit("/", 1)[1]
        if asked.method == "POST":
            return 201, {"status": {"allowed": True}}
        here: dict[str, Any] = {
            "pods": {"items": [operator_pod("--lease=bamboo-system/bamboo-operator")]},
            "bamboo-operator": lease("2999-01-01T00:00:00Z"),
            "nodes": {"items": self.nodes},
            "resourcequotas": {"items": []},
            "bamboojobs.bamboo.dev": yaml.safe_load(CRD.read_text()),
        }
        return (200, here[last]) if last in here else super().__call__(asked)


def test_a_cluster_on_which_all_is_well_has_no_problem(tmp_path: Path) -> None:
    code, out, err, asked = type_in(tmp_path, Cluster(), "doctor")
    assert (code, err) == (0, "")
    assert "0 problems, 0 warnings" in out
    assert {one.method for one in asked} == {"GET", "POST"}, "nothing is changed"
    assert all(one.path.endswith("accessreviews") for one in asked if one.method == "POST")


def test_a_job_on_the_cluster_and_a_file_are_looked_at_alike(tmp_path: Path) -> None:
    for named in ("story", "FILE"):
        code, out, _, _ = type_in(tmp_path, Cluster(), "doctor", named, "-o", "json")
        assert code == 0
        (workers,) = (one for one in json.loads(out) if one["subject"] == "workers")
        assert workers == {"severity": "ok", "subject": "workers", "message": "a worker fits on 4 nodes", "advice": ""}


def test_a_problem_is_the_exit_code(tmp_path: Path) -> None:
    code, out, _, _ = type_in(tmp_path, Cluster(node=spot_node("a", ready=False)), "doctor")
    assert code == 1
    assert "none of 1 node is ready" in out


def test_mistakes_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("apiVersion: bamboo.dev/v1alpha1\nkind: BambooJob\nmetadata: {name: a}\nspec: {topology: {}}\n")
    code, _, err, asked = type_in(tmp_path, Cluster(), "doctor", str(wrong))
    assert (code, asked) == (2, [])
    assert "spec.task" in err


def test_the_table_is_legible_at_80_columns() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(rendered(found(operators=[])))
    shown = console.export_text()
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert "install Bamboo with its chart" in shown
