"""Commands on a cluster, against a small HTTP server: refusals and a closed pipe; the imports of the command line."""

import subprocess
import sys
from pathlib import Path

import pytest

from remote_command_kit import Fake, type_in
from remote_kit import Json, condition, job, kubeconfig, server

BIN = Path(sys.executable).parent


OVER = job(state="Failed", conditions=[condition("Failed", True, "StageLost", "stage 1 is lost")])


BUDGET = condition("Suspended", True, "BudgetSpent", "the budget of 5 is spent; a larger one helps")
SPENT = job(state="Suspended", conditions=[condition("Running", False), BUDGET])
PENDING = job(conditions=[condition("Running", False)], plan=None)


@pytest.mark.parametrize(
    ("body", "arguments", "code", "said"),
    [
        (job(), ["status", "other"], 1, "bamboo: there is no job other in namespace team\n"),
        (job(), ["status", "other", "-n", "else"], 1, "bamboo: there is no job other in namespace else\n"),
        (job(), ["status", "story", "-n", "No!"], 2, "--namespace No!: expected the name of a namespace"),
        (
            job(),
            ["status", "story", "--context", "x"],
            2,
            "not a usable kubeconfig: Invalid kube-config file. Expected object with name x in",
        ),
        (job(), ["status", "story", "-w", "-o", "json"], 2, "--output json: cannot be watched"),
        (job(), ["status", "No"], 2, "No: expected the name of a job"),
        (job(), ["list", "-A", "-n", "team"], 2, "--all-namespaces: cannot be combined with JOB"),
        (job(), ["logs", "story", "w9"], 1, "story has no worker w9; there are: w0, w1"),
        (job(), ["logs", "story", "-p"], 1, "story has no workers that have ended"),
        (job(), ["suspend", "story"], 2, "which loses its 100 steps; pass --yes to do it anyway"),
        (job(), ["delete", "story"], 2, "story is not over (Running, step 100/1000"),
        (OVER, ["suspend", "story"], 1, "story is over (Failed); it cannot be suspended"),
        (OVER, ["resume", "story"], 1, "story is over (Failed); submit it again"),
        (SPENT, ["resume", "story"], 1, "story cannot be resumed: the budget of 5 is spent; a larger one helps"),
        (SPENT, ["preempt", "story", "--random"], 1, "is not training (Suspended: the budget of 5 is spent; a larger"),
        (OVER, ["preempt", "story", "--random"], 1, "is not training (Failed: stage 1 is lost)"),
        (PENDING, ["preempt", "story", "--random"], 1, "story is not training"),
        (job(), ["preempt", "story"], 2, "expected one of --worker, --stage and --random"),
        (job(), ["submit", "FILE"], 1, "job story exists in namespace team (Running); --apply merges"),
        (job(), ["submit", "FILE", "--force"], 2, "--force: expected together with --apply"),
        (job(), ["submit", "FILE", "--dry-run", "-w"], 2, "leave out one of --dry-run and --watch"),
        (job(), ["page", "story"], 1, "no running bamboo-operator was found in the cluster"),
    ],
)
def test_what_is_refused_and_how(tmp_path: Path, body: Json, arguments: list[str], code: int, said: str) -> None:
    found, _, complained, asked = type_in(tmp_path, Fake(body), *arguments)
    assert (found, said in complained) == (code, True), complained
    assert all(one.method == "GET" for one in asked), "something was changed"


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    with server(Fake(job())) as (url, _):
        path = kubeconfig(tmp_path / "config", url)
        command = f"{BIN}/bamboo logs story --kubeconfig {path} | head -1; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("w0 | first\n0\n", "")


def test_nothing_heavy_is_imported_for_help() -> None:
    heavy = "[m for m in ('aiohttp', 'asyncio', 'kubernetes', 'torch') if m in sys.modules]"
    code = f"import sys, bamboo.cli.commands; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
