"""`bamboo simulate --strategy`."""

import json
from typing import Any

from typer.testing import CliRunner

from bamboo.cli.commands import app


def test_the_command() -> None:
    def called(*arguments: str) -> Any:
        flags = ["simulate", "--seeds", "1", "--hours", "2", "--preempt-rate", "0.3", *arguments]
        return CliRunner().invoke(app, flags)

    done = called("--strategy", "bamboo", "--strategy", "checkpoint", "-o", "json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [one["case"] for one in found] == ["0.3 bamboo", "0.3 checkpoint"]
    assert found[0]["mean"]["goodput"] > found[1]["mean"]["goodput"] > 0
    assert called("--strategy", "bamboo", "--workload", "vgg").stdout.count("\n") == 2
    for arguments, problem in (
        (("--strategy", "x"), "--strategy must be one of on-demand, checkpoint"),
        (("--strategy", "all", "--steps", "5"), "--steps: cannot be combined with --strategy"),
        (("job.yaml", "--strategy", "all"), "--strategy: expected no job"),
        (("--strategy", "all", "--workload", "x"), "cannot read the profile x-v100"),
    ):
        refused = called(*arguments)
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
        assert problem in refused.stderr
