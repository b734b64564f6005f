"""Options that are declared as the fields of a dataclass."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from bamboo_core.option_groups import grouped


@dataclass(frozen=True, kw_only=True)
class Size:
    width: Annotated[int, typer.Option(help="In metres.")]
    height: Annotated[int, typer.Option("--height", "-t", min=1)] = 2


@dataclass(frozen=True, kw_only=True)
class Paint:
    colour: Annotated[list[str] | None, typer.Option()] = None


def build(paint: Paint, name: str, size: Size, fast: Annotated[bool, typer.Option("--fast")] = False) -> None:
    typer.echo(f"{name} {size.width}x{size.height} {paint.colour} {fast}")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["wall", "--width", "3"], 0, "wall 3x2 None False"),
        (
            ["wall", "--width=3", "-t", "5", "--colour", "red", "--colour", "blue", "--fast"],
            0,
            "wall 3x5 ['red', 'blue'] True",
        ),
        (["wall"], 2, "--width"),
        (["wall", "--width", "3", "--height", "0"], 2, "--height"),
    ],
)
def test_the_fields_of_a_commands_groups_are_its_options(words: list[str], code: int, message: str) -> None:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(grouped(build))
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, message in done.output) == (code, True)


def test_the_commands_own_come_first_and_then_the_groups_in_their_order() -> None:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(grouped(build))
    names = [parameter.name for parameter in typer.main.get_command(app).params]
    assert names[:5] == ["name", "fast", "colour", "width", "height"]
