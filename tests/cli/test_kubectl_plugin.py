"""The same commands as kubectl's plugin."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from bamboo.cli.cluster import kubectl_plugin
from remote_command_kit import Fake
from remote_kit import job, kubeconfig, server

BIN = Path(sys.executable).parent


def test_kubectl_finds_the_plugin_and_completes_it(tmp_path: Path) -> None:
    with server(Fake(job())) as (url, asked):
        environment = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "KUBECONFIG": str(kubeconfig(tmp_path / "config", url)),
        }
        kubectl = shutil.which("kubectl", path=environment["PATH"])
        assert kubectl
        found = subprocess.run([kubectl, "bamboo", "list"], capture_output=True, text=True, timeout=60, env=environment)
        assert (found.returncode, "story  Running" in found.stdout) == (0, True), found
        offered = subprocess.run(
            ["kubectl_complete-bamboo", "delete", "st"], capture_output=True, text=True, timeout=60, env=environment
        )
        assert offered.stdout.split() == ["story", ":0"]
    assert {one.method for one in asked} == {"GET"}


def test_the_plugin_has_the_clusters_commands_only() -> None:
    done = CliRunner().invoke(kubectl_plugin.app, ["--help"])
    names = {
        line.split()[0]
        for line in done.stdout.split("Commands:")[1].splitlines()
        if line.startswith("  ") and line[2:3].strip()
    }
    assert {"submit", "list", "status", "preempt", "page"} <= names
    assert names.isdisjoint({"run", "traces", "completion"})
