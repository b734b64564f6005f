"""The lines of a text, one at a time, since a file may have millions. Pure."""

from collections.abc import Iterator


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines with their numbers from 1 on, without their ends; ends of old systems count only if there are no
    others.
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
