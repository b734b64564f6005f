"""Formatting of text for people: single lines, numbers, durations, sizes, and suggestions for unknown keys."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

MOST_CHARACTERS = 2000
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def one_line(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return the text as one line: white space becomes single spaces, each unprintable character a dot; a long line is
    cut in the middle. Use it for foreign text, such as errors of the user's code. most: the most characters.
    """
    line = " ".join("".join(c if c.isprintable() or c.isspace() else "\N{MIDDLE DOT}" for c in text).split())
    return shortened(line, most)


def shortened(text: str, most: int) -> str:
    """Return the text, cut in the middle if it has more than `most` characters."""
    half = (most - 5) // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def wrapped(text: str, width: int) -> str:
    """Wrap lines between words; indent continuations by two more spaces; keep quotes ("| ...") and long words whole."""
    return "\n".join(line for given in text.split("\n") for line in _lines(given, width))


def _lines(line: str, width: int) -> list[str]:
    indent = line[: len(line) - len(line.lstrip(" "))]
    if len(line) <= width or line.startswith(f"{indent}| "):
        return [line]
    further = f"{indent}  "
    return textwrap.wrap(
        line, width, subsequent_indent=further, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )


def suggestion(key: object, known: Sequence[str]) -> str:
    """Return the hint for an unknown key: "did you mean steps?" if a known key is similar, else all known keys."""
    near = get_close_matches(str(key)[:80], known, n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else f"expected some of {', '.join(known)}"


def count(number: int, thing: str) -> str:
    """Return a number with its noun: 1 worker, 2 workers."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def metrics(values: Mapping[str, float | None]) -> str:
    """Return metrics as text, the loss first: loss 2.3104, accuracy 0.25. A value of None means not finite."""
    return ", ".join(
        f"{one_line(name, 40)} {'not finite' if value is None else format(value, '.5g')}"
        for name, value in sorted(values.items(), key=lambda item: (item[0] != "loss", item[0]))
    )


def duration(seconds: float) -> str:
    """Return a duration as text: 5s, 2:05, 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(number: float) -> str:
    """Return a number of bytes as text: 512 B, 1.5 KiB, 20.0 MiB."""
    if number < 1024:
        return f"{number:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        number /= 1024
        if number < 1024:
            return f"{number:.1f} {unit}"
    return f"{number / 1024:.1f} TiB"


def printable(text: str, *, colours: bool = False) -> str:
    """Replace unprintable characters except tabs by spaces, so that foreign text cannot move the terminal's cursor.
    colours: keep colour codes; else remove them.
    """
    parts = _COLOUR.split(text)
    kept = _COLOUR.findall(text) if colours else [""] * (len(parts) - 1)
    clean = ["".join(c if c.isprintable() or c == "\t" else " " for c in part) for part in parts]
    return "".join(c + k for c, k in zip(clean, [*kept, ""], strict=True))
