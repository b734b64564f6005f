"""The common style of tables: no borders, two spaces between columns, bold heads."""

from rich.table import Table


def plain_table(*columns: str, header: bool = True) -> Table:
    """Return a table with these columns. `>` before a name aligns its values to the right."""
    padding = (0, 2, 0, 0)
    table = Table(box=None, show_header=header, show_edge=False, pad_edge=False, padding=padding, header_style="bold")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    return table
