"""docs/cli.md: every command is on it."""

import runpy
from typing import Any

from bamboo.cli.commands import app
from crd_kit import ROOT

GENERATOR: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "generate_cli.py"))
PAGE = (ROOT / "docs" / "cli.md").read_text()


def test_every_command_is_on_it() -> None:
    names = [command.name or str(command.callback and command.callback.__name__) for command in app.registered_commands]
    shown = {name for name, command in zip(names, app.registered_commands, strict=True) if not command.hidden}
    assert shown == {*GENERATOR["HERE"], *GENERATOR["CLUSTER"]}
    for name in shown:
        assert f"\n### bamboo {name}\n" in PAGE
        assert all(part.count("Example:") < 2 for part in GENERATOR["help_of"](name).split("\n\n")), name
