"""The lines of a text, one at a time, because a file may have millions. Pure."""

from collections.abc import Iterator


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines with their numbers from 1, without line ends; a lone carriage return counts only if there are no
    other ends.
    """
    if "\n" not in text:
        yield from enumerate(text.splitlines(), start=1)
        return
    number, start = 0, 0
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        number += 1
        yield number, text[start:end].rstrip("\r")
        start = end + 1
