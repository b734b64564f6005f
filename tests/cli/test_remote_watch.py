"""A job is followed until it is over."""

from pathlib import Path

from remote_command_kit import Fake, type_in
from remote_kit import condition, job

OVER = job(state="Failed", conditions=[condition("Failed", True, "StageLost", "stage 1 is lost")])


def test_run_on_a_cluster_is_submit_and_watch(tmp_path: Path) -> None:
    code, printed, complained, _ = type_in(tmp_path, Fake(OVER, there=False), "run", "FILE", "--on", "cluster")
    assert (code, complained.count("\n"), complained.startswith("warning: one pipeline:")) == (3, 1, True)
    assert printed.splitlines()[0] == "story created in namespace team"
    assert printed.splitlines()[-1] == "Failed: stage 1 is lost"
