"""Words that come from elsewhere, such as errors of the user's code, in places that promise one line."""

MOST_CHARACTERS = 2000


def one_line(text: str, most: int = MOST_CHARACTERS) -> str:
    """The same in one line of printable characters: line breaks become spaces. Cut in its middle if it is too long."""
    line = " ".join("".join(c if c.isprintable() or c.isspace() else "\N{MIDDLE DOT}" for c in text).split())
    if len(line) <= most:
        return line
    half = (most - 5) // 2
    return f"{line[:half]} ... {line[-half:]}"
