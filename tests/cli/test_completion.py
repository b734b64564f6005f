"""Shell completion of commands, flags and names of jobs."""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from remote_command_kit import Fake
from remote_kit import job, kubeconfig, server

BIN = Path(sys.executable).parent


@cache
def script() -> str:
    """Return the completion script that --show-completion prints for bash."""
    done = subprocess.run(
        [BIN / "bamboo", "--show-completion", "bash"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
    )
    return done.stdout


def completed(*words: str, **environment: str) -> list[str]:
    """Return the completions that bash offers for the last word."""
    bash = shutil.which("bash")
    assert bash
    typed = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _bamboo_completion bamboo"
    ask += '; printf "%s\n" "${COMPREPLY[@]}"'
    done = subprocess.run(
        [bash, "-c", f"{script()}\n{ask}"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **environment},
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_the_shell_completes_commands_flags_and_jobs(tmp_path: Path) -> None:
    assert completed("bamboo", "sus") == ["suspend"]
    assert completed("bamboo", "preempt", "story", "--ki") == ["--kill"]
    with server(Fake(job())) as (url, asked):
        path = str(kubeconfig(tmp_path / "config", url))
        assert completed("bamboo", "delete", "st", KUBECONFIG=path) == ["story"]
        assert completed("bamboo", "status", "x", KUBECONFIG=path) == []
    assert {one.method for one in asked} == {"GET"}
    assert completed("bamboo", "delete", "st", KUBECONFIG="/no/such") == []
