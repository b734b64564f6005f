"""The common style of tables (no borders, two spaces between columns, bold heads), and of JSON."""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from rich.cells import cell_len
from rich.console import Group
from rich.table import Table
from rich.text import Text

GAP = 2  # columns between two columns of a table


def plain_table(*columns: str, header: bool = True) -> Table:
    """Return a table with these columns. `>` before a name aligns its values to the right."""
    padding = (0, GAP, 0, 0)
    table = Table(box=None, show_header=header, show_edge=False, pad_edge=False, padding=padding, header_style="bold")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    return table


def fitted(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int | None, left: Collection[str] = ()) -> Group:
    """Return a table of the rows; if it is wider than `width`, a table of heads and values for each row.

    left: heads of left-aligned columns, in addition to the first one, which names the row. Others align right.
    """
    columns = zip(heads, *rows, strict=True)
    if width is None or sum(max(map(cell_len, column)) + GAP for column in columns) - GAP <= width:
        table = plain_table(*(head if head in (heads[0], *left) else f">{head}" for head in heads))
        for row in rows:
            table.add_row(*map(Text, row))
        return Group(table)
    parts: list[Table | str] = []
    for row in rows:
        part = plain_table("", "", header=False)
        part.columns[1].no_wrap = False
        for head, value in zip(heads, row, strict=True):
            part.add_row(Text(head, style="bold"), Text(value))
        parts += [part, ""]
    return Group(*parts[:-1])


def indented_json(value: Any) -> str:
    """Return a value as indented JSON. Numbers that are not finite are null."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
